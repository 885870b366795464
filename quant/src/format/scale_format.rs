//! The formats that scales are stored in.

use serde::{Deserialize, Serialize};

/// How scales are stored; the scale that is used is always the stored one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ScaleFormat {
    /// F32.
    #[default]
    F32,
    /// A power of two (UE8M0), as in the OCP microscaling formats (MX).
    PowerOfTwo(ScaleRounding),
    /// An unsigned E4M3 times one F32 scale of the whole tensor, as in NVFP4.
    E4M3(ScaleRounding),
}

impl ScaleFormat {
    /// What the name of a scheme ends with.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::F32 => "",
            Self::PowerOfTwo(ScaleRounding::Up) => ", power-of-two scales",
            Self::PowerOfTwo(ScaleRounding::Standard) => ", power-of-two scales as published",
            Self::E4M3(ScaleRounding::Up) => ", E4M3 scales",
            Self::E4M3(ScaleRounding::Standard) => ", E4M3 scales as published",
        }
    }
}

/// How a scale is rounded to its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum ScaleRounding {
    /// Up, so that nothing is clipped: what Burn does.
    #[default]
    Up,
    /// As published: E4M3 to nearest; powers of two by the exponent of the largest magnitude
    /// (OCP's floor), which clips up to a quarter of the range.
    Standard,
}
