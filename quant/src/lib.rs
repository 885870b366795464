//! Quantization for [Burn](https://burn.dev).
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and [`ScaleFormat`];
//! - [`QuantParams`] from a [`Range`];
//! - [`fake_quantize`] and, with gradients for scale and zero point, [`fake_quantize_learned`];
//! - [`fold`]: batch normalization into the layer before it;
//! - [`gptq`] and [`adaround`]: weight rounding better than nearest, from [`InputStatistics`];
//! - [`IntegerLinear`], [`IntegerConv2d`]: what integer-only hardware computes.

mod adaround;
mod calibrator;
mod control;
mod conversion_report;
mod convert;
mod equalization;
mod error;
mod fake_quantize;
mod fake_quantizer;
mod float_parameters;
mod fold;
mod gptq;
mod groups;
mod histogram;
mod input_statistics;
mod integer;
mod number_format;
mod observer;
mod qparams;
mod quantized_tensor;
mod requantize;
mod rescale;
mod schedule;
mod scheme;
mod state;
mod storage;
mod walk;
mod weight_grid;
mod weight_quantizer;

pub use adaround::{AdaRoundConfig, adaround};
pub use calibrator::{entropy, mse, percentile, search};
pub use conversion_report::{ConversionReport, ConvertedWeight, Mismatch, Outcome};
pub use convert::{ConvertConfig, Unsupported, quantized_weights};
pub use equalization::{AwqSearch, awq, smooth_quant};
pub use error::QuantError;
pub use fake_quantize::{
    Clip, LearnedGradient, fake_quantize, fake_quantize_learned, from_codes, to_codes,
};
pub use fake_quantizer::{FakeQuantize, FakeQuantizeConfig, Learned, learned_parameters};
pub use fold::{FoldPair, fold};
pub use gptq::{GptqConfig, gptq};
pub use histogram::{Histogram, RangeMethod};
pub use input_statistics::InputStatistics;
pub use integer::{ConvGeometry, Grid, IntegerConv2d, IntegerLinear};
pub use number_format::NumberFormat;
pub use observer::ObserverConfig;
pub use qparams::{QuantParams, Range};
pub use quantized_tensor::QuantizedTensor;
pub use requantize::{
    Multiplier, Requantization, rounding_divide_by_pot, saturating_rounding_doubling_high_mul,
};
pub use rescale::{Rescale, rescale};
pub use schedule::{Phase, Schedule};
pub use scheme::{Granularity, Mapping, ScaleFormat, ScaleRounding, Scheme};
pub use storage::Storage;
pub use walk::{Located, Site, map_quantizers, quantizers};
pub use weight_grid::WeightGrid;
pub use weight_quantizer::WeightQuantizer;
