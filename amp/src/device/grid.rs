//! Rounding of F32 numbers to the grid of a half dtype, many at a time.
//!
//! The rule is that of the hardware conversion (IEEE 754): to nearest, ties to even, overflow to
//! infinity, gradual underflow. It is written without branches, so that it runs as fast as memory
//! delivers; the `half` crate, which converts one number at a time, judges it in the tests.

use burn::tensor::FloatDType;
use half::{bf16, f16};

/// Rounds one number to the grid of `dtype` and back to F32.
///
/// To nearest, ties to even; overflow gives an infinity, underflow is gradual; NaN stays NaN.
/// Any `dtype` but F16 and BF16 returns `x`.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_lean_amp::round_to;
///
/// assert_eq!(round_to(FloatDType::F16, 65519.0), 65504.0);
/// assert_eq!(round_to(FloatDType::F16, 65520.0), f32::INFINITY);
/// assert_eq!(round_to(FloatDType::BF16, 1.00390625), 1.0);
/// ```
pub fn round_to(dtype: FloatDType, x: f32) -> f32 {
    match dtype {
        FloatDType::F16 => f16::from_f32(x).to_f32(),
        FloatDType::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Rounds all numbers to the grid of BF16 or F16.
pub(crate) fn round_all(values: &mut [f32], bfloat: bool) {
    match bfloat {
        true => values.iter_mut().for_each(|x| *x = to_bf16(*x)),
        false => values.iter_mut().for_each(|x| *x = to_f16(*x)),
    }
}

/// Bits of the magnitude of infinity.
const INFINITY: u32 = 0x7f80_0000;
/// A quiet NaN.
const QUIET: u32 = 0x0040_0000;

/// Rounds the magnitude in `bits` to `DROPPED` bits less, ties to even: what is carried goes into the
/// exponent, as it should.
#[inline(always)]
fn drop_bits<const DROPPED: u32>(bits: u32) -> u32 {
    let half = (1 << (DROPPED - 1)) - 1;
    let odd = (bits >> DROPPED) & 1;
    bits.wrapping_add(half + odd) & !((1 << DROPPED) - 1)
}

#[inline(always)]
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let (sign, size) = (bits & 0x8000_0000, bits & 0x7fff_ffff);
    let rounded = match size > INFINITY {
        true => (size | QUIET) & 0xffff_0000,
        false => drop_bits::<16>(size),
    };
    f32::from_bits(sign | rounded)
}

#[inline(always)]
fn to_f16(x: f32) -> f32 {
    /// 65,536: what is rounded to it has overflown.
    const BEYOND: u32 = 0x4780_0000;
    /// 2^-14: below it numbers are multiples of 2^-24.
    const SMALLEST_NORMAL: u32 = 0x3880_0000;
    let bits = x.to_bits();
    let (sign, size) = (bits & 0x8000_0000, bits & 0x7fff_ffff);
    let normal = drop_bits::<13>(size);
    let normal = if normal >= BEYOND { INFINITY } else { normal };
    // F32 has multiples of 2^-24 from 0.5 on: the sum is rounded to them.
    let multiple = ((f32::from_bits(size) + 0.5) - 0.5).to_bits();
    let finite = if size < SMALLEST_NORMAL {
        multiple
    } else {
        normal
    };
    let nan = (size | QUIET) & !0x1fff;
    f32::from_bits(sign | if size > INFINITY { nan } else { finite })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers at which rounding decides: those of the grid, the midpoints between them, and
    /// the next numbers on both sides.
    fn decisive(to_f32: impl Fn(u16) -> f32) -> Vec<f32> {
        let grid: Vec<f32> = (0..=u16::MAX).map(to_f32).collect();
        let mut numbers = Vec::new();
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

    fn spread() -> impl Iterator<Item = f32> {
        (0..=u32::MAX / 4099).map(|index| f32::from_bits(index * 4099))
    }

    fn judge(numbers: impl IntoIterator<Item = f32>, dtype: FloatDType) {
        for x in numbers {
            let mut ours = [x];
            round_all(&mut ours, dtype == FloatDType::BF16);
            let exact = round_to(dtype, x);
            assert!(
                ours[0].to_bits() == exact.to_bits() || (ours[0].is_nan() && exact.is_nan()),
                "{x:e} ({:#x}) becomes {:e}, not {exact:e}",
                x.to_bits(),
                ours[0],
            );
        }
    }

    #[test]
    fn f16_is_rounded_as_the_conversion_does_it() {
        judge(
            decisive(|bits| f16::from_bits(bits).to_f32()),
            FloatDType::F16,
        );
        judge(spread(), FloatDType::F16);
    }

    #[test]
    fn bf16_is_rounded_as_the_conversion_does_it() {
        judge(
            decisive(|bits| bf16::from_bits(bits).to_f32()),
            FloatDType::BF16,
        );
        judge(spread(), FloatDType::BF16);
    }

    #[test]
    fn what_overflows_midway_between_the_largest_number_and_the_next_power_is_infinite() {
        let mut numbers = [65_519.996, 65_520.0, -65_520.0, 1e30];
        round_all(&mut numbers, false);
        assert_eq!(
            numbers,
            [65_504.0, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY]
        );
    }
}
