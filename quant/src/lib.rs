//! Quantization for [Burn](https://burn.dev).
//!
//! # The arithmetic
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and [`ScaleFormat`];
//! - [`QuantParams`] from a [`Range`];
//! - [`fake_quantize`] and, with gradients for scale and zero point, [`fake_quantize_learned`].
//!
//! # Models
//!
//! - [`QatConfig`]: attaches quantizers to the weights of a model, with [`Override`]s by path;
//! - [`ForwardQ`]: calls a layer with the quantizers of its activations; the attribute
//!   [`quantize_calls`] writes it for a whole `impl` block;
//! - [`FakeQuantize`]: a quantizer to stand anywhere in a model, after a sum for example;
//! - [`Schedule`] and [`advance`]: when to observe, quantize and freeze;
//! - [`calibrate`]: ranges without training, by the [`ObserverConfig`] of each quantizer;
//! - [`load_float_record`], [`float_record`], [`load_record`]: records of float and of prepared
//!   models;
//! - [`quantizers`] and [`map_quantizers`]: all quantizers of a model with their paths.

mod calibrator;
mod codes;
mod composed;
mod control;
mod error;
mod fake_quantize;
mod fake_quantize_config;
mod fake_quantizer;
mod forward_q;
mod groups;
mod histogram;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod in_memory;
mod kernel;
mod layers;
mod learned;
mod number_format;
mod observer;
mod overrides;
mod probe;
mod qat;
mod qparams;
mod range;
mod record;
mod scale_format;
mod schedule;
mod scheme;
mod state;
mod step;
mod straight_through;
mod training;
mod walk;
mod weight_quantizer;

/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor, activation::relu};
/// use burn_lean_quant::{QatConfig, Site, quantize_calls, quantizers};
///
/// #[derive(Module, Debug)]
/// struct Net {
///     fc1: Linear,
///     fc2: Linear,
/// }
///
/// #[quantize_calls]
/// impl Net {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.fc2.forward(relu(self.fc1.forward(x)))
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let layer = LinearConfig::new(4, 4);
/// let net = Net { fc1: layer.init(&device), fc2: layer.init(&device) };
/// let net = QatConfig::new().prepare(net)?;
/// net.forward(Tensor::ones([1, 4], &device));
/// let inputs = quantizers(&net).into_iter().filter(|located| located.site == Site::Input);
/// assert!(inputs.map(|located| located.quantizer).all(|input| input.is_observed()));
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
pub use burn_lean_quant_macros::quantize_calls;
pub use calibrator::{entropy, mse, percentile, search};
pub use codes::{from_codes, to_codes};
pub use error::QuantError;
pub use fake_quantize::fake_quantize;
pub use fake_quantize_config::{FakeQuantizeConfig, Learned, learned_parameters};
pub use fake_quantizer::FakeQuantize;
pub use forward_q::{ForwardQ, MhaInput, TransformerEncoderInput};
pub use histogram::{Histogram, RangeMethod};
pub use learned::{Clip, LearnedGradient, fake_quantize_learned};
pub use number_format::NumberFormat;
pub use observer::ObserverConfig;
pub use overrides::Override;
#[doc(hidden)]
pub use probe::{IntoProbe, OfOneInput, Probe};
pub use qat::{AttachQuantizers, QatConfig, WeightConfig, WeightGranularity};
pub use qparams::QuantParams;
pub use range::Range;
pub use record::{float_record, load_float_record, load_record};
pub use scale_format::{ScaleFormat, ScaleRounding};
pub use schedule::{Phase, Schedule};
pub use scheme::{Granularity, Mapping, Scheme};
pub use training::{advance, apply_schedule, calibrate, merge_observers, set_schedule};
pub use walk::{Located, Site, map_quantizers, quantizers};
pub use weight_quantizer::WeightQuantizer;
