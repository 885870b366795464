//! Quantization for [Burn](https://burn.dev).
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and [`ScaleFormat`];
//! - [`QuantParams`] from a [`Range`];
//! - [`fake_quantize`] and, with gradients for scale and zero point, [`fake_quantize_learned`].

mod calibrator;
mod control;
mod error;
mod fake_quantize;
mod fake_quantizer;
mod groups;
mod histogram;
mod number_format;
mod observer;
mod qparams;
mod schedule;
mod scheme;
mod state;
mod walk;
mod weight_quantizer;

pub use calibrator::{entropy, mse, percentile, search};
pub use error::QuantError;
pub use fake_quantize::{
    Clip, LearnedGradient, fake_quantize, fake_quantize_learned, from_codes, to_codes,
};
pub use fake_quantizer::{FakeQuantize, FakeQuantizeConfig, Learned, learned_parameters};
pub use histogram::{Histogram, RangeMethod};
pub use number_format::NumberFormat;
pub use observer::ObserverConfig;
pub use qparams::{QuantParams, Range};
pub use schedule::{Phase, Schedule};
pub use scheme::{Granularity, Mapping, ScaleFormat, ScaleRounding, Scheme};
pub use walk::{Located, Site, map_quantizers, quantizers};
pub use weight_quantizer::WeightQuantizer;
