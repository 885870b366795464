//! Spoken symbols, one recording each: real ones from WAV files, or tones.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use hound::{SampleFormat, WavReader};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::log_mel::{SAMPLE_RATE, WINDOW};
use crate::speech_error::SpeechError;
use crate::tones;

/// How many symbols there are: the digits.
pub(crate) const SYMBOLS: usize = 10;

/// One symbol, spoken once.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Recording {
    /// Below [`SYMBOLS`].
    pub(crate) symbol: usize,
    /// At [`SAMPLE_RATE`], within ±1.
    pub(crate) samples: Vec<f32>,
}

/// Recordings to train with, and others to test with.
#[derive(Debug, Clone)]
pub(crate) struct Corpus {
    pub(crate) name: &'static str,
    pub(crate) train: Vec<Recording>,
    pub(crate) test: Vec<Recording>,
}

/// The dataset's own split: recordings 0 to 4 of each speaker and digit are the test set.
const TEST: std::ops::RangeInclusive<u32> = 0..=4;
/// Of the others, those that judge settings.
const VALIDATION: std::ops::RangeInclusive<u32> = 5..=9;

impl Corpus {
    /// The recordings of a folder, or of the folder `recordings` in it; tones without a folder.
    ///
    /// With `validate` the recordings 5 to 9 take the place of the test set and are left out of the
    /// training: whoever chooses settings must not look at the test set.
    pub(crate) fn load(dir: Option<&Path>, validate: bool) -> Result<Self, SpeechError> {
        let Some(dir) = dir else {
            return Ok(tones::corpus());
        };
        let inner = dir.join("recordings");
        let dir = if inner.is_dir() { &inner } else { dir };
        let mut corpus = Self {
            name: "spoken digits",
            train: Vec::new(),
            test: Vec::new(),
        };
        let tested = if validate { VALIDATION } else { TEST };
        for path in wav_files(dir)? {
            let (symbol, index) = parse_name(&path)?;
            if validate && TEST.contains(&index) {
                continue;
            }
            let part = match tested.contains(&index) {
                true => &mut corpus.test,
                false => &mut corpus.train,
            };
            let samples = read_wav(&path)?;
            part.push(Recording { symbol, samples });
        }
        let missing = |part, indices| SpeechError::Split {
            path: dir.to_path_buf(),
            part,
            indices,
        };
        match (corpus.train.is_empty(), corpus.test.is_empty(), validate) {
            (true, ..) => Err(missing(
                "training",
                "higher indices than the test recordings",
            )),
            (_, true, true) => Err(missing("validation", "the indices 5 to 9")),
            (_, true, false) => Err(missing("test", "the indices 0 to 4")),
            _ => Ok(corpus),
        }
    }

    /// Keeps at most `count` training recordings, which the seed chooses.
    pub(crate) fn limit(&mut self, count: usize, seed: u64) {
        if count < self.train.len() {
            self.train.shuffle(&mut StdRng::seed_from_u64(seed));
            self.train.truncate(count);
        }
    }
}

/// All WAV files of a folder, by name.
fn wav_files(dir: &Path) -> Result<Vec<PathBuf>, SpeechError> {
    let failed = |error: std::io::Error| SpeechError::Folder {
        path: dir.to_path_buf(),
        reason: error.to_string(),
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let extension = path
            .extension()
            .map(|extension| extension.to_ascii_lowercase());
        if extension.is_some_and(|extension| extension == "wav") {
            files.push(path);
        }
    }
    files.sort();
    match files.is_empty() {
        true => Err(SpeechError::NoRecordings {
            path: dir.to_path_buf(),
        }),
        false => Ok(files),
    }
}

/// Digit and index of `{digit}_{speaker}_{index}.wav`.
fn parse_name(path: &Path) -> Result<(usize, u32), SpeechError> {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let parts = stem.and_then(|stem| {
        let (digit, rest) = stem.split_once('_')?;
        let (_speaker, index) = rest.rsplit_once('_')?;
        let digit = digit.parse().ok().filter(|digit| *digit < SYMBOLS)?;
        Some((digit, index.parse().ok()?))
    });
    parts.ok_or_else(|| SpeechError::Name {
        path: path.to_path_buf(),
    })
}

/// The samples of a mono WAV file at 8 kHz, integers of 8 to 32 bits or F32, scaled to ±1.
pub(crate) fn read_wav(path: &Path) -> Result<Vec<f32>, SpeechError> {
    let file = fs::File::open(path).map_err(|error| SpeechError::Wav {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })?;
    parse_wav(path, std::io::BufReader::new(file))
}

/// [`read_wav`] of bytes from anywhere; errors name `path`.
pub(crate) fn parse_wav(path: &Path, bytes: impl Read) -> Result<Vec<f32>, SpeechError> {
    let damaged = |error: hound::Error| SpeechError::Wav {
        path: path.to_path_buf(),
        reason: error.to_string(),
    };
    let format = |what, expected, found| match found == expected {
        true => Ok(()),
        false => Err(SpeechError::Format {
            path: path.to_path_buf(),
            what,
            expected,
            found,
        }),
    };
    let mut reader = WavReader::new(bytes).map_err(damaged)?;
    let spec = reader.spec();
    format("a number of channels of", 1, spec.channels.into())?;
    format("a sample rate [Hz] of", SAMPLE_RATE, spec.sample_rate)?;
    let samples: Vec<f32> = match spec.sample_format {
        SampleFormat::Float => reader.samples::<f32>().collect::<Result<_, _>>(),
        SampleFormat::Int => {
            let most = (1_u64 << (spec.bits_per_sample.clamp(1, 32) - 1)) as f32;
            let samples = reader.samples::<i32>();
            samples.map(|sample| Ok(sample? as f32 / most)).collect()
        }
    }
    .map_err(damaged)?;
    if samples.len() < WINDOW {
        return Err(SpeechError::Short {
            path: path.to_path_buf(),
            samples: samples.len(),
            least: WINDOW,
        });
    }
    match samples.iter().position(|sample| !sample.is_finite()) {
        Some(sample) => Err(SpeechError::NotFinite {
            path: path.to_path_buf(),
            sample,
        }),
        None => Ok(samples),
    }
}
