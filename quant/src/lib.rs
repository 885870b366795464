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

mod adaround;
mod audit;
mod calibrator;
mod codes;
mod column_layout;
mod compare;
mod compiled;
mod composed;
mod control;
mod conversion_report;
mod convert;
#[cfg(feature = "cube")]
mod cube;
mod effective;
mod equalization;
mod error;
mod fake_quantize;
mod fake_quantize_config;
mod fake_quantizer;
mod flips;
mod float_parameters;
mod fold;
mod forward_q;
#[cfg(feature = "cube")]
mod fused;
mod gptq;
mod groups;
mod health;
mod histogram;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod in_memory;
mod input_statistics;
mod integer;
mod kernel;
mod layer_inputs;
mod layers;
mod learned;
mod listener;
mod mixed;
mod number_format;
mod observer;
mod overrides;
mod probe;
mod ptq;
mod qat;
mod qparams;
mod quantized_tensor;
mod range;
mod record;
mod requantize;
mod rescale;
mod resident;
mod rounding;
mod safetensors_file;
mod scale_format;
mod schedule;
mod scheme;
mod sensitivity;
mod state;
mod step;
mod storage;
mod stored;
mod straight_through;
mod table;
mod tap;
mod training;
mod unobserved;
mod walk;
mod watch;
mod weight_config;
mod weight_grid;
mod weight_quantizer;

pub use adaround::{AdaRoundConfig, adaround};
pub use audit::{
    Audit, AuditedLayer, Cause, Coverage, FunctionalSite, NormPair, NotFoldable, SiteKind, audit,
};
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
pub use compare::compare;
pub use conversion_report::{
    ActivationMismatch, ConversionReport, ConvertedWeight, Mismatch, Outcome,
};
pub use convert::{ConvertConfig, Unsupported, quantized_weights};
pub use equalization::{AwqSearch, awq, smooth_quant};
pub use error::QuantError;
pub use fake_quantize::fake_quantize;
pub use fake_quantize_config::{FakeQuantizeConfig, Learned, learned_parameters};
pub use fake_quantizer::FakeQuantize;
pub use flips::{FlipTracker, Flips, WeightFlips};
pub use fold::{FoldPair, fold};
pub use forward_q::{ForwardQ, MhaInput, TransformerDecoderInput, TransformerEncoderInput};
pub use gptq::{GptqConfig, gptq};
pub use health::{Health, QuantizerHealth, health};
pub use histogram::{Histogram, RangeMethod};
pub use input_statistics::InputStatistics;
pub use integer::{ConvGeometry, Grid, IntegerConv2d, IntegerLinear};
pub use layer_inputs::{LayerInputs, patches, patches_1d};
pub use learned::{Clip, LearnedGradient, fake_quantize_learned};
pub use mixed::{Allocation, AllocationReport, MixedPrecisionConfig, Precision, Ranking};
pub use number_format::NumberFormat;
pub use observer::ObserverConfig;
pub use overrides::Override;
#[doc(hidden)]
pub use probe::{ForwardOfEncoderLayer, ForwardOfOneInput, ForwardOfSequence, OfOneInput};
pub use ptq::{ActivationRange, PtqConfig, PtqMode, PtqReport, WeightRange};
pub use qat::{AttachQuantizers, QatConfig};
pub use qparams::QuantParams;
pub use quantized_tensor::QuantizedTensor;
pub use range::Range;
pub use record::{float_record, load_float_record, load_record};
pub use requantize::{
    Multiplier, Requantization, rounding_divide_by_pot, saturating_rounding_doubling_high_mul,
};
pub use rescale::{Rescale, rescale};
pub use resident::Dequantize;
pub use rounding::{RoundedWeight, Rounding, RoundingConfig, RoundingReport, bias_correction};
pub use safetensors_file::{LoadConfig, load_safetensors, save_safetensors};
pub use scale_format::{ScaleFormat, ScaleRounding};
pub use schedule::{Phase, Schedule};
pub use scheme::{Granularity, Mapping, Scheme};
pub use sensitivity::{LayerSensitivity, Sensitivity, sensitivity};
pub use storage::Storage;
pub use training::{
    advance, apply_schedule, calibrate, calibrate_unobserved, merge_observers, set_schedule,
};
pub use unobserved::{LeftFloat, Unobserved};
pub use walk::{Located, Site, map_quantizers, quantizers};
pub use weight_config::{WeightConfig, WeightGranularity};
pub use weight_grid::WeightGrid;
pub use weight_quantizer::WeightQuantizer;
