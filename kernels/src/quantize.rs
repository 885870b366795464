//! Floats to codes.

use crate::epilogue::limit;
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
    /// The distances of the nearest codes: `round(x · (1 / scale))`, ties to even, in the limits. That
    /// of NaN is `low`.
    pub fn quantize(&self, values: &[f32], codes: &mut Vec<i16>) {
        codes.clear();
        codes.resize(values.len(), 0);
        dispatch(Quantize {
            values,
            codes,
            grid: *self,
        });
    }
}

struct Quantize<'a> {
    values: &'a [f32],
    codes: &'a mut [i16],
    grid: CodeGrid,
}

impl Task for Quantize<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // 1.5 · 2²³: a number of less than 2²² that is added to it is rounded to an integer, ties to
        // even, in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        let inverse = 1.0 / self.grid.scale;
        let (low, high) = (f32::from(self.grid.low), f32::from(self.grid.high));
        for (code, value) in self.codes.iter_mut().zip(self.values) {
            let steps = value * inverse;
            let steps = if steps > low { steps } else { low };
            let bits = (limit(steps, low, high) + MAGIC).to_bits();
            *code = bits.wrapping_sub(MAGIC.to_bits()) as i16;
        }
    }
}

/// The grid of 256 codes from min(x, 0) to max(x, 0), and its zero point, as ONNX's
/// `DynamicQuantizeLinear` has it.
pub fn dynamic_grid(values: &[f32]) -> (CodeGrid, i32) {
    let mut extremes = [0.0f32; 2];
    dispatch(Extremes {
        values,
        extremes: &mut extremes,
    });
    let [low, high] = extremes;
    let scale = (high - low) / 255.0;
    let scale = match scale > 0.0 && scale.is_finite() {
        true => scale,
        false => 1.0,
    };
    let zero_point = (-low / scale).round_ties_even().clamp(0.0, 255.0) as i16;
    let grid = CodeGrid {
        scale,
        low: -zero_point,
        high: 255 - zero_point,
    };
    (grid, i32::from(zero_point))
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
