//! What is wrong with a folder of recordings.

use std::fmt;
use std::path::PathBuf;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SpeechError {
    /// The folder cannot be read.
    Folder { path: PathBuf, reason: String },
    /// There is no WAV file in it.
    NoRecordings { path: PathBuf },
    /// A file is not called `{digit}_{speaker}_{index}.wav`.
    Name { path: PathBuf },
    /// It is damaged, or no WAV file.
    Wav { path: PathBuf, reason: String },
    /// It is sound, but of another kind.
    Format {
        path: PathBuf,
        what: &'static str,
        expected: u32,
        found: u32,
    },
    /// A sample of a file of floats is infinite or no number.
    NotFinite { path: PathBuf, sample: usize },
    /// It is too short for a single frame.
    Short {
        path: PathBuf,
        samples: usize,
        least: usize,
    },
    /// All files belong to the other part of the split.
    Split {
        path: PathBuf,
        part: &'static str,
        indices: &'static str,
    },
}

impl fmt::Display for SpeechError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder { path, reason } => {
                write!(f, "cannot read {}: {reason}", path.display())
            }
            Self::NoRecordings { path } => write!(
                f,
                "there is no .wav file in {}: `--data` is the folder of the Free Spoken Digit \
                 Dataset, or its folder `recordings`",
                path.display()
            ),
            Self::Name { path } => write!(
                f,
                "{} is not called {{digit}}_{{speaker}}_{{index}}.wav, as 7_theo_12.wav is: its \
                 digit is not known",
                path.display()
            ),
            Self::Wav { path, reason } => {
                write!(f, "cannot read {} as WAV: {reason}", path.display())
            }
            Self::Format {
                path,
                what,
                expected,
                found,
            } => write!(
                f,
                "{} has {what} {found}, not {expected}: convert it",
                path.display()
            ),
            Self::NotFinite { path, sample } => write!(
                f,
                "sample {sample} of {} is infinite or no number",
                path.display()
            ),
            Self::Short {
                path,
                samples,
                least,
            } => write!(
                f,
                "{} has {samples} samples; {least} are needed for a frame",
                path.display()
            ),
            Self::Split {
                path,
                part,
                indices,
            } => write!(
                f,
                "{} has no {part} recordings, those with {indices} in their names",
                path.display()
            ),
        }
    }
}

impl std::error::Error for SpeechError {}
