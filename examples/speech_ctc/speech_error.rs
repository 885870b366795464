//! What is wrong with a folder of recordings.

use std::path::PathBuf;

use thiserror::Error;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum SpeechError {
    /// The folder cannot be read.
    #[error("cannot read {}: {reason}", .path.display())]
    Folder { path: PathBuf, reason: String },
    /// There is no WAV file in it.
    #[error(
        "there is no .wav file in {}: `--data` is the folder of the Free Spoken Digit \
         Dataset, or its folder `recordings`",
        .path.display()
    )]
    NoRecordings { path: PathBuf },
    /// A file is not called `{digit}_{speaker}_{index}.wav`.
    #[error(
        "{} is not called {{digit}}_{{speaker}}_{{index}}.wav, as 7_theo_12.wav is: its \
         digit is not known",
        .path.display()
    )]
    Name { path: PathBuf },
    /// It is damaged, or no WAV file.
    #[error("cannot read {} as WAV: {reason}", .path.display())]
    Wav { path: PathBuf, reason: String },
    /// It is sound, but of another kind.
    #[error("{} has {what} {found}, not {expected}: convert it", .path.display())]
    Format {
        path: PathBuf,
        what: &'static str,
        expected: u32,
        found: u32,
    },
    /// A sample of a file of floats is infinite or no number.
    #[error("sample {sample} of {} is infinite or no number", .path.display())]
    NotFinite { path: PathBuf, sample: usize },
    /// It is too short for a single frame.
    #[error("{} has {samples} samples; {least} are needed for a frame", .path.display())]
    Short {
        path: PathBuf,
        samples: usize,
        least: usize,
    },
    /// All files belong to the other part of the split.
    #[error(
        "{} has no {part} recordings, those with {indices} in their names",
        .path.display()
    )]
    Split {
        path: PathBuf,
        part: &'static str,
        indices: &'static str,
    },
}
