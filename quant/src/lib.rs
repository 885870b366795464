//! Quantization for [Burn](https://burn.dev).
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and [`ScaleFormat`];
//! - [`QuantParams`] from a [`Range`];
//! - [`fake_quantize`] and, with gradients for scale and zero point, [`fake_quantize_learned`];
//! - [`fold`]: batch normalization into the layer before it;
//! - [`gptq`] and [`adaround`]: weight rounding better than nearest, from [`InputStatistics`];
//! - [`IntegerLinear`], [`IntegerConv2d`]: what integer-only hardware computes.

mod adaround;
mod audit;
mod calibrator;
mod control;
mod error;
mod fake_quantize;
mod fake_quantizer;
mod flips;
mod float_parameters;
mod fold;
mod gptq;
mod groups;
mod health;
mod histogram;
mod input_statistics;
mod integer;
mod number_format;
mod observer;
mod probe;
mod qparams;
mod requantize;
mod schedule;
mod scheme;
mod state;
mod table;
mod walk;
mod weight_grid;
mod weight_quantizer;

pub use adaround::{AdaRoundConfig, adaround};
pub use audit::{
    Audit, AuditedLayer, Cause, Coverage, FunctionalSite, NormPair, NotFoldable, SiteKind, audit,
};
pub use calibrator::{entropy, mse, percentile, search};
pub use error::QuantError;
pub use fake_quantize::{
    Clip, LearnedGradient, fake_quantize, fake_quantize_learned, from_codes, to_codes,
};
pub use fake_quantizer::{FakeQuantize, FakeQuantizeConfig, Learned, learned_parameters};
pub use flips::{FlipTracker, Flips, WeightFlips};
pub use fold::{FoldPair, fold};
pub use gptq::{GptqConfig, gptq};
pub use health::{Health, QuantizerHealth, health};
pub use histogram::{Histogram, RangeMethod};
pub use input_statistics::InputStatistics;
pub use integer::{ConvGeometry, Grid, IntegerConv2d, IntegerLinear};
pub use number_format::NumberFormat;
pub use observer::ObserverConfig;
pub use qparams::{QuantParams, Range};
pub use requantize::{
    Multiplier, Requantization, rounding_divide_by_pot, saturating_rounding_doubling_high_mul,
};
pub use schedule::{Phase, Schedule};
pub use scheme::{Granularity, Mapping, ScaleFormat, ScaleRounding, Scheme};
pub use walk::{Located, Site, map_quantizers, quantizers};
pub use weight_grid::WeightGrid;
pub use weight_quantizer::WeightQuantizer;
