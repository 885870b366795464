//! Quantization for [Burn](https://burn.dev).
//!
//! # The arithmetic
//!
//! - [`Scheme`]: [`NumberFormat`], [`Mapping`], [`Granularity`] and
//!   [`ScaleFormat`](format::ScaleFormat);
//! - [`QuantParams`] from a [`Range`](fake::Range);
//! - [`fake_quantize`] and, with gradients for scale and zero point,
//!   [`fake_quantize_learned`](fake::fake_quantize_learned);
//! - [`gptq`](rounding::gptq) and [`adaround`](rounding::adaround): weight rounding better than
//!   nearest, from [`InputStatistics`](module::InputStatistics);
//! - [`IntegerLinear`](integer::IntegerLinear), [`IntegerConv2d`](integer::IntegerConv2d): what
//!   integer-only hardware computes.
//!
//! # Models
//!
//! - [`QatConfig`]: attaches quantizers to the weights of a model, with [`Override`]s by path;
//! - [`QuantizedForward`]: runs a forward pass with all of them, without an edit of the model;
//!   [`QatConfig::prepare_for`] adds those of operations that only the forward pass shows;
//! - [`ForwardQ`]: calls a layer with the quantizers of its activations, where a forward pass
//!   cannot be recorded; the attribute [`quantize_calls`] writes it for a whole `impl` block;
//! - [`FakeQuantize`]: a quantizer to stand anywhere in a model, after a sum for example;
//! - [`Schedule`] and [`advance`]: when to observe, quantize and freeze;
//! - [`Unobserved`](model::Unobserved), [`QatConfig::prepare_with`] and
//!   [`ConvertConfig::convert_with`]: activations that no value comes by;
//! - [`PtqConfig`]: quantization without training, from ranges to corrected biases; [`calibrate`]:
//!   the ranges alone, by the [`ObserverConfig`] of each quantizer;
//! - [`audit()`]: what quantizes the operands of every product; [`health()`]: how well each
//!   quantizer does on data; [`sensitivity()`]: what quantizing each layer alone costs;
//!   [`MixedPrecisionConfig`]: as few bits as a bound on the accuracy allows;
//! - [`load_float_record`](model::load_float_record), [`float_record`](model::float_record),
//!   [`load_record`]: records of float and of prepared models;
//! - [`quantizers`] and [`map_quantizers`](module::map_quantizers): all quantizers of a model with
//!   their paths.
//!
//! # Deployment
//!
//! - [`fold()`], [`fold_for`]: batch normalization into the layer before it;
//! - [`RoundingConfig`]: rounding of a model's weights, and corrected biases, from
//!   [`LayerInputs`](module::LayerInputs);
//! - [`ConvertConfig`]: quantized tensors of Burn with the trained scales, their float values
//!   computed once or at every use ([`Dequantize`]); [`compare`]: how close the converted model is;
//! - [`save_safetensors`] and [`LoadConfig`]: files with as many bits as the codes have.
//!
//! # Rooms
//!
//! Here are the names that most programs need; [`prelude`] has the few that every program needs. What
//! belongs to one subject alone lives in its module, as the report of an audit in [`inspect`].
//!
//! # Feature flags
//!
//! `flex`, `ndarray`, `wgpu`, `vulkan`, `metal`, `cuda` and `cpu` are forwarded to Burn and compile
//! fake quantization for the backend: name those that `burn` has. Where one is missing,
//! [`QuantError::MissingFeature`] names it.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod codes;
pub mod deploy;
mod error;
pub mod fake;
pub mod fold;
pub mod format;
pub mod inspect;
pub mod integer;
pub mod model;
pub mod module;
pub mod ptq;
pub mod qat;
pub mod range;
pub mod rounding;
mod table;

pub use burn_lean_graph::{Form, GraphError, Role, TensorMapper, Tensors, tensors};
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
///
/// A `forward` of your own with `&mut self` needs its `&mut` written. Without it the compiler says no
/// more than that it cannot borrow as mutable: the attribute sees names, not types, and could not tell
/// such a call from that of a layer.
///
/// ```compile_fail,E0596
/// # use burn::tensor::Tensor;
/// # use burn_lean_quant::quantize_calls;
/// struct Counted(usize);
///
/// impl Counted {
///     fn forward(&mut self, x: Tensor<2>) -> Tensor<2> {
///         self.0 += 1;
///         x
///     }
/// }
///
/// struct Net {
///     own: Counted,
/// }
///
/// #[quantize_calls]
/// impl Net {
///     fn forward(&mut self, x: Tensor<2>) -> Tensor<2> {
///         self.own.forward(x) // `(&mut self.own).forward(x)` compiles
///     }
/// }
/// ```
pub use burn_lean_quant_macros::quantize_calls;
pub use codes::{QuantizedTensor, quantized_weights, seen_weights};
pub use deploy::{
    ConversionReport, ConvertConfig, LoadConfig, Unsupported, load_safetensors, save_safetensors,
};
pub use error::QuantError;
pub use fake::{QuantParams, fake_quantize};
pub use fold::{fold, fold_for};
pub use format::{Granularity, Mapping, NumberFormat, Scheme};
pub use inspect::{MixedPrecisionConfig, audit, compare, health, sensitivity};

pub use model::{Activations, load_record};
pub use module::{
    Dequantize, FakeQuantize, FakeQuantizeConfig, Learned, Schedule, Site, WeightConfig,
    WeightGranularity, WeightQuantizer, quantizers,
};
pub use ptq::{PtqConfig, PtqMode, WeightRange};
#[doc(hidden)]
pub use qat::probe::{ForwardOfEncoderLayer, ForwardOfOneInput, ForwardOfSequence, OfOneInput};
pub use qat::{
    ForwardQ, KvCache, KvFormat, Override, QatConfig, QuantizedForward, advance, calibrate,
};
pub use range::{ObserverConfig, RangeMethod};
pub use rounding::{GptqConfig, Rounding, RoundingConfig};

/// What quantizing a model takes: `use burn_lean_quant::prelude::*`.
pub mod prelude {
    pub use crate::{
        ConvertConfig, PtqConfig, QatConfig, QuantizedForward, Schedule, WeightConfig, advance,
        audit, fold_for, load_safetensors, save_safetensors,
    };
}
