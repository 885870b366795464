//! What an ear makes of sound: the logarithm of its energy in bands that widen with frequency.

use std::f32::consts::TAU;

use microfft::real::rfft_256;

/// Samples per second.
pub(crate) const SAMPLE_RATE: u32 = 8000;
/// Samples of a frame: 25 ms.
pub(crate) const WINDOW: usize = 200;
/// Samples from one frame to the next: 10 ms.
pub(crate) const HOP: usize = 80;
/// Length of the transform of a frame, which is padded with zeros.
pub(crate) const FFT: usize = 256;
/// Bands.
pub(crate) const BANDS: usize = 32;
/// Where the lowest band begins and the highest ends [Hz].
const LOWEST: f32 = 60.0;
const HIGHEST: f32 = SAMPLE_RATE as f32 / 2.0;
/// Energy that counts as none: that of white noise at −100 dB.
const FLOOR: f32 = 1e-8;

/// Log-mel spectra of sounds.
///
/// Frames with a Hann window, their power spectrum, triangular bands on the mel scale
/// 2595·log₁₀(1 + f/700) (O'Shaughnessy 1987), the natural logarithm, and per utterance and band a
/// mean of 0 and a standard deviation of 1 over the frames.
pub(crate) struct LogMel {
    window: Vec<f32>,
    bands: Vec<Band>,
}

/// One triangle: the first bin of the spectrum that it covers, and the weights from there on.
pub(crate) struct Band {
    pub(crate) first: usize,
    pub(crate) weights: Vec<f32>,
}

/// Frames that fit into so many samples.
pub(crate) fn frames(samples: usize) -> usize {
    match samples.checked_sub(WINDOW) {
        Some(rest) => 1 + rest / HOP,
        None => 0,
    }
}

/// Samples that so many frames need, at least one.
pub(crate) fn samples(frames: usize) -> usize {
    WINDOW + HOP * (frames - 1)
}

impl LogMel {
    pub(crate) fn new() -> Self {
        let hann = |at| 0.5 - 0.5 * (TAU * at as f32 / WINDOW as f32).cos();
        Self {
            window: (0..WINDOW).map(hann).collect(),
            bands: bands(),
        }
    }

    /// The spectra of all frames, normalized: `[bands, frames]`.
    pub(crate) fn features(&self, sound: &[f32]) -> Vec<f32> {
        let mut features = self.log_energies(sound);
        let frames = frames(sound.len()).max(1);
        features.chunks_mut(frames).for_each(normalize);
        features
    }

    /// Logarithms of the energies: `[bands, frames]`.
    pub(crate) fn log_energies(&self, sound: &[f32]) -> Vec<f32> {
        let frames = frames(sound.len());
        let mut energies = vec![0.0; BANDS * frames];
        for frame in 0..frames {
            let mut input = [0.0; FFT];
            let sound = &sound[frame * HOP..][..WINDOW];
            for ((input, sample), weight) in input.iter_mut().zip(sound).zip(&self.window) {
                *input = sample * weight;
            }
            let spectrum = spectrum(&mut input);
            for (index, band) in self.bands.iter().enumerate() {
                let bins = band.weights.iter().zip(&spectrum[band.first..]);
                let energy: f32 = bins.map(|(weight, bin)| weight * bin).sum();
                energies[index * frames + frame] = energy.max(FLOOR).ln();
            }
        }
        energies
    }
}

/// Energies of the bins from 0 Hz to half the sample rate.
fn spectrum(input: &mut [f32; FFT]) -> [f32; FFT / 2 + 1] {
    let half = rfft_256(input);
    let mut energies = [0.0; FFT / 2 + 1];
    for (energy, bin) in energies.iter_mut().zip(half.iter()) {
        *energy = bin.norm_sqr();
    }
    // The first and the last are real, and share the first place.
    energies[0] = half[0].re.powi(2);
    energies[FFT / 2] = half[0].im.powi(2);
    energies
}

/// Mean 0 and standard deviation 1; a constant becomes 0.
fn normalize(values: &mut [f32]) {
    let count = values.len() as f32;
    let mean = values.iter().sum::<f32>() / count;
    let variance = values
        .iter()
        .map(|value| (value - mean).powi(2))
        .sum::<f32>()
        / count;
    let deviation = variance.sqrt().max(1e-3);
    for value in values {
        *value = (*value - mean) / deviation;
    }
}

/// Triangles whose corners are evenly spaced in mel, each from the peak of the one before to that
/// of the next.
pub(crate) fn bands() -> Vec<Band> {
    let mel = |hertz: f32| 2595.0 * (1.0 + hertz / 700.0).log10();
    let hertz = |mel: f32| 700.0 * (10_f32.powf(mel / 2595.0) - 1.0);
    let corner = |index: usize| {
        let share = index as f32 / (BANDS + 1) as f32;
        hertz(mel(LOWEST) + share * (mel(HIGHEST) - mel(LOWEST)))
    };
    let bin = SAMPLE_RATE as f32 / FFT as f32;
    let band = |index| {
        let [low, peak, high] = [0, 1, 2].map(|offset| corner(index + offset));
        let first = (low / bin).ceil() as usize;
        let last = ((high / bin).floor() as usize).min(FFT / 2);
        let weight = |at: usize| {
            let hertz = at as f32 * bin;
            ((hertz - low) / (peak - low)).min((high - hertz) / (high - peak))
        };
        Band {
            first,
            weights: (first..=last).map(|at| weight(at).max(0.0)).collect(),
        }
    };
    (0..BANDS).map(band).collect()
}
