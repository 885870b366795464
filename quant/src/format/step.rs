//! The rule of fake quantization for one number, without branches, so that loops over it become
//! vector instructions.

/// Scale and bounds of one group, with the zero point moved into the bounds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    #[cfg_attr(not(any(feature = "flex", feature = "ndarray")), allow(dead_code))]
    pub(crate) scale: f32,
    /// 1 / scale.
    pub(crate) inverse: f32,
    /// quant_min − zero_point.
    pub(crate) low: f32,
    /// quant_max − zero_point.
    pub(crate) high: f32,
}

impl Step {
    /// The quantized number of `x` less the zero point, and whether it was within the bounds
    /// before it was clamped. NaN stays NaN and is not within.
    #[inline(always)]
    pub(crate) fn quantize(self, numbers: impl Round, x: f32) -> (f32, bool) {
        let number = numbers.round(x * self.inverse, self.low, self.high);
        let inside = (number >= self.low) & (number <= self.high);
        (clamp(number, self.low, self.high), inside)
    }
}

/// Rounding to a set of numbers that is continued beyond the bounds of the format.
pub(crate) trait Round: Copy + Sync {
    /// The nearest number to `x`, ties to even; for `x` far beyond the bounds, any number beyond
    /// them. NaN stays NaN.
    fn round(self, x: f32, low: f32, high: f32) -> f32;
}

/// 1.5 · 2²³. From 2²³ to 2²⁴ the F32 numbers are the integers, so adding this rounds as the
/// hardware does: to nearest, ties to even.
const INTEGERS: f32 = 12_582_912.0;

/// All integers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Integers;

impl Round for Integers {
    #[inline(always)]
    fn round(self, x: f32, low: f32, high: f32) -> f32 {
        // A zero comes out positive.
        (clamp(x, low - 1.0, high + 1.0) + INTEGERS) - INTEGERS
    }
}

/// All ±k · 2ᵉ⁻ᵐ with k < 2ᵐ⁺¹ and e ≥ `min_exponent`, where m = `mantissa_bits`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Floats {
    pub(crate) mantissa_bits: i32,
    pub(crate) min_exponent: i32,
}

impl Round for Floats {
    #[inline(always)]
    fn round(self, x: f32, low: f32, high: f32) -> f32 {
        let magnitude = clamp(x, 2.0 * low, 2.0 * high).abs();
        let exponent = ((magnitude.to_bits() >> 23) as i32).max(self.min_exponent + 127);
        // As for the integers, with steps of 2ᵉ⁻ᵐ.
        let step = f32::from_bits(((exponent - self.mantissa_bits) as u32) << 23);
        let steps = INTEGERS * step;
        ((magnitude + steps) - steps).copysign(x)
    }
}

impl Floats {
    /// Exponent and mantissa of one of the numbers, which must not be negative.
    pub(crate) fn bits(self, x: f32) -> u8 {
        let exponent = ((x.to_bits() >> 23) as i32 - 127).max(self.min_exponent);
        let steps = x / f32::exp2((exponent - self.mantissa_bits) as f32);
        // A normal number's leading one carries into the exponent; a subnormal number has none.
        let exponent = (exponent - self.min_exponent) as u8;
        (exponent << self.mantissa_bits) + steps as u8
    }

    /// The number of an exponent and a mantissa.
    pub(crate) fn number(self, bits: u8) -> f32 {
        let mantissa = bits & ((1 << self.mantissa_bits) - 1);
        let biased = i32::from(bits >> self.mantissa_bits);
        let leading_one = u8::from(biased > 0) << self.mantissa_bits;
        let exponent = biased.max(1) - 1 + self.min_exponent;
        f32::from(leading_one + mantissa) * f32::exp2((exponent - self.mantissa_bits) as f32)
    }
}

/// As [`f32::clamp`]; written so that it is two instructions.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}
