//! Activations, softmax, layer norm and transposition of F32 slices.

use crate::epilogue::limit;
use crate::shares::in_shares;
use crate::simd::{Simd, Task, dispatch_narrow};

/// Work on one number after the other.
struct Each<'a, F> {
    values: &'a mut [f32],
    change: F,
}

impl<F: Fn(f32) -> f32> Task for Each<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for value in self.values {
            *value = (self.change)(*value);
        }
    }
}

/// Numbers that are not below one and not above another. NaN stays NaN.
pub fn clamp(values: &mut [f32], low: f32, high: f32) {
    dispatch_narrow(Each {
        values,
        change: move |x| limit(x, low, high),
    });
}

/// Adds numbers to others of the same shape.
///
/// # Panics
///
/// Unless there are as many.
pub fn add(values: &mut [f32], others: &[f32]) {
    assert_eq!(values.len(), others.len(), "shapes differ");
    dispatch_narrow(Add { values, others });
}

struct Add<'a> {
    values: &'a mut [f32],
    others: &'a [f32],
}

impl Task for Add<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (value, other) in self.values.iter_mut().zip(self.others) {
            *value += other;
        }
    }
}

/// eˣ within 2 units of the last place, for x from −87 to 88; beyond as at these.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r, |r| ≤ ln 2 / 2; a polynomial for eʳ, and n in the exponent (Cephes, Moshier).
    const MAGIC: f32 = 12_582_912.0;
    let x = limit(x, -87.0, 88.0);
    let n = x.mul_add(std::f32::consts::LOG2_E, MAGIC) - MAGIC;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    for c in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = p.mul_add(r, c);
    }
    let value = p.mul_add(r * r, r) + 1.0;
    let scale = f32::from_bits(((n as i32 + 127) << 23) as u32);
    value * scale
}

/// 1 / (1 + e⁻ˣ): of −∞ 0, and eˣ down to the smallest number.
pub fn sigmoid(values: &mut [f32]) {
    dispatch_narrow(Each {
        values,
        change: |x: f32| {
            // e⁻|x|, which is below what `exp` gives, as a square.
            let root = exp(-0.5 * x.abs());
            let power = root * root;
            let above = if x < 0.0 { power } else { 1.0 };
            above / (1.0 + power)
        },
    });
}

/// The hyperbolic tangent, within 3·10⁻⁷.
pub fn tanh(values: &mut [f32]) {
    dispatch_narrow(Each {
        values,
        change: |x: f32| {
            // Near 0 the quotient would lose what is small.
            let square = x * x;
            let small =
                x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)));
            let large = 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
            if square < 0.01 { small } else { large }
        },
    });
}

/// x · Φ(x), with the distribution function of the normal distribution, within 3·10⁻⁷ · |x|.
pub fn gelu(values: &mut [f32]) {
    dispatch_narrow(Each {
        values,
        change: |x: f32| {
            // Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
            let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
            let t = 1.0 / (1.0 + 0.327_591_1 * z);
            let p = 1.061_405_4_f32;
            let p = p.mul_add(t, -1.453_152_1);
            let p = p.mul_add(t, 1.421_413_8);
            let p = p.mul_add(t, -0.284_496_72);
            let p = p.mul_add(t, 0.254_829_6) * t;
            // What is beyond |x|.
            let tail = 0.5 * p * exp(-z * z);
            x * if x < 0.0 { tail } else { 1.0 - tail }
        },
    });
}

/// Rows of `size` numbers as probabilities: eˣ over the sum of the row.
///
/// # Panics
///
/// For a `size` of 0.
pub fn softmax(values: &mut [f32], size: usize) {
    dispatch_narrow(Softmax { values, size });
}

struct Softmax<'a> {
    values: &'a mut [f32],
    size: usize,
}

impl Task for Softmax<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.values.chunks_exact_mut(self.size) {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for x in row.iter_mut() {
                let distance = *x - most;
                let power = exp(distance);
                *x = if distance < -87.0 { 0.0 } else { power };
            }
            let sum = sum(row);
            for x in row.iter_mut() {
                *x /= sum;
            }
        }
    }
}

/// Rows as long as `gain`, less their mean, over the root of their variance and `epsilon`; times `gain`
/// and plus `shift`.
///
/// # Panics
///
/// For an empty `gain`.
pub fn layer_norm(values: &mut [f32], gain: &[f32], shift: Option<&[f32]>, epsilon: f32) {
    dispatch_narrow(LayerNorm {
        values,
        gain,
        shift,
        epsilon,
    });
}

struct LayerNorm<'a> {
    values: &'a mut [f32],
    gain: &'a [f32],
    shift: Option<&'a [f32]>,
    epsilon: f32,
}

impl Task for LayerNorm<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let size = self.gain.len();
        for row in self.values.chunks_exact_mut(size) {
            let mean = sum(row) / size as f32;
            row.iter_mut().for_each(|x| *x -= mean);
            let variance = sum_of(row, |x| x * x) / size as f32;
            let factor = 1.0 / (variance + self.epsilon).sqrt();
            for (x, gain) in row.iter_mut().zip(self.gain) {
                *x = *x * factor * gain;
            }
            if let Some(shift) = self.shift {
                for (x, shift) in row.iter_mut().zip(shift) {
                    *x += shift;
                }
            }
        }
    }
}

/// The sum of all, off by the rounding of a few hundred additions however many there are.
#[inline(always)]
pub fn sum(values: &[f32]) -> f32 {
    sum_of(values, |x| x)
}

/// As [`sum`], of what `term` makes of each.
#[inline(always)]
fn sum_of(values: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let parts = values.chunks(4096).map(|part| {
        let mut sums = [0.0f32; 16];
        let (chunks, rest) = part.as_chunks::<16>();
        for chunk in chunks {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += term(*x);
            }
        }
        let rest: f32 = rest.iter().map(|x| term(*x)).sum();
        f64::from(sums.iter().sum::<f32>() + rest)
    });
    parts.sum::<f64>() as f32
}

/// Matrices `[batch, a, b]` as `[batch, b, a]`, in blocks that stay in the cache.
pub fn transpose(values: &[f32], batch: usize, a: usize, b: usize) -> Vec<f32> {
    const BLOCK: usize = 16;
    assert_eq!(values.len(), batch * a * b, "the values have another shape");
    let mut transposed = vec![0.0; values.len()];
    if values.is_empty() {
        return transposed;
    }
    in_shares(&mut transposed, a * b, |first, transposed| {
        let from = values[first * a * b..].chunks_exact(a * b);
        for (from, to) in from.zip(transposed.chunks_exact_mut(a * b)) {
            for i in (0..a).step_by(BLOCK) {
                for j in (0..b).step_by(BLOCK) {
                    for column in j..(j + BLOCK).min(b) {
                        for row in i..(i + BLOCK).min(a) {
                            to[column * a + row] = from[row * b + column];
                        }
                    }
                }
            }
        }
    });
    transposed
}
