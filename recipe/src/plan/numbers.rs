//! Number formats and dtypes as a recipe spells them.

use std::fmt;

use burn::tensor::FloatDType;
use burn_lean_amp::Fallback;
use burn_lean_quant::NumberFormat;
use serde::{Deserialize, Serialize};

use crate::RecipeError;

/// In what the products of a training are computed; parameters stay F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ComputeDtype {
    /// BF16 where the device computes in it, else F16 where it does, else F32. A dtype whose
    /// [self-test](burn_lean_amp::self_test()) fails is named in the log, with the check.
    #[default]
    Auto,
    /// F32: no mixed precision.
    F32,
    /// F16, with a dynamic loss scale.
    F16,
    /// BF16, without a loss scale.
    Bf16,
}

impl ComputeDtype {
    /// The dtype that is meant, where it is no choice of the device's.
    pub(crate) fn fixed(self) -> Option<FloatDType> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(FloatDType::F32),
            Self::F16 => Some(FloatDType::F16),
            Self::Bf16 => Some(FloatDType::BF16),
        }
    }
}

/// [`Fallback`] in small letters.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Fallback", rename_all = "lowercase")]
pub(crate) enum FallbackName {
    Error,
    F32,
    Emulate,
}

/// A number format by its name: `int2` to `int8`, `uint2` to `uint8`, `e4m3`, `e5m2`, `e2m1`; or
/// `none`, which quantizes nothing.
///
/// ```
/// use burn_lean_quant::NumberFormat;
/// use burn_lean_recipe::Numbers;
///
/// let numbers: Numbers = "int4".parse()?;
/// assert_eq!(numbers.format(), Some(NumberFormat::int(4)));
/// assert_eq!("none".parse::<Numbers>()?.format(), None);
/// assert!("int9".parse::<Numbers>().is_err());
/// # Ok::<(), burn_lean_recipe::RecipeError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Numbers(Option<NumberFormat>);

impl Numbers {
    /// The numbers of a format, with all of its range: a name says no more. Weights are narrow in a
    /// recipe whatever it says.
    pub fn new(format: NumberFormat) -> Self {
        Self(Some(match format {
            NumberFormat::Int { bits, signed, .. } => NumberFormat::Int {
                bits,
                signed,
                narrow_range: false,
            },
            float => float,
        }))
    }

    /// Nothing is quantized.
    pub fn none() -> Self {
        Self(None)
    }

    /// The format; `None` where nothing is quantized.
    pub fn format(self) -> Option<NumberFormat> {
        self.0
    }

    /// As in `W4A8`: the bits, or the name of a float format.
    pub(crate) fn short(self, letter: char) -> String {
        match self.0 {
            None => String::new(),
            Some(format) if format.is_int() => format!("{letter}{}", format.bits()),
            Some(_) => format!("{letter}{}", self.to_string().to_uppercase()),
        }
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("none"),
            Some(NumberFormat::Int { bits, signed, .. }) => {
                write!(f, "{}int{bits}", if signed { "" } else { "u" })
            }
            Some(NumberFormat::E4M3) => f.write_str("e4m3"),
            Some(NumberFormat::E5M2) => f.write_str("e5m2"),
            Some(other) => write!(f, "{}", format!("{other:?}").to_lowercase()),
        }
    }
}

impl std::str::FromStr for Numbers {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Self, RecipeError> {
        let unknown = || RecipeError::Numbers { text: text.into() };
        let format = match text {
            "none" => return Ok(Self(None)),
            "e4m3" => NumberFormat::E4M3,
            "e5m2" => NumberFormat::E5M2,
            "e2m1" => NumberFormat::E2M1,
            _ => {
                let (bits, signed) = match (text.strip_prefix("int"), text.strip_prefix("uint")) {
                    (Some(bits), _) => (bits, true),
                    (_, Some(bits)) => (bits, false),
                    _ => return Err(unknown()),
                };
                let &[digit @ b'2'..=b'8'] = bits.as_bytes() else {
                    return Err(unknown());
                };
                match signed {
                    true => NumberFormat::int(digit - b'0'),
                    false => NumberFormat::uint(digit - b'0'),
                }
            }
        };
        Ok(Self(Some(format)))
    }
}

impl TryFrom<String> for Numbers {
    type Error = RecipeError;

    fn try_from(text: String) -> Result<Self, RecipeError> {
        text.parse()
    }
}

impl From<Numbers> for String {
    fn from(numbers: Numbers) -> Self {
        numbers.to_string()
    }
}
