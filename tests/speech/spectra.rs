//! Log-mel spectra against their definition.

use std::f64::consts::TAU;

use crate::log_mel::{BANDS, FFT, HOP, LogMel, SAMPLE_RATE, WINDOW, bands, frames, samples};
use crate::support::{farthest, numbers};

/// The definition in F64: no fast transform, every bin summed up.
fn naive(sound: &[f32], frame: usize, band: usize) -> f64 {
    let band = &bands()[band];
    let energy = |bin: usize| {
        let sum = |wave: fn(f64) -> f64| -> f64 {
            let samples = sound[frame * HOP..][..WINDOW].iter().enumerate();
            samples
                .map(|(at, sample)| {
                    let hann = 0.5 - 0.5 * (TAU * at as f64 / WINDOW as f64).cos();
                    let angle = TAU * (at * bin) as f64 / FFT as f64;
                    hann * f64::from(*sample) * wave(angle)
                })
                .sum()
        };
        sum(f64::cos).powi(2) + sum(f64::sin).powi(2)
    };
    let weights = band.weights.iter().enumerate();
    let energy: f64 = weights
        .map(|(offset, weight)| f64::from(*weight) * energy(band.first + offset))
        .sum();
    energy.max(1e-8).ln()
}

#[test]
fn log_energies_are_those_of_a_naive_transform() {
    // Two frames and a part of a third, which does not count.
    let sound = numbers(3, samples(2) + HOP - 1);
    let energies = LogMel::new().log_energies(&sound);
    assert_eq!(energies.len(), 2 * BANDS);
    for band in 0..BANDS {
        for frame in 0..2 {
            let (found, expected) = (energies[band * 2 + frame], naive(&sound, frame, band));
            assert!(
                (f64::from(found) - expected).abs() < 1e-4,
                "band {band}, frame {frame}: {found}, not {expected}"
            );
        }
    }
}

#[test]
fn silence_is_finite_and_its_features_are_zero() {
    let log_mel = LogMel::new();
    let silence = vec![0.0; samples(3)];
    let floor = (1e-8_f32).ln();
    assert!(log_mel.log_energies(&silence).iter().all(|e| *e == floor));
    assert!(log_mel.features(&silence).iter().all(|f| *f == 0.0));
    assert_eq!(log_mel.features(&silence[..WINDOW - 1]), [0.0; 0]);
}

#[test]
fn features_have_mean_zero_and_deviation_one_whatever_the_level() {
    let log_mel = LogMel::new();
    let sound = numbers(5, samples(50));
    let features = log_mel.features(&sound);
    for band in features.chunks(50) {
        let mean = band.iter().sum::<f32>() / 50.0;
        let variance = band.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 50.0;
        assert!(mean.abs() < 1e-4 && (variance - 1.0).abs() < 1e-3);
    }
    let louder: Vec<f32> = sound.iter().map(|sample| 8.0 * sample).collect();
    let other = log_mel.features(&louder);
    assert!(farthest(&other, &features) < 1e-3);
}

#[test]
fn a_tone_is_loudest_in_the_bands_around_it() {
    for hertz in [200.0_f64, 1000.0, 3000.0] {
        let wave = |at| (TAU * hertz * at as f64 / f64::from(SAMPLE_RATE)).sin() as f32;
        let sound: Vec<f32> = (0..WINDOW).map(wave).collect();
        let energies = LogMel::new().log_energies(&sound);
        let loudest = (0..BANDS).max_by(|a, b| energies[*a].total_cmp(&energies[*b]));
        let band = &bands()[loudest.unwrap()];
        let bin = f64::from(SAMPLE_RATE) / FFT as f64;
        // A Hann window of 25 ms is two bins wide to each side.
        let low = (band.first as f64 - 2.0) * bin;
        let high = ((band.first + band.weights.len()) as f64 + 2.0) * bin;
        assert!((low..high).contains(&hertz), "{hertz} Hz in {low}..{high}");
    }
}

#[test]
fn bands_share_each_bin_between_the_first_peak_and_the_last() {
    let mut sums = vec![0.0; FFT / 2 + 1];
    let bands = bands();
    for band in &bands {
        assert!(!band.weights.is_empty(), "a band between two bins is deaf");
        for (offset, weight) in band.weights.iter().enumerate() {
            assert!((0.0..=1.0).contains(weight));
            sums[band.first + offset] += weight;
        }
    }
    let inner = bands[1].first..bands[BANDS - 1].first;
    for (bin, sum) in sums.iter().enumerate() {
        match inner.contains(&bin) {
            true => assert!((sum - 1.0).abs() < 1e-3, "bin {bin}: {sum}"),
            false => assert!(*sum <= 1.001, "bin {bin}: {sum}"),
        }
    }
}

#[test]
fn as_many_samples_as_so_many_frames_need() {
    assert_eq!((frames(0), frames(WINDOW - 1), frames(WINDOW)), (0, 0, 1));
    for count in 1..20 {
        assert_eq!(frames(samples(count)), count);
        assert_eq!(frames(samples(count) + HOP - 1), count);
        assert_eq!(frames(samples(count) - 1), count - 1);
    }
}
