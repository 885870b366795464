//! Quantization for [Burn](https://burn.dev).
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and [`ScaleFormat`];
//! - [`QuantParams`] from a [`Range`];
//! - [`fake_quantize`] and, with gradients for scale and zero point, [`fake_quantize_learned`].

mod error;
mod fake_quantize;
mod groups;
mod number_format;
mod qparams;
mod scheme;

pub use error::QuantError;
pub use fake_quantize::{
    Clip, LearnedGradient, fake_quantize, fake_quantize_learned, from_codes, to_codes,
};
pub use number_format::NumberFormat;
pub use qparams::{QuantParams, Range};
pub use scheme::{Granularity, Mapping, ScaleFormat, ScaleRounding, Scheme};
