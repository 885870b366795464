//! Quantization for [Burn](https://burn.dev).
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and [`ScaleFormat`];
//! - [`QuantParams`] from a [`Range`];
//! - [`fake_quantize`] and, with gradients for scale and zero point, [`fake_quantize_learned`].

mod codes;
mod composed;
mod error;
mod fake_quantize;
mod groups;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod in_memory;
mod kernel;
mod learned;
mod number_format;
mod qparams;
mod range;
mod scale_format;
mod scheme;
mod step;
mod straight_through;

pub use codes::{from_codes, to_codes};
pub use error::QuantError;
pub use fake_quantize::fake_quantize;
pub use learned::{Clip, LearnedGradient, fake_quantize_learned};
pub use number_format::NumberFormat;
pub use qparams::QuantParams;
pub use range::Range;
pub use scale_format::{ScaleFormat, ScaleRounding};
pub use scheme::{Granularity, Mapping, Scheme};
