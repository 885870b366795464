//! Floats to codes.

use rayon::prelude::*;

use crate::shares::share;
use crate::simd::{Simd, Task, dispatch};

/// A grid of at most 8 bits, as distances from the code of zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CodeGrid {
    /// Value of a step.
    pub scale: f32,
    /// Least distance of a code from that of zero: `quant_min − zero_point`.
    pub low: i16,
    /// Largest distance.
    pub high: i16,
}

impl CodeGrid {
    /// The distances of the nearest codes: `round(x · (1 / scale))`, ties to even, in the limits. Says
    /// whether all values are finite: NaN has no code, and gets `low`.
    ///
    /// # Panics
    ///
    /// Unless there are as many codes as values.
    #[must_use = "NaN has no code"]
    pub fn quantize(&self, values: &[f32], codes: &mut [i16]) -> bool {
        assert_eq!(values.len(), codes.len(), "one code for each value");
        let mut are_finite = true;
        dispatch(Quantize {
            values,
            codes,
            grid: *self,
            are_finite: &mut are_finite,
        });
        are_finite
    }
}

struct Quantize<'a> {
    values: &'a [f32],
    codes: &'a mut [i16],
    grid: CodeGrid,
    are_finite: &'a mut bool,
}

impl Task for Quantize<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // 1.5 · 2²³: a number of less than 2²² that is added to it is rounded to an integer, ties to
        // even, in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        // The inverse of a scale near an end of F32 is beyond the other: both move, by a power of two.
        let lift = match self.grid.scale {
            scale if scale < 1e-37 => 2f32.powi(64),
            scale if scale > 1e37 => 2f32.powi(-64),
            _ => 1.0,
        };
        let inverse = 1.0 / (self.grid.scale * lift);
        let (low, high) = (f32::from(self.grid.low), f32::from(self.grid.high));
        // The bits of numbers without a sign are ordered as the numbers, infinity and NaN last.
        let mut largest = 0;
        for (code, value) in self.codes.iter_mut().zip(self.values) {
            largest = largest.max(value.abs().to_bits());
            let steps = value * lift * inverse;
            let steps = if steps > low { steps } else { low };
            let steps = if steps < high { steps } else { high };
            let bits = (steps + MAGIC).to_bits();
            *code = bits.wrapping_sub(MAGIC.to_bits()) as i16;
        }
        *self.are_finite = f32::from_bits(largest).is_finite();
    }
}

/// `min(x, 0)` and `max(x, 0)` of the finite values.
pub fn finite_range(values: &[f32]) -> [f32; 2] {
    let share = share(values.len(), 16);
    let mut extremes = match share < values.len() {
        true => values
            .par_chunks(share)
            .map(extremes)
            .reduce(|| [0.0; 2], |[a, b], [c, d]| [a.min(c), b.max(d)]),
        false => extremes(values),
    };
    if extremes.iter().any(|x| x.is_infinite()) {
        let finite = values.iter().filter(|x| x.is_finite());
        extremes = finite.fold([0.0; 2], |[low, high], x| [x.min(low), x.max(high)]);
    }
    extremes
}

/// Of the values that are numbers.
fn extremes(values: &[f32]) -> [f32; 2] {
    let mut extremes = [0.0; 2];
    dispatch(Extremes {
        values,
        extremes: &mut extremes,
    });
    extremes
}

struct Extremes<'a> {
    values: &'a [f32],
    extremes: &'a mut [f32; 2],
}

impl Task for Extremes<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let mut least = [0.0f32; 16];
        let mut most = [0.0f32; 16];
        let (chunks, rest) = self.values.as_chunks::<16>();
        for chunk in chunks {
            for lane in 0..16 {
                let x = chunk[lane];
                least[lane] = if x < least[lane] { x } else { least[lane] };
                most[lane] = if x > most[lane] { x } else { most[lane] };
            }
        }
        let lows = least.into_iter().chain(rest.iter().copied());
        let highs = most.into_iter().chain(rest.iter().copied());
        *self.extremes = [lows.fold(0.0, f32::min), highs.fold(0.0, f32::max)];
    }
}
