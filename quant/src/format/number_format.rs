//! The numbers that a quantized value can be.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::QuantError;
use crate::format::step::{Floats, Integers, Step};

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

    /// Whether they are integers of 4 bits or less: where rounding and clipping cost accuracy.
    pub(crate) const fn has_few_integers(self) -> bool {
        self.is_int() && self.bits() <= 4
    }

    /// The lowest number.
    pub fn quant_min(self) -> f32 {
        self.grid().bounds().0
    }

    /// The highest number.
    pub fn quant_max(self) -> f32 {
        self.grid().bounds().1
    }

    /// Rounds a number to the grid: to nearest, ties to even, saturating. NaN stays NaN.
    pub fn round(self, x: f32) -> f32 {
        let unit = Step {
            scale: 1.0,
            inverse: 1.0,
            low: self.quant_min(),
            high: self.quant_max(),
        };
        match self.grid() {
            Grid::Int { .. } => unit.quantize(Integers, x).0,
            Grid::Float { floats, .. } => unit.quantize(floats, x).0,
        }
    }

    /// The bit pattern of a number: sign, exponent, mantissa for float formats, two's complement for
    /// integers. Numbers that are not in the format are rounded to it first; NaN, where a format
    /// has none, becomes 0.
    ///
    /// ```
    /// use burn_lean_quant::NumberFormat;
    ///
    /// assert_eq!(NumberFormat::E4M3.to_bits(448.0), 0x7e);
    /// assert_eq!(NumberFormat::E2M1.to_bits(-1.5), 0b1011);
    /// assert_eq!(NumberFormat::E2M1.from_bits(0b1011), -1.5);
    /// assert_eq!(NumberFormat::int(4).to_bits(-1.0), 0x0f);
    /// ```
    pub fn to_bits(self, x: f32) -> u8 {
        let x = self.round(x);
        let Grid::Float { floats, .. } = self.grid() else {
            return (x as i16 as u8) & (u8::MAX >> (8 - self.bits().min(8)));
        };
        if x.is_nan() {
            return match self {
                Self::E4M3 => 0x7f,
                Self::E5M2 => 0x7e,
                _ => 0,
            };
        }
        let sign = u8::from(x.is_sign_negative()) << (self.bits() - 1);
        sign + floats.bits(x.abs())
    }

    /// The number of a bit pattern; bits beyond those of the format are ignored.
    pub fn from_bits(self, bits: u8) -> f32 {
        let unused = 8 - self.bits().min(8);
        let Grid::Float { floats, .. } = self.grid() else {
            return match self {
                // Shifted up and down, so that the sign is that of the format.
                Self::Int { signed: true, .. } => f32::from(((bits << unused) as i8) >> unused),
                _ => f32::from((bits << unused) >> unused),
            };
        };
        let magnitude = bits & (0x7f >> unused);
        let magnitude = match (self, magnitude) {
            (Self::E4M3, 0x7f) | (Self::E5M2, 0x7d..=0x7f) => f32::NAN,
            (Self::E5M2, 0x7c) => f32::INFINITY,
            _ => floats.number(magnitude),
        };
        match bits >> (self.bits() - 1) & 1 {
            0 => magnitude,
            _ => -magnitude,
        }
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
                floats: Floats {
                    mantissa_bits: 3,
                    min_exponent: -6,
                },
                max: 448.0,
            },
            Self::E5M2 => Grid::Float {
                floats: Floats {
                    mantissa_bits: 2,
                    min_exponent: -14,
                },
                max: 57344.0,
            },
            Self::E2M1 => Grid::Float {
                floats: Floats {
                    mantissa_bits: 1,
                    min_exponent: 0,
                },
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
    /// All `floats` of magnitude up to `max`.
    Float { floats: Floats, max: f32 },
}

impl Grid {
    /// The lowest and the highest number.
    pub(crate) fn bounds(self) -> (f32, f32) {
        match self {
            Self::Int { min, max } => (min, max),
            Self::Float { max, .. } => (-max, max),
        }
    }
}
