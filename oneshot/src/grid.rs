//! The grid of a group of weights: codes, a scale, a zero point.

use crate::Quantize;

/// Codes from `least` to `most`, of which `zero` means 0: `value = (code − zero) · scale`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Range {
    pub(crate) scale: f32,
    pub(crate) zero: u8,
    pub(crate) least: u8,
    pub(crate) most: u8,
}

impl Range {
    /// The range of some values: their largest magnitude, or all between the smallest and the
    /// largest with 0 among them.
    fn between(low: f64, high: f64, quantize: &Quantize) -> Self {
        let most = ((1u32 << quantize.bits) - 1) as u8;
        if quantize.symmetric {
            // As many codes on both sides: one code is not used.
            let zero = 1u8 << (quantize.bits - 1);
            let steps = f64::from(most - zero);
            let scale = low.abs().max(high.abs()) / steps;
            return Self {
                scale: usable(scale),
                zero,
                least: 1,
                most,
            };
        }
        let (low, high) = (low.min(0.0), high.max(0.0));
        let scale = usable((high - low) / f64::from(most));
        let zero = (-low / f64::from(scale)).round_ties_even();
        Self {
            scale,
            zero: zero.clamp(0.0, f64::from(most)) as u8,
            least: 0,
            most,
        }
    }

    /// The range for values, each of which counts as much as its `weight` says; with a search, of
    /// those inside of the one of all values the one of least squared error.
    pub(crate) fn of(values: &[f64], weights: &[f64], quantize: &Quantize) -> Self {
        let low = values
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min)
            .min(0.0);
        let high = values.iter().copied().fold(0.0, f64::max);
        let whole = Self::between(low, high, quantize);
        if !quantize.search_range || low == high {
            return whole;
        }
        const STEPS: usize = 12;
        let part = |step: usize| 1.0 - 0.04 * step as f64;
        let mut best = (whole.error(values, weights), whole);
        for lower in 0..STEPS {
            // A symmetric range has one end.
            let uppers = match quantize.symmetric {
                true => lower..lower + 1,
                false => 0..STEPS,
            };
            for upper in uppers {
                let range = Self::between(part(lower) * low, part(upper) * high, quantize);
                let error = range.error(values, weights);
                if error < best.0 {
                    best = (error, range);
                }
            }
        }
        best.1
    }

    fn error(&self, values: &[f64], weights: &[f64]) -> f64 {
        let pairs = values.iter().zip(weights);
        pairs
            .map(|(value, weight)| {
                let off = value - self.value(self.code(*value));
                weight * off * off
            })
            .sum()
    }

    /// The nearest code.
    pub(crate) fn code(&self, value: f64) -> u8 {
        let steps = (value / f64::from(self.scale)).round_ties_even() + f64::from(self.zero);
        steps.clamp(f64::from(self.least), f64::from(self.most)) as u8
    }

    /// What a code means: exactly what F32 gives.
    pub(crate) fn value(&self, code: u8) -> f64 {
        f64::from((f32::from(code) - f32::from(self.zero)) * self.scale)
    }

    /// What a code is of the scale.
    pub(crate) fn multiple(&self, code: u8) -> f64 {
        f64::from(code) - f64::from(self.zero)
    }

    /// The same codes, each worth another multiple.
    pub(crate) fn with_scale(self, scale: f64) -> Self {
        Self {
            scale: usable(scale),
            ..self
        }
    }
}

/// A scale that a quotient survives: of zeros alone any is right.
fn usable(scale: f64) -> f32 {
    let scale = scale as f32;
    match scale >= f32::MIN_POSITIVE && scale.is_finite() {
        true => scale,
        false => 1.0,
    }
}
