//! How a tensor is quantized: number format, mapping, granularity, format of the scales.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::format::groups::Groups;
use crate::{
    NumberFormat, QuantError,
    format::{ScaleFormat, ScaleRounding},
};

/// How real numbers are mapped to the numbers of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Mapping {
    /// A range around zero; the zero point is 0 (2ᵇ⁻¹ for unsigned integers).
    ///
    /// scale = max(|min|, |max|) / ((quant_max − quant_min) / 2): for −128 to 127 the largest
    /// positive number may be clipped by half a step. Where the range is that of the values at hand
    /// ([`ObserverConfig::Memoryless`](crate::ObserverConfig::Memoryless)) and the largest magnitude is negative, that number
    /// lies between two codes, and the last bit of a sum before it decides: two programs that round alike elsewhere
    /// differ there. [`NumberFormat::narrow`] has no such number.
    #[default]
    Symmetric,
    /// A range around zero that clips neither end.
    ///
    /// scale = max(min / quant_min, max / quant_max).
    SymmetricNoClipping,
    /// The range from min to max, 0 included, with a zero point. Integers only.
    Affine,
}

impl Mapping {
    /// Whether the zero point is fixed by the number format.
    pub fn is_symmetric(self) -> bool {
        self != Self::Affine
    }
}

/// Which elements of a tensor share a scale.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Granularity {
    /// All.
    #[default]
    PerTensor,
    /// Those with the same index along an axis, 0 for the first.
    PerChannel {
        /// The axis.
        axis: usize,
    },
    /// Those of one row along the last axis. The number of rows is that of the tensor at hand, so
    /// this is for ranges that are computed on the fly.
    PerToken,
    /// Those of one rectangular block.
    ///
    /// ```
    /// use burn_lean_quant::{Granularity, NumberFormat, Scheme};
    ///
    /// let scheme = Scheme::symmetric(NumberFormat::int(4))
    ///     .with_granularity(Granularity::PerBlock { extents: vec![32, 1] });
    /// // A column of 128 has 4 blocks, and there are 10 columns.
    /// assert_eq!(scheme.group_shape(&[128, 10])?, [4, 10]);
    /// # Ok::<(), burn_lean_quant::QuantError>(())
    /// ```
    PerBlock {
        /// Extents along the last axes of the tensor; 1 along those before. The last block along an
        /// axis has what is left.
        extents: Vec<usize>,
    },
}

/// How a tensor is quantized.
///
/// ```
/// use burn_lean_quant::{Granularity, NumberFormat, Scheme};
///
/// let scheme = Scheme::symmetric(NumberFormat::int8().narrow())
///     .with_granularity(Granularity::PerChannel { axis: 1 });
/// assert_eq!(scheme.to_string(), "INT8 narrow, symmetric, per channel (axis 1)");
/// assert_eq!(scheme.group_count(&[64, 10])?, 10);
/// assert!(scheme.validate(&[64]).is_err());
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scheme {
    /// The numbers of the quantized tensor.
    pub format: NumberFormat,
    /// How real numbers are mapped to them.
    pub mapping: Mapping,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// How scales are stored.
    #[serde(default)]
    pub scale_format: ScaleFormat,
}

impl Scheme {
    /// Symmetric, per tensor.
    pub fn symmetric(format: NumberFormat) -> Self {
        Self {
            format,
            mapping: Mapping::Symmetric,
            granularity: Granularity::PerTensor,
            scale_format: ScaleFormat::F32,
        }
    }

    /// Affine, per tensor.
    pub fn affine(format: NumberFormat) -> Self {
        Self {
            mapping: Mapping::Affine,
            ..Self::symmetric(format)
        }
    }

    /// NVFP4: E2M1 in blocks of 16 along the last axis, with E4M3 scales.
    pub fn nvfp4(rounding: ScaleRounding) -> Self {
        Self {
            granularity: Granularity::PerBlock { extents: vec![16] },
            scale_format: ScaleFormat::E4M3(rounding),
            ..Self::symmetric(NumberFormat::E2M1)
        }
    }

    /// MXFP4: E2M1 in blocks of 32 along the last axis, with power-of-two scales.
    pub fn mxfp4(rounding: ScaleRounding) -> Self {
        Self {
            granularity: Granularity::PerBlock { extents: vec![32] },
            scale_format: ScaleFormat::PowerOfTwo(rounding),
            ..Self::symmetric(NumberFormat::E2M1)
        }
    }

    /// With another mapping.
    #[must_use]
    pub fn with_mapping(self, mapping: Mapping) -> Self {
        Self { mapping, ..self }
    }

    /// With another granularity.
    #[must_use]
    pub fn with_granularity(self, granularity: Granularity) -> Self {
        Self {
            granularity,
            ..self
        }
    }

    /// With another format of the scales.
    #[must_use]
    pub fn with_scale_format(self, scale_format: ScaleFormat) -> Self {
        Self {
            scale_format,
            ..self
        }
    }

    /// The lowest quantized number.
    pub fn quant_min(&self) -> f32 {
        self.format.quant_min()
    }

    /// The highest quantized number.
    pub fn quant_max(&self) -> f32 {
        self.format.quant_max()
    }

    /// The zero point of the symmetric mappings: 0, or 2ᵇ⁻¹ for unsigned integers.
    pub fn symmetric_zero_point(&self) -> f32 {
        match self.format {
            NumberFormat::Int {
                bits,
                signed: false,
                ..
            } => (1u32 << (bits.clamp(1, 24) - 1)) as f32,
            _ => 0.0,
        }
    }

    /// Whether a tensor of this shape can be quantized so.
    ///
    /// # Errors
    ///
    /// If choices of the scheme contradict each other, or the shape has not the axes of the
    /// granularity, or no elements.
    pub fn validate(&self, shape: &[usize]) -> Result<(), QuantError> {
        self.validate_choices()?;
        Groups::new(&self.granularity, shape).map(|_| ())
    }

    /// Whether the choices of the scheme go together, for any shape.
    ///
    /// # Errors
    ///
    /// If they do not.
    pub fn validate_choices(&self) -> Result<(), QuantError> {
        self.format.validate()?;
        let unsupported = |reason| {
            Err(QuantError::UnsupportedScheme {
                scheme: self.to_string(),
                reason,
            })
        };
        let unsigned = matches!(self.format, NumberFormat::Int { signed: false, .. });
        if self.mapping == Mapping::Affine && !self.format.is_int() {
            return unsupported("float formats have no zero point; use a symmetric mapping");
        }
        if self.mapping == Mapping::SymmetricNoClipping && unsigned {
            return unsupported(
                "unsigned integers have no negative side of their own; use the symmetric or the \
                 affine mapping, or signed integers",
            );
        }
        if self.mapping == Mapping::Affine && self.scale_format != ScaleFormat::F32 {
            return unsupported(
                "scales other than F32 are for the symmetric mapping; use F32 scales or a \
                 symmetric mapping",
            );
        }
        match &self.granularity {
            Granularity::PerBlock { extents } if extents.contains(&0) => {
                Err(QuantError::InvalidConfig {
                    field: "extents",
                    value: format!("{extents:?}"),
                    expected: "at least 1 along each axis",
                })
            }
            _ => Ok(()),
        }
    }

    /// The number of groups along each axis of a tensor of this shape; row-major, it is the order
    /// of [`QuantParams`](crate::QuantParams).
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn group_shape(&self, shape: &[usize]) -> Result<Vec<usize>, QuantError> {
        self.validate_choices()?;
        Ok(Groups::new(&self.granularity, shape)?.shape().to_vec())
    }

    /// The number of groups of a tensor of this shape.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn group_count(&self, shape: &[usize]) -> Result<usize, QuantError> {
        Ok(self.group_shape(shape)?.iter().product())
    }
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Symmetric => "symmetric",
            Self::SymmetricNoClipping => "symmetric without clipping",
            Self::Affine => "affine",
        })
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PerTensor => f.write_str("per tensor"),
            Self::PerChannel { axis } => write!(f, "per channel (axis {axis})"),
            Self::PerToken => f.write_str("per token"),
            Self::PerBlock { extents } => write!(f, "per block {extents:?}"),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            format,
            mapping,
            granularity,
            scale_format,
        } = self;
        write!(
            f,
            "{format}, {mapping}, {granularity}{}",
            scale_format.suffix()
        )
    }
}
