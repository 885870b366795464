//! Conversions between F32 and half numbers, many at a time.
//!
//! The rule is that of IEEE 754: to nearest, ties to even, overflow to infinity, gradual underflow. It
//! is written without branches and without F32 subnormals, which are slow in hardware, so that the
//! compiler converts several numbers at once; the `half` crate, which converts one by one, judges it
//! in the tests.

use burn::tensor::FloatDType;
use half::{bf16, f16};
use pulp::Arch;
use rayon::prelude::*;

/// Bits of the magnitude of infinity in F32.
const INFINITY: u32 = 0x7f80_0000;
/// All bits but the sign.
const SIZE: u32 = 0x7fff_ffff;
/// What the exponent of F32 has more than that of F16, at the place of that of F16.
const BIAS: u32 = 112 << 10;

/// The nearest BF16 number.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> bf16 {
    const QUIET: u32 = 0x0040_0000;
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let is_nan = bits & SIZE > INFINITY;
    bf16::from_bits(((if is_nan { bits | QUIET } else { rounded }) >> 16) as u16)
}

/// A BF16 number in F32.
#[inline(always)]
pub(crate) fn from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The nearest F16 number.
#[inline(always)]
pub(crate) fn to_f16(x: f32) -> f16 {
    /// 65,536: what is rounded to it has overflown.
    const BEYOND: u32 = 0x4780_0000;
    /// 2⁻¹⁴: below it numbers are multiples of 2⁻²⁴.
    const SMALLEST_NORMAL: u32 = 0x3880_0000;
    let bits = x.to_bits();
    let (sign, size) = ((bits >> 16) & 0x8000, bits & SIZE);
    let rounded = size.wrapping_add(0xfff + ((size >> 13) & 1));
    let normal = (rounded >> 13).wrapping_sub(BIAS);
    let normal = if rounded >= BEYOND { 0x7c00 } else { normal };
    // F32 has multiples of 2⁻²⁴ from 0.5 on: the sum counts them.
    let multiples = (f32::from_bits(size) + 0.5)
        .to_bits()
        .wrapping_sub(0.5_f32.to_bits());
    let finite = if size < SMALLEST_NORMAL {
        multiples
    } else {
        normal
    };
    let nan = 0x7e00 | ((size >> 13) & 0x3ff);
    f16::from_bits((sign | if size > INFINITY { nan } else { finite }) as u16)
}

/// An F16 number in F32.
#[inline(always)]
pub(crate) fn from_f16(x: f16) -> f32 {
    /// 2⁻²⁴, of which subnormal numbers are multiples.
    const UNIT: f32 = 1.0 / 16_777_216.0;
    let bits = u32::from(x.to_bits());
    let (sign, size) = ((bits & 0x8000) << 16, bits & 0x7fff);
    let multiple = (size as i32 as f32 * UNIT).to_bits();
    let normal = (size + BIAS) << 13;
    let special = INFINITY | (size << 13);
    let finite = if size < 0x400 { multiple } else { normal };
    f32::from_bits(sign | if size >= 0x7c00 { special } else { finite })
}

/// Rounds all numbers to the grid of `half`: F16 or BF16; with any other dtype they stay as they are.
///
/// To nearest, ties to even; overflow gives an infinity, underflow is gradual; NaN stays NaN.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_lean_graph::round_all;
///
/// let mut numbers = [65_519.0, 65_520.0, 1.0e-8];
/// round_all(&mut numbers, FloatDType::F16);
/// assert_eq!(numbers, [65_504.0, f32::INFINITY, 0.0]);
/// ```
pub fn round_all(numbers: &mut [f32], half: FloatDType) {
    let round = |numbers: &mut [f32]| match half {
        FloatDType::F16 => each(numbers, |x| from_f16(to_f16(x))),
        FloatDType::BF16 => each(numbers, |x| from_bf16(to_bf16(x))),
        _ => {}
    };
    match numbers.len() > PART {
        true => numbers.par_chunks_mut(PART).for_each(round),
        false => round(numbers),
    }
}

/// Numbers that one thread converts at a time.
const PART: usize = 1 << 15;

#[inline(always)]
fn each(numbers: &mut [f32], convert: impl Fn(f32) -> f32) {
    Arch::new().dispatch(|| numbers.iter_mut().for_each(|x| *x = convert(*x)));
}

/// Each number of `from` in another form.
#[cfg(feature = "flex")]
pub(crate) fn convert<A: Copy + Sync, B: Copy + Default + Send>(
    from: &[A],
    convert: impl Fn(A) -> B + Copy + Sync,
) -> Vec<B> {
    let mut to = vec![B::default(); from.len()];
    let part = |(to, from): (&mut [B], &[A])| {
        Arch::new().dispatch(|| {
            for (to, from) in to.iter_mut().zip(from) {
                *to = convert(*from);
            }
        });
    };
    match from.len() > PART {
        true => to
            .par_chunks_mut(PART)
            .zip(from.par_chunks(PART))
            .for_each(part),
        false => part((&mut to, from)),
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers at which rounding decides: those of the grid, the midpoints between them, and
    /// the next numbers on both sides; and others all over F32.
    fn numbers(to_f32: impl Fn(u16) -> f32) -> Vec<f32> {
        let grid: Vec<f32> = (0..=u16::MAX).map(to_f32).collect();
        let mut numbers: Vec<f32> = (0..=u32::MAX / 4099)
            .map(|index| f32::from_bits(index * 4099))
            .collect();
        for (index, &x) in grid.iter().enumerate() {
            let next = grid.get(index + 1).copied().unwrap_or(x);
            for y in [x, 0.5 * x + 0.5 * next] {
                for step in -2..=2_i32 {
                    numbers.push(f32::from_bits(y.to_bits().wrapping_add_signed(step)));
                }
            }
        }
        numbers
    }

    #[test]
    fn f16_is_rounded_as_the_conversion_does_it() {
        for x in numbers(|bits| f16::from_bits(bits).to_f32()) {
            let (ours, exact) = (to_f16(x), f16::from_f32(x));
            let equal = ours.to_bits() == exact.to_bits() || (ours.is_nan() && exact.is_nan());
            assert!(equal, "{x:e} becomes {ours}, not {exact}");
        }
    }

    #[test]
    fn bf16_is_rounded_as_the_conversion_does_it() {
        for x in numbers(|bits| bf16::from_bits(bits).to_f32()) {
            let (ours, exact) = (to_bf16(x), bf16::from_f32(x));
            let equal = ours.to_bits() == exact.to_bits() || (ours.is_nan() && exact.is_nan());
            assert!(equal, "{x:e} becomes {ours}, not {exact}");
        }
    }

    #[test]
    fn every_half_number_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (x, y) = (f16::from_bits(bits), bf16::from_bits(bits));
            let equal = |ours: f32, exact: f32| {
                ours.to_bits() == exact.to_bits() || (ours.is_nan() && exact.is_nan())
            };
            assert!(equal(from_f16(x), x.to_f32()), "{x}");
            assert!(equal(from_bf16(y), y.to_f32()), "{y}");
        }
    }
}
