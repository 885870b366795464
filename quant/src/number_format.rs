//! The numbers that a quantized value can be.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::QuantError;

/// The grid of numbers that a value divided by its scale is rounded to.
///
/// Rounding is to nearest, ties to even; what lies outside saturates; NaN stays NaN.
///
/// ```
/// use burn_lean_quant::NumberFormat;
///
/// assert_eq!(NumberFormat::int8().quant_min(), -128.0);
/// assert_eq!(NumberFormat::int8().narrow().quant_min(), -127.0);
/// assert_eq!(NumberFormat::uint(4).quant_max(), 15.0);
/// assert_eq!(NumberFormat::int(4).round(2.5), 2.0);
/// assert_eq!(NumberFormat::int(4).round(100.0), 7.0);
/// assert_eq!(NumberFormat::E2M1.round(2.4), 2.0);
/// assert_eq!(NumberFormat::E4M3.to_string(), "E4M3");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NumberFormat {
    /// Integers: −2ᵇ⁻¹ to 2ᵇ⁻¹−1 if signed, 0 to 2ᵇ−1 if not.
    ///
    /// What PyTorch calls reduced range is one bit less.
    Int {
        /// Bits of one number, 2 to 8.
        bits: u8,
        /// Whether there are negative numbers.
        signed: bool,
        /// Leaves out the lowest signed number, so that the grid is as wide on both sides of zero:
        /// −127 to 127 for 8 bits, −1 to 1 for 2.
        narrow_range: bool,
    },
    /// 8-bit float with 4 exponent and 3 mantissa bits, ±448, no infinities (`fn`).
    E4M3,
    /// 8-bit float with 5 exponent and 2 mantissa bits, ±57344.
    E5M2,
    /// 4-bit float with 2 exponent bits and 1 mantissa bit: 0, ½, 1, 1½, 2, 3, 4, 6 and their
    /// negatives.
    E2M1,
}

impl NumberFormat {
    /// Signed 8-bit integers, −128 to 127.
    pub const fn int8() -> Self {
        Self::int(8)
    }

    /// Unsigned 8-bit integers, 0 to 255.
    pub const fn uint8() -> Self {
        Self::uint(8)
    }

    /// Signed integers of 2 to 8 bits.
    pub const fn int(bits: u8) -> Self {
        Self::Int {
            bits,
            signed: true,
            narrow_range: false,
        }
    }

    /// Unsigned integers of 2 to 8 bits.
    pub const fn uint(bits: u8) -> Self {
        Self::Int {
            bits,
            signed: false,
            narrow_range: false,
        }
    }

    /// Without the lowest signed integer. Float formats are as wide on both sides already.
    #[must_use]
    pub const fn narrow(self) -> Self {
        match self {
            Self::Int { bits, signed, .. } => Self::Int {
                bits,
                signed,
                narrow_range: true,
            },
            float => float,
        }
    }

    /// Bits of one number.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Int { bits, .. } => bits,
            Self::E4M3 | Self::E5M2 => 8,
            Self::E2M1 => 4,
        }
    }

    /// Whether the numbers are integers.
    pub const fn is_int(self) -> bool {
        matches!(self, Self::Int { .. })
    }

    /// The lowest number.
    pub fn quant_min(self) -> f32 {
        match self.grid() {
            Grid::Int { min, .. } => min,
            Grid::Float { max, .. } => -max,
        }
    }

    /// The highest number.
    pub fn quant_max(self) -> f32 {
        match self.grid() {
            Grid::Int { max, .. } | Grid::Float { max, .. } => max,
        }
    }

    /// Rounds a number to the grid: to nearest, ties to even, saturating. NaN stays NaN.
    pub fn round(self, x: f32) -> f32 {
        self.grid()
            .nearest(x)
            .clamp(self.quant_min(), self.quant_max())
    }

    /// # Errors
    ///
    /// If the number of bits is not 2 to 8, or an unsigned range is narrow.
    pub fn validate(self) -> Result<(), QuantError> {
        match self {
            Self::Int { bits, .. } if !(2..=8).contains(&bits) => Err(QuantError::InvalidConfig {
                field: "bits",
                value: bits.to_string(),
                expected: "2 to 8",
            }),
            Self::Int {
                signed: false,
                narrow_range: true,
                ..
            } => Err(QuantError::InvalidConfig {
                field: "narrow_range",
                value: "true".into(),
                expected: "false for unsigned integers, which have no lowest signed number",
            }),
            _ => Ok(()),
        }
    }

    pub(crate) fn grid(self) -> Grid {
        match self {
            Self::Int {
                bits,
                signed,
                narrow_range,
            } => {
                // More bits than `validate` accepts must not overflow the shift.
                let bits = bits.clamp(1, 24);
                let numbers = (1u32 << bits) as f32;
                let min = match signed {
                    true => -numbers / 2.0 + f32::from(u8::from(narrow_range)),
                    false => 0.0,
                };
                let max = match signed {
                    true => numbers / 2.0 - 1.0,
                    false => numbers - 1.0,
                };
                Grid::Int { min, max }
            }
            Self::E4M3 => Grid::Float {
                mantissa_bits: 3,
                min_exponent: -6,
                max: 448.0,
            },
            Self::E5M2 => Grid::Float {
                mantissa_bits: 2,
                min_exponent: -14,
                max: 57344.0,
            },
            Self::E2M1 => Grid::Float {
                mantissa_bits: 1,
                min_exponent: 0,
                max: 6.0,
            },
        }
    }
}

impl fmt::Display for NumberFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int {
                bits,
                signed,
                narrow_range,
            } => {
                let sign = if *signed { "" } else { "U" };
                let narrow = if *narrow_range { " narrow" } else { "" };
                write!(f, "{sign}INT{bits}{narrow}")
            }
            Self::E4M3 => f.write_str("E4M3"),
            Self::E5M2 => f.write_str("E5M2"),
            Self::E2M1 => f.write_str("E2M1"),
        }
    }
}

/// A [`NumberFormat`] as arithmetic needs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Grid {
    /// All integers from `min` to `max`.
    Int { min: f32, max: f32 },
    /// All ±k · 2ᵉ⁻ᵐ with k < 2ᵐ⁺¹, e ≥ `min_exponent` and magnitude up to `max`;
    /// m = `mantissa_bits`.
    Float {
        mantissa_bits: i32,
        min_exponent: i32,
        max: f32,
    },
}

impl Grid {
    /// The nearest number of the grid continued beyond its bounds, ties to even.
    pub(crate) fn nearest(self, x: f32) -> f32 {
        match self {
            Self::Int { .. } => x.round_ties_even(),
            Self::Float {
                mantissa_bits,
                min_exponent,
                ..
            } => {
                if !x.is_finite() {
                    return x;
                }
                let exponent = (((x.to_bits() >> 23) & 0xff) as i32 - 127).max(min_exponent);
                let step = power_of_two(exponent - mantissa_bits);
                // Exact: a division and a product by a power of two in the range of F32.
                ((x / step).round_ties_even() * step).copysign(x)
            }
        }
    }
}

/// 2ᵏ, for k from −126 to 127.
pub(crate) fn power_of_two(k: i32) -> f32 {
    f32::from_bits(((k + 127) as u32) << 23)
}
