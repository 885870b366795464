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
mod forward_q;
mod groups;
mod histogram;
mod layers;
mod number_format;
mod observer;
mod overrides;
mod qat;
mod qparams;
mod record;
mod schedule;
mod scheme;
mod state;
mod training;
mod walk;
mod weight_quantizer;

pub use calibrator::{entropy, mse, percentile, search};
pub use error::QuantError;
pub use fake_quantize::{
    Clip, LearnedGradient, fake_quantize, fake_quantize_learned, from_codes, to_codes,
};
pub use fake_quantizer::{FakeQuantize, FakeQuantizeConfig, Learned, learned_parameters};
pub use forward_q::{ForwardQ, MhaInput, TransformerEncoderInput};
pub use histogram::{Histogram, RangeMethod};
pub use number_format::NumberFormat;
pub use observer::ObserverConfig;
pub use overrides::Override;
pub use qat::{AttachQuantizers, QatConfig, WeightConfig, WeightGranularity};
pub use qparams::{QuantParams, Range};
pub use record::{float_record, load_float_record, load_record};
pub use schedule::{Phase, Schedule};
pub use scheme::{Granularity, Mapping, ScaleFormat, ScaleRounding, Scheme};
pub use training::{advance, apply_schedule, calibrate, merge_observers, set_schedule};
pub use walk::{Located, Site, map_quantizers, quantizers};
pub use weight_quantizer::WeightQuantizer;
