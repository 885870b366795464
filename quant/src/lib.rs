//! Quantization for [Burn](https://burn.dev).
//!
//! # The arithmetic
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and [`ScaleFormat`];
//! - [`QuantParams`] from a [`Range`];
//! - [`fake_quantize`] and, with gradients for scale and zero point, [`fake_quantize_learned`];
//! - [`gptq`] and [`adaround`]: weight rounding better than nearest, from [`InputStatistics`];
//! - [`IntegerLinear`], [`IntegerConv2d`]: what integer-only hardware computes.
//!
//! # Models
//!
//! - [`QatConfig`]: attaches quantizers to the weights of a model, with [`Override`]s by path;
//! - [`ForwardQ`]: calls a layer with the quantizers of its activations; the attribute
//!   [`quantize_calls`] writes it for a whole `impl` block;
//! - [`FakeQuantize`]: a quantizer to stand anywhere in a model, after a sum for example;
//! - [`Schedule`] and [`advance`]: when to observe, quantize and freeze;
//! - [`Unobserved`], [`QatConfig::prepare_with`] and [`ConvertConfig::convert_with`]: activations that
//!   no value comes by;
//! - [`PtqConfig`]: quantization without training, from ranges to corrected biases; [`calibrate`]:
//!   the ranges alone, by the [`ObserverConfig`] of each quantizer;
//! - [`audit()`]: what quantizes the operands of every product; [`health()`]: how well each quantizer
//!   does on data; [`sensitivity()`]: what quantizing each layer alone costs;
//!   [`MixedPrecisionConfig`]: as few bits as a bound on the accuracy allows;
//! - [`load_float_record`], [`float_record`], [`load_record`]: records of float and of prepared
//!   models;
//! - [`quantizers`] and [`map_quantizers`]: all quantizers of a model with their paths.
//!
//! # Deployment
//!
//! - [`fold`]: batch normalization into the layer before it;
//! - [`RoundingConfig`]: rounding of a model's weights, and corrected biases, from [`LayerInputs`];
//!   [`smooth_quant`] and [`awq`]: factors for [`rescale`];
//! - [`ConvertConfig`]: quantized tensors of Burn with the trained scales, their float values computed
//!   once or at every use ([`Dequantize`]); [`compare`]: how close the converted model is;
//! - [`save_safetensors`] and [`LoadConfig`]: files with as many bits as the codes have.
//!
//! # Feature flags
//!
//! `flex`, `ndarray`, `wgpu`, `vulkan`, `metal`, `cuda` and `cpu` are forwarded to Burn and compile
//! fake quantization for the backend: name those that `burn` has. Where one is missing,
//! [`QuantError::MissingFeature`] names it.

mod deploy;
mod error;
mod fake;
mod format;
mod inspect;
mod integer;
mod model;
mod module;
mod ptq;
mod qat;
mod range;
mod rounding;

pub use burn_lean_graph::{GraphError, Role, TensorMapper, Tensors, tensors};
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
pub use deploy::conversion_report::{
    ActivationMismatch, ConversionReport, ConvertedWeight, Mismatch, Outcome,
};
pub use deploy::convert::{ConvertConfig, Unsupported, quantized_weights};
pub use deploy::graph::{HostQuantParams, QuantizedGraph, QuantizedOperand};
pub use deploy::quantized_tensor::QuantizedTensor;
pub use deploy::safetensors_file::{LoadConfig, load_safetensors, save_safetensors};
pub use deploy::storage::Storage;
pub use error::QuantError;
pub use fake::codes::{from_codes, to_codes};
pub use fake::learned::{Clip, LearnedGradient, fake_quantize_learned};
pub use fake::op::fake_quantize;
pub use format::number_format::NumberFormat;
pub use format::qparams::QuantParams;
pub use format::scale_format::{ScaleFormat, ScaleRounding};
pub use format::scheme::{Granularity, Mapping, Scheme};
pub use inspect::audit::{
    Audit, AuditedLayer, Cause, Coverage, FunctionalSite, NormPair, NotFoldable, SiteKind, audit,
};
pub use inspect::compare::compare;
pub use inspect::health::{Health, QuantizerHealth, health};
pub use inspect::mixed::{Allocation, AllocationReport, MixedPrecisionConfig, Precision, Ranking};
pub use inspect::sensitivity::{LayerSensitivity, Sensitivity, sensitivity};
pub use integer::requantize::{
    Multiplier, Requantization, rounding_divide_by_pot, saturating_rounding_doubling_high_mul,
};
pub use integer::{ConvGeometry, Grid, IntegerConv2d, IntegerLinear};
pub use model::outcome::{RunOutcome, TensorOutcome};
pub use model::record::{float_record, load_float_record, load_record};
pub use model::unobserved::{LeftFloat, Unobserved};
pub use model::walk::{Located, Site, map_quantizers, quantizers};
pub use module::config::{FakeQuantizeConfig, Learned, learned_parameters};
pub use module::quantizer::FakeQuantize;
pub use module::resident::Dequantize;
pub use module::schedule::{Phase, Schedule};
pub use module::sites::SiteQuantizers;
pub use module::weight::WeightQuantizer;
pub use module::weight_config::{WeightConfig, WeightGranularity};
pub use ptq::equalization::{AwqSearch, awq, smooth_quant};
pub use ptq::fold::{FoldPair, fold};
pub use ptq::layer_inputs::{LayerInputs, patches, patches_1d};
pub use ptq::rescale::{Rescale, rescale};
pub use ptq::{ActivationRange, PtqConfig, PtqMode, PtqReport, WeightRange};
pub use qat::config::{AttachQuantizers, QatConfig};
pub use qat::flips::{FlipTracker, Flips, WeightFlips};
pub use qat::forward_q::{ForwardQ, MhaInput, TransformerDecoderInput, TransformerEncoderInput};
pub use qat::overrides::Override;
#[doc(hidden)]
pub use qat::probe::{ForwardOfEncoderLayer, ForwardOfOneInput, ForwardOfSequence, OfOneInput};
pub use qat::run::QuantizedForward;
pub use qat::training::{
    advance, apply_schedule, calibrate, calibrate_unobserved, merge_observers, set_schedule,
};
pub use range::calibrator::{entropy, mse, percentile, search};
pub use range::histogram::{Histogram, RangeMethod};
pub use range::min_max::Range;
pub use range::observer::ObserverConfig;
pub use rounding::adaround::{AdaRoundConfig, adaround};
pub use rounding::gptq::{GptqConfig, gptq};
pub use rounding::input_statistics::InputStatistics;
pub use rounding::weight_grid::WeightGrid;
pub use rounding::{RoundedWeight, Rounding, RoundingConfig, RoundingReport, bias_correction};
