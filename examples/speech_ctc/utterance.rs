//! Strings of symbols: recordings one after the other, with silence between them.

use std::ops::{Range, RangeInclusive};

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::corpus::Recording;
use crate::log_mel::SAMPLE_RATE;

/// Symbols in a string.
pub(crate) const LENGTHS: RangeInclusive<usize> = 1..=5;
/// Silence before, between and after them [s].
const SILENCE: Range<f32> = 0.05..0.3;
/// How loud silence is, relative to full scale [dB].
const NOISE: Range<f32> = -75.0..-50.0;
/// By how much each recording is made louder [dB].
const LEVEL: Range<f32> = -10.0..6.0;

/// A spoken string.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Utterance {
    /// At [`SAMPLE_RATE`].
    pub(crate) samples: Vec<f32>,
    /// What is said.
    pub(crate) symbols: Vec<usize>,
    /// In which samples each of them is said.
    pub(crate) spans: Vec<Range<usize>>,
    /// Amplitude of the silence, and the seed of more of it.
    silence: (f32, u64),
}

/// White noise.
fn extend(samples: &mut Vec<f32>, count: usize, amplitude: f32, rng: &mut StdRng) {
    samples.extend((0..count).map(|_| amplitude * rng.random_range(-1.0..1.0)));
}

/// The factor of a level in dB.
fn factor(decibels: f32) -> f32 {
    10_f32.powf(decibels / 20.0)
}

impl Utterance {
    /// Joins recordings; length of each silence, its level and that of each recording come from
    /// `rng`.
    pub(crate) fn join(recordings: &[&Recording], rng: &mut StdRng) -> Self {
        let amplitude = factor(rng.random_range(NOISE));
        let pause = |samples: &mut Vec<f32>, rng: &mut StdRng| {
            let seconds = rng.random_range(SILENCE);
            let count = (seconds * SAMPLE_RATE as f32) as usize;
            extend(samples, count, amplitude, rng);
        };
        let mut samples = Vec::new();
        let mut spans = Vec::with_capacity(recordings.len());
        pause(&mut samples, rng);
        for recording in recordings {
            let level = factor(rng.random_range(LEVEL));
            let start = samples.len();
            samples.extend(recording.samples.iter().map(|sample| level * sample));
            spans.push(start..samples.len());
            pause(&mut samples, rng);
        }
        Self {
            samples,
            symbols: recordings.iter().map(|one| one.symbol).collect(),
            spans,
            silence: (amplitude, rng.random()),
        }
    }

    /// The samples, with silence at the end up to `length`; as they are if they are longer.
    pub(crate) fn padded(&self, length: usize) -> Vec<f32> {
        let mut samples = self.samples.clone();
        let missing = length.saturating_sub(samples.len());
        let (amplitude, seed) = self.silence;
        let mut rng = StdRng::seed_from_u64(seed);
        extend(&mut samples, missing, amplitude, &mut rng);
        samples
    }
}

/// Strings of so many symbols in which each recording is heard once, in an order that the seed
/// determines; the last string may be shorter.
pub(crate) fn strings(
    recordings: &[Recording],
    lengths: RangeInclusive<usize>,
    seed: u64,
) -> Vec<Utterance> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut shuffled: Vec<&Recording> = recordings.iter().collect();
    shuffled.shuffle(&mut rng);
    let mut rest = &shuffled[..];
    let mut strings = Vec::new();
    while !rest.is_empty() {
        let (string, others) = rest.split_at(rng.random_range(lengths.clone()).min(rest.len()));
        strings.push(Utterance::join(string, &mut rng));
        rest = others;
    }
    strings
}
