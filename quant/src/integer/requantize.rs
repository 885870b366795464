//! From `i32` accumulators back to 8-bit codes, without floating point.
//!
//! An integer layer ends with `q_out = round(M · acc) + z_out`, where `M = s_in · s_w / s_out` is a
//! real number. Integer hardware multiplies by `M₀ · 2^e` instead, with `M₀` in `[0.5, 1)` as a
//! 32-bit fixed-point number: [Quantization and Training of Neural Networks for Efficient
//! Integer-Arithmetic-Only Inference, Jacob et al., 2018](https://arxiv.org/abs/1712.05877),
//! section 2.2, with the two rounding steps of gemmlowp.

use crate::QuantError;

/// How accumulators become output codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Requantization {
    /// `round(M · acc) + z` in 64-bit floating point, ties to even: what the fake-quantized
    /// forward pass does, up to its F32 rounding.
    #[default]
    Float,
    /// A 32-bit fixed-point multiplier and two rounding shifts, ties away from zero: what
    /// integer-only hardware does. Differs from [`Float`](Self::Float) by one step on ties.
    FixedPoint,
}

/// A positive real number as `mantissa · 2^(exponent − 31)`.
///
/// ```
/// use burn_lean_quant::integer::Multiplier;
///
/// let multiplier = Multiplier::new(0.75).unwrap();
/// assert_eq!((multiplier.mantissa(), multiplier.exponent()), (1_610_612_736, 0));
/// assert_eq!(multiplier.apply(1000), 750);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Multiplier {
    mantissa: i32,
    exponent: i32,
}

impl Multiplier {
    /// The nearest multiplier to `real`; ties of the last mantissa bit go to even.
    ///
    /// # Errors
    ///
    /// [`QuantError::InvalidMultiplier`] unless `real` is positive, finite and below 2³⁰: a larger
    /// one sends every accumulator out of any 8-bit range.
    pub fn new(real: f64) -> Result<Self, QuantError> {
        const LARGEST: f64 = (1_u64 << 30) as f64;
        if !(real > 0.0 && real < LARGEST) {
            return Err(QuantError::InvalidMultiplier { value: real });
        }
        // real = fraction · 2^exponent with the fraction in [0.5, 1). The power of the smallest
        // numbers would be 0 in F64: the loops below do the rest.
        let mut exponent = (real.log2().floor() as i32 + 1).max(-1000);
        let mut fraction = real / f64::powi(2.0, exponent);
        // The logarithm may be off by one next to a power of two, too.
        while fraction >= 1.0 {
            fraction /= 2.0;
            exponent += 1;
        }
        while fraction < 0.5 {
            fraction *= 2.0;
            exponent -= 1;
        }
        let mut mantissa = (fraction * f64::powi(2.0, 31)).round_ties_even() as i64;
        if mantissa == 1 << 31 {
            mantissa /= 2;
            exponent += 1;
        }
        let mantissa = i32::try_from(mantissa).expect("the mantissa is below 2³¹ by now");
        Ok(Self { mantissa, exponent })
    }

    /// The mantissa `M₀ · 2³¹`, in `[2³⁰, 2³¹)`.
    pub fn mantissa(self) -> i32 {
        self.mantissa
    }

    /// The power of two.
    pub fn exponent(self) -> i32 {
        self.exponent
    }

    /// `accumulator · real`, rounded as gemmlowp does; saturates at the bounds of `i32`.
    pub fn apply(self, accumulator: i32) -> i32 {
        let left = self.exponent.max(0) as u32;
        let right = (-self.exponent).max(0) as u32;
        let shifted = i64::from(accumulator) << left;
        let product = divide_by_power_of_two(doubling_high_mul(shifted, self.mantissa), right);
        product.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32
    }
}

/// The high half of the doubled product: `round(a · b / 2³¹)`, ties away from zero.
fn doubling_high_mul(a: i64, b: i32) -> i64 {
    let product = i128::from(a) * i128::from(b);
    let nudge: i128 = if product >= 0 { 1 << 30 } else { 1 - (1 << 30) };
    // Division truncates, as gemmlowp's does. |a| ≤ 2⁶², so that the quotient is below 2⁶².
    ((product + nudge) / (1 << 31)) as i64
}

/// `round(value / 2^exponent)`, ties away from zero.
fn divide_by_power_of_two(value: i64, exponent: u32) -> i64 {
    match exponent {
        0 => value,
        // |value| < 2⁶²: less than half a step.
        63.. => 0,
        _ => {
            let mask = (1_i64 << exponent) - 1;
            let remainder = value & mask;
            let threshold = (mask >> 1) + i64::from(value < 0);
            (value >> exponent) + i64::from(remainder > threshold)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_multiplier_is_within_half_a_mantissa_step_of_its_number() {
        for power in -60..29 {
            for fraction in [0.5, 0.500000001, 0.7, 0.999999999999] {
                let real = fraction * f64::powi(2.0, power);
                let multiplier = Multiplier::new(real).unwrap();
                let back =
                    f64::from(multiplier.mantissa) * f64::powi(2.0, multiplier.exponent - 31);
                // The mantissa has 31 bits and its first is set.
                assert!(
                    (back - real).abs() <= real * f64::powi(2.0, -31),
                    "{real} {back}"
                );
                assert!(multiplier.mantissa >= 1 << 30);
            }
        }
    }

    #[test]
    fn ties_go_away_from_zero() {
        assert_eq!(divide_by_power_of_two(5, 1), 3);
        assert_eq!(divide_by_power_of_two(-5, 1), -3);
        assert_eq!(divide_by_power_of_two(-6, 2), -2);
        assert_eq!(divide_by_power_of_two(i32::MIN.into(), 31), -1);
        assert_eq!(divide_by_power_of_two(i32::MAX.into(), 63), 0);
    }

    #[test]
    fn the_high_half_of_the_largest_products_is_exact() {
        let high = |a: i32, b: i32| doubling_high_mul(a.into(), b);
        assert_eq!(high(i32::MIN, i32::MIN), 1 << 31);
        assert_eq!(high(i32::MIN, i32::MAX), -i64::from(i32::MAX));
        assert_eq!(high(1 << 30, 1 << 30), 1 << 29);
    }

    #[test]
    fn large_products_saturate() {
        let multiplier = Multiplier::new(1024.0).unwrap();
        assert_eq!(multiplier.apply(i32::MAX), i32::MAX);
        assert_eq!(multiplier.apply(i32::MIN), i32::MIN);
        assert_eq!(multiplier.apply(3), 3072);
    }

    #[test]
    fn only_positive_finite_numbers_below_two_to_the_thirty_are_multipliers() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::powi(2.0, 30)] {
            assert!(Multiplier::new(bad).is_err(), "{bad}");
        }
    }
}
