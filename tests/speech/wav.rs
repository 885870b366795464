//! WAV files that are read, and those that are refused by name.

use std::fs;
use std::path::{Path, PathBuf};

use hound::{SampleFormat, WavSpec, WavWriter};
use tempfile::TempDir;

use crate::corpus::{Corpus, SYMBOLS, parse_wav};
use crate::log_mel::WINDOW;
use crate::speech_error::SpeechError;

const MONO: WavSpec = WavSpec {
    channels: 1,
    sample_rate: 8000,
    bits_per_sample: 16,
    sample_format: SampleFormat::Int,
};

fn write(path: &Path, spec: WavSpec, samples: &[i32]) {
    let mut writer = WavWriter::create(path, spec).unwrap();
    for sample in samples {
        match spec.sample_format {
            SampleFormat::Int => writer.write_sample(*sample).unwrap(),
            SampleFormat::Float => writer.write_sample(*sample as f32 / 4.0).unwrap(),
        }
    }
    writer.finalize().unwrap();
}

/// A folder with recordings 0, 5 and 12 of every digit.
fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for digit in 0..SYMBOLS {
        for index in [0, 5, 12] {
            let samples = vec![(1000 * digit + index) as i32; WINDOW + digit];
            let name = format!("{digit}_some_one_{index}.wav");
            write(&dir.path().join(name), MONO, &samples);
        }
    }
    dir
}

fn refused(dir: &Path) -> SpeechError {
    let error = Corpus::load(Some(dir), false).expect_err("the folder is damaged");
    assert!(!error.to_string().is_empty());
    error
}

#[test]
fn the_split_of_the_dataset_is_kept() {
    let dir = folder();
    let corpus = Corpus::load(Some(dir.path()), false).unwrap();
    assert_eq!((corpus.train.len(), corpus.test.len()), (20, 10));
    let third = &corpus.test[3];
    assert_eq!((third.symbol, third.samples.len()), (3, WINDOW + 3));
    assert_eq!(third.samples[0], 3000.0 / 32768.0);
    // For those who choose settings: test recordings are in neither part.
    let corpus = Corpus::load(Some(dir.path()), true).unwrap();
    assert_eq!((corpus.train.len(), corpus.test.len()), (10, 10));
    assert_eq!(corpus.test[3].samples[0], 3005.0 / 32768.0);
    assert_eq!(corpus.train[3].samples[0], 3012.0 / 32768.0);
}

#[test]
fn the_folder_above_is_understood_and_other_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::rename(folder().keep(), dir.path().join("recordings")).unwrap();
    fs::write(dir.path().join("recordings/README.md"), "speech").unwrap();
    let corpus = Corpus::load(Some(dir.path()), false).unwrap();
    assert_eq!(corpus.train.len(), 20);
}

#[test]
fn limiting_follows_the_seed() {
    let dir = folder();
    let limited = |seed| {
        let mut corpus = Corpus::load(Some(dir.path()), false).unwrap();
        corpus.limit(7, seed);
        assert_eq!(corpus.test.len(), 10);
        corpus.train
    };
    assert_eq!(limited(1).len(), 7);
    assert_eq!(limited(1), limited(1));
    assert_ne!(limited(1), limited(2));
}

#[test]
fn integers_of_any_width_and_floats_have_the_same_scale() {
    let dir = tempfile::tempdir().unwrap();
    let read = |spec: WavSpec, sample| {
        let path = dir.path().join(format!("{}.wav", spec.bits_per_sample));
        write(&path, spec, &[sample; WINDOW]);
        parse_wav(&path, fs::File::open(&path).unwrap()).unwrap()[0]
    };
    for bits in [8, 16, 24, 32] {
        let spec = WavSpec {
            bits_per_sample: bits,
            ..MONO
        };
        assert_eq!(read(spec, -(1 << (bits - 2))), -0.5, "{bits} bits");
    }
    let spec = WavSpec {
        bits_per_sample: 32,
        sample_format: SampleFormat::Float,
        ..MONO
    };
    assert_eq!(read(spec, -2), -0.5);
}

#[test]
fn folders_without_recordings_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = refused(&missing);
    assert!(matches!(&error, SpeechError::Folder { path, .. } if *path == missing));
    assert_matches!(refused(dir.path()), SpeechError::NoRecordings { .. });
}

#[test]
fn a_name_without_digit_or_index_is_refused() {
    for name in [
        "seven_theo_1.wav",
        "10_theo_1.wav",
        "7_1.wav",
        "7_theo_x.wav",
        "7.wav",
    ] {
        let dir = folder();
        let path = dir.path().join(name);
        fs::copy(dir.path().join("7_some_one_0.wav"), &path).unwrap();
        assert_eq!(refused(dir.path()), SpeechError::Name { path }, "{name}");
    }
}

#[test]
fn a_part_without_recordings_is_refused() {
    for (kept, part) in [(0, "training"), (12, "test")] {
        let dir = folder();
        for entry in fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if !path.to_str().unwrap().ends_with(&format!("_{kept}.wav")) {
                fs::remove_file(path).unwrap();
            }
        }
        let error = refused(dir.path());
        assert!(matches!(error, SpeechError::Split { part: found, .. } if found == part));
    }
}

/// Replaces a sound file, and returns the refusal, which must name it.
fn with_file(change: impl FnOnce(&Path)) -> SpeechError {
    let dir = folder();
    let path = dir.path().join("4_some_one_12.wav");
    change(&path);
    let error = refused(dir.path());
    assert_says!(error, "4_some_one_12.wav");
    error
}

#[test]
fn another_rate_or_number_of_channels_is_refused_with_both_numbers() {
    let stereo = WavSpec {
        channels: 2,
        ..MONO
    };
    let error = with_file(|path| write(path, stereo, &[5; 2 * WINDOW]));
    let text = error.to_string();
    assert!(
        matches!(
            error,
            SpeechError::Format {
                expected: 1,
                found: 2,
                ..
            }
        ),
        "{text}"
    );
    let fast = WavSpec {
        sample_rate: 44100,
        ..MONO
    };
    let error = with_file(|path| write(path, fast, &[5; WINDOW]));
    let text = error.to_string();
    assert!(
        matches!(
            error,
            SpeechError::Format {
                expected: 8000,
                found: 44100,
                ..
            }
        ),
        "{text}"
    );
    assert_says!(text, "sample rate");
}

#[test]
fn short_empty_and_cut_files_are_refused() {
    let error = with_file(|path| write(path, MONO, &[5; WINDOW - 1]));
    assert_matches!(
        error,
        SpeechError::Short {
            samples: 199,
            least: 200,
            ..
        }
    );
    let error = with_file(|path| fs::write(path, []).unwrap());
    assert_matches!(error, SpeechError::Wav { .. });
    let error = with_file(|path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() - 3]).unwrap();
    });
    assert_matches!(error, SpeechError::Wav { .. });
}

#[test]
fn samples_that_are_no_numbers_are_refused() {
    let error = with_file(|path| {
        let spec = WavSpec {
            bits_per_sample: 32,
            sample_format: SampleFormat::Float,
            ..MONO
        };
        let mut writer = WavWriter::create(path, spec).unwrap();
        for index in 0..WINDOW {
            let sample = if index == 150 { f32::NAN } else { 0.5 };
            writer.write_sample(sample).unwrap();
        }
        writer.finalize().unwrap();
    });
    assert_matches!(error, SpeechError::NotFinite { sample: 150, .. });
}

/// Each byte of the header with each value, and each length: an error or samples, no panic.
#[test]
fn no_damage_of_a_header_panics() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("4_one_1.wav");
    write(&path, MONO, &[5; WINDOW]);
    let sound = fs::read(&path).unwrap();
    let header = sound.len() - 2 * WINDOW;
    let name = PathBuf::from("4_one_1.wav");
    let mut refused = 0;
    for at in 0..header {
        for value in 0..=u8::MAX {
            let mut bytes = sound.clone();
            bytes[at] = value;
            refused += usize::from(parse_wav(&name, bytes.as_slice()).is_err());
        }
    }
    // Most of them are noticed.
    assert!(refused > header * 200, "{refused} of {}", header * 256);
    for length in 0..sound.len() {
        assert!(
            parse_wav(&name, &sound[..length]).is_err(),
            "{length} bytes"
        );
    }
}
