//! Recordings for those who have none: each symbol is a chord of two tones.

use std::f32::consts::TAU;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::corpus::{Corpus, Recording, SYMBOLS};
use crate::log_mel::SAMPLE_RATE;

/// The tones of a telephone's keys [Hz] (ITU-T Q.23): rows and columns.
const ROWS: [f32; 4] = [697.0, 770.0, 852.0, 941.0];
const COLUMNS: [f32; 3] = [1209.0, 1336.0, 1477.0];

/// Recordings of each symbol.
const TRAIN: usize = 30;
const TEST: usize = 10;

/// The same recordings each time.
pub(crate) fn corpus() -> Corpus {
    let mut rng = StdRng::seed_from_u64(0);
    let mut part = |count| {
        let symbols = (0..SYMBOLS).flat_map(|symbol| std::iter::repeat_n(symbol, count));
        symbols.map(|symbol| recording(symbol, &mut rng)).collect()
    };
    Corpus {
        name: "tones",
        train: part(TRAIN),
        test: part(TEST),
    }
}

/// A chord of 0.15 to 0.3 s, up to 3 % out of tune, that swells and dies away.
fn recording(symbol: usize, rng: &mut StdRng) -> Recording {
    // On a telephone the 0 is below the 8.
    let key = if symbol == 0 { 10 } else { symbol - 1 };
    let tune: f32 = rng.random_range(0.97..1.03);
    let seconds: f32 = rng.random_range(0.15..0.3);
    let [low, high] = [ROWS[key / 3], COLUMNS[key % 3]].map(|tone| tone * tune);
    let phase: f32 = rng.random_range(0.0..TAU);
    let count = (seconds * SAMPLE_RATE as f32) as usize;
    let samples = (0..count).map(|at| {
        let time = at as f32 / SAMPLE_RATE as f32;
        let swell = (TAU / 2.0 * at as f32 / count as f32).sin();
        0.25 * swell * ((TAU * low * time + phase).sin() + (TAU * high * time).sin())
    });
    Recording {
        symbol,
        samples: samples.collect(),
    }
}
