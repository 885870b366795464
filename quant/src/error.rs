//! What can go wrong, with what to do about it.

use burn_lean_graph::GraphError;
use burn_lean_reparam::{AttachError, Rejected};

/// Every error of this crate.
///
/// Functions that consume a model return it inside a [`Rejected`]; `?` converts that into a
/// `QuantError` where the model is not needed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// Another error, of one parameter of the model.
    #[error("{}: {error}", located(.path))]
    Parameter {
        /// Path of the parameter.
        path: String,
        /// What is wrong with it.
        #[source]
        error: Box<QuantError>,
    },
    /// A forward pass that cannot be recorded or executed as a graph.
    #[error("{}{}", .0, without_recording(.0))]
    Graph(#[from] GraphError),
    /// This crate was built without the operations for the backend of the model or tensor.
    #[error(
        "burn-lean was built without the operations for the backend {backend}: give `burn-lean` \
         (or `burn-lean-quant`) the cargo feature `{feature}`, as `burn` has it"
    )]
    MissingFeature {
        /// Burn's name of the backend.
        backend: String,
        /// The cargo feature.
        feature: &'static str,
    },
    /// A number of a config or record is out of its range.
    #[error("{field} is {value}, but must be {expected}")]
    InvalidConfig {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// Choices of a scheme that do not go together.
    #[error("the scheme {scheme} cannot be: {reason}")]
    UnsupportedScheme {
        /// The scheme, as it prints.
        scheme: String,
        /// Which choices contradict each other, and what to choose instead.
        reason: &'static str,
    },
    /// A channel axis that the tensor does not have.
    #[error(
        "axis {axis} of a tensor of shape {shape:?} does not exist: the channel axis must be \
         below {}", .shape.len()
    )]
    AxisOutOfRange {
        /// The channel axis of the granularity.
        axis: usize,
        /// The shape of the tensor.
        shape: Vec<usize>,
    },
    /// Blocks of more dimensions than the tensor has.
    #[error(
        "blocks of {extents:?} have more dimensions than a tensor of shape {shape:?}: give an \
         extent for each of its last dimensions at most"
    )]
    BlockRank {
        /// The extents of a block.
        extents: Vec<usize>,
        /// The shape of the tensor.
        shape: Vec<usize>,
    },
    /// A tensor without elements has no range.
    #[error("a tensor of shape {shape:?} has no elements, so no range: leave it out")]
    EmptyTensor {
        /// The shape of the tensor.
        shape: Vec<usize>,
    },
    /// A multiplier of requantization is not a sensible number.
    #[error(
        "the requantization multiplier {value} (input scale · weight scale / output scale) must be \
         positive and below 2^30: check the scales"
    )]
    InvalidMultiplier {
        /// What was asked for.
        value: f64,
    },
    /// A scale is zero, negative, infinite, NaN or subnormal.
    #[error(
        "the scale of {what} is {value}, but must be positive, finite and at least 1.2e-38: \
         calibrate again"
    )]
    InvalidScale {
        /// Whose scale.
        what: String,
        /// Its value.
        value: f32,
    },
    /// A code lies outside of its integer grid.
    #[error("{what} hold {code}, outside of [{quant_min}, {quant_max}]")]
    CodeOutOfRange {
        /// Whose codes.
        what: String,
        /// The first one outside.
        code: i64,
        /// Smallest allowed code.
        quant_min: i32,
        /// Largest allowed code.
        quant_max: i32,
    },
    /// Something has another length than its counterpart.
    #[error("{what}: expected {expected} numbers, found {found}")]
    LengthMismatch {
        /// What was counted.
        what: String,
        /// Expected count.
        expected: usize,
        /// Found count.
        found: usize,
    },
    /// A bias does not fit the `i32` of integer inference.
    #[error(
        "the bias {bias} of channel {channel} is more than 2^31 steps of {scale}: that channel's \
         weights or inputs have a far too small scale"
    )]
    BiasOverflow {
        /// Output channel.
        channel: usize,
        /// Its bias.
        bias: f32,
        /// Input scale · weight scale.
        scale: f32,
    },
    /// A sum of products left `i32`.
    #[error("an accumulator of {sum} does not fit 32 bits: use fewer bits or a narrower layer")]
    AccumulatorOverflow {
        /// The sum.
        sum: i64,
    },
    /// A path names no parameter of the model.
    #[error("the model has no parameter `{path}`{}", hint(.similar))]
    UnknownParameter {
        /// The path.
        path: String,
        /// Paths of the model that resemble it.
        similar: Vec<String>,
    },
    /// Two parameters that belong together do not fit.
    #[error("`{path}` has {found} channels, but `{other}` has {expected}")]
    ChannelMismatch {
        /// The parameter that does not fit.
        path: String,
        /// Its channels.
        found: usize,
        /// What it should fit.
        other: String,
        /// Its channels.
        expected: usize,
    },
    /// A parameter has a rank that cannot be handled.
    #[error("`{path}` has rank {rank}, but {expected}")]
    UnsupportedRank {
        /// The parameter.
        path: String,
        /// Its rank.
        rank: usize,
        /// What is accepted.
        expected: &'static str,
    },
    /// A layer cannot be handled.
    #[error("`{path}` cannot be used here: {reason}")]
    UnsupportedLayer {
        /// Path of the parameter.
        path: String,
        /// Why.
        reason: String,
    },
    /// The Hessian of a layer's inputs has no Cholesky factor.
    #[error(
        "the Hessian of the layer inputs is not positive definite at input {index}: use more \
         calibration data or a larger ridge (now {ridge})"
    )]
    NotPositiveDefinite {
        /// Index of the input feature.
        index: usize,
        /// The ridge in use.
        ridge: f64,
    },
    /// Nothing was observed.
    #[error("{what} has seen no data: run the model on calibration data first")]
    NoData {
        /// What has seen none.
        what: String,
    },
    /// The inputs of layers are asked for, and none was shown.
    #[error(
        "no linear layer and no convolution has shown its inputs, which a plain `forward` does not: run data \
         through the prepared model by `QuantizedForward::run`, as `PtqConfig::quantize_for` does by itself, or \
         call its layers with `forward_q`, which `#[quantize_calls]` puts in"
    )]
    NoLayerInputs,
    /// A quantized tensor that Burn, or the device, cannot hold.
    #[error(
        "{scheme} of shape {shape:?} cannot be a quantized tensor of Burn: {reason}; choose another \
         scheme or storage, or keep it fake-quantized (`Unsupported::KeepFakeQuantized`)"
    )]
    UnsupportedStorage {
        /// The scheme, as it prints.
        scheme: String,
        /// The shape of the tensor.
        shape: Vec<usize>,
        /// Why.
        reason: String,
    },
    /// The model has no weight to convert.
    #[error("no parameter of the model carries a weight quantizer: prepare the model first")]
    NothingToConvert,
    /// A quantizer that its schedule keeps from quantizing.
    #[error(
        "its quantizer is in the phase \"{phase}\" and does not quantize: train on until its \
         schedule quantizes, or give it another schedule"
    )]
    NotQuantizing {
        /// The phase.
        phase: String,
    },
    /// Attaching the quantizers failed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A pattern matches no weight.
    #[error(
        "the pattern `{pattern}` matches no weight of the model; weights that can be quantized: {}",
        .known.join(", ")
    )]
    UnknownPath {
        /// The pattern of the override.
        pattern: String,
        /// Paths that would match.
        known: Vec<String>,
    },
    /// A parameter group matches no weight.
    #[error(
        "the parameter group matches no weight of the model; weights that can be quantized: {}",
        .known.join(", ")
    )]
    NothingInGroup {
        /// Paths that would match.
        known: Vec<String>,
    },
    /// Everything is left out.
    #[error(
        "nothing is left to quantize: no weight of a linear layer, convolution or embedding in the \
         group that an override does not skip. For weights of other modules give an override \
         their `axis`"
    )]
    NothingToQuantize,
    /// The model has no quantizers.
    #[error("the model has no quantizers: call `QatConfig::prepare` first")]
    NotPrepared,
    /// No quantized weight has a gradient.
    #[error(
        "no quantized weight has a gradient: check that the model is on an autodiff device and that \
         the loss depends on it"
    )]
    NoGradients,
    /// Replicas are not of the same model.
    #[error("the model and its replicas differ: not all have a quantizer at `{path}`")]
    OtherQuantizers {
        /// Path of a quantizer that not all have.
        path: String,
    },
    /// A record could not be loaded.
    #[error("cannot load the {what}: {reason}")]
    Record {
        /// What was being loaded.
        what: String,
        /// What Burn said.
        reason: String,
    },
    /// A quantizer has no range, because no data passed through it while it observed.
    #[error(
        "no data was observed: calibrate the model or train it for a step, its layers called by \
         `QuantizedForward::run` or `forward_q` (`calibrate_unobserved` leaves what is trained as it is; after \
         a training on several devices it is needed, replicas keep what they observe); or leave it out \
         with an override (`skip_activation` for a layer inside of a module that has no `forward_q` \
         and calls it itself) or with `Unobserved::LeaveFloat`"
    )]
    NeverObserved,
    /// No value passes through a quantizer: the layer is called past it.
    #[error(
        "no value comes by its quantizer, so that it stays float: call the layer with `forward_q`, \
         or as `layer.forward(x)` in an `impl` block with `#[quantize_calls]`, which does not see \
         function pointers and other macros; then run the model once or give `convert_with` its \
         forward pass. Or leave it float (`Unobserved::LeaveFloat`, an override with \
         `skip_activation`)"
    )]
    NeverCalled,
    /// Several errors at once.
    #[error("{} errors: {}", .errors.len(), joined(.errors))]
    Several {
        /// The errors.
        errors: Vec<QuantError>,
    },
    /// A quantizer that takes the range of the values at hand has none of its own.
    #[error(
        "its range is that of the values at hand, so there is none to keep; use another observer \
         than `Memoryless` for a static range"
    )]
    NoStaticRange,
    /// What was observed or learned is infinite or not a number.
    #[error(
        "the {what} is infinite or not a number: look for the first layer whose output is not \
         finite, in the data or in the model"
    )]
    NonFinite {
        /// What is not finite.
        what: &'static str,
    },
    /// All that was observed is one value.
    #[error(
        "all values observed are {value}: calibrate with more or other data, or leave the layer \
         out with an override if it is dead"
    )]
    ConstantRange {
        /// The value.
        value: f32,
    },
    /// A record, a file or a quantized tensor was made with another scheme, or by another version.
    #[error(
        "what is loaded is {found}, not {expected}: prepare the model as the saved one was, or with the scheme \
         of the file"
    )]
    ForeignScheme {
        /// The scheme of the model.
        expected: String,
        /// What was found in its place.
        found: String,
    },
    /// A file has a range for an input that the model rounds by the values at hand, or the other way round.
    #[error(
        "the input of its layer is rounded {}",
        match .is_dynamic {
            true => "by the range of the values at hand in the file, and by one of its own in the model: \
                     prepare the model with `ObserverConfig::Memoryless` for activations",
            false => "by a range of its own in the file, and by that of the values at hand in the model: \
                      prepare the model with an observer that keeps a range, `ObserverConfig::MinMax` for example",
        }
    )]
    ForeignRange {
        /// Whether that of the file is the range of the values at hand.
        is_dynamic: bool,
    },
    /// A file could not be read or written, or is not what it should be.
    #[error("{action} {path}: {reason}")]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The device failed while numbers were read back.
    #[error("reading from the device failed: {reason}")]
    Device {
        /// What Burn said.
        reason: String,
    },
}

impl QuantError {
    /// [`QuantError::Device`], of what Burn says.
    pub(crate) fn device(error: impl ToString) -> Self {
        let reason = error.to_string();
        Self::Device { reason }
    }

    /// Fails with [`QuantError::LengthMismatch`].
    pub(crate) fn expect_len(
        what: impl Into<String>,
        expected: usize,
        found: usize,
    ) -> Result<(), Self> {
        match expected == found {
            true => Ok(()),
            false => Err(Self::LengthMismatch {
                what: what.into(),
                expected,
                found,
            }),
        }
    }

    /// This error, of the parameter at `path`.
    #[must_use]
    pub fn at(self, path: impl Into<String>) -> Self {
        Self::Parameter {
            path: path.into(),
            error: Box::new(self),
        }
    }
}

impl<M> From<Rejected<M, QuantError>> for QuantError {
    fn from(rejected: Rejected<M, QuantError>) -> Self {
        rejected.into_error()
    }
}

/// What to do where the forward pass cannot be recorded; nothing where it would not run otherwise either.
fn without_recording(error: &GraphError) -> &'static str {
    match error.is_of_recording() {
        true => {
            "; training and inference with layers that are called by `forward_q` (`#[quantize_calls]`) do without a recording"
        }
        false => "",
    }
}

/// A parameter by its path; a site, which is named in words, as it is.
fn located(path: &str) -> String {
    match path.contains('`') {
        true => path.into(),
        false => format!("parameter `{path}`"),
    }
}

fn joined(errors: &[QuantError]) -> String {
    let errors: Vec<String> = errors.iter().map(QuantError::to_string).collect();
    errors.join("; ")
}

fn hint(similar: &[String]) -> String {
    match similar {
        [] => String::new(),
        paths => format!("; did you mean `{}`?", paths.join("`, `")),
    }
}
