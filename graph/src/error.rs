//! What cannot be recorded or executed, and what to do then.

use std::path::PathBuf;

use burn::backend::ir::TensorId;

/// Why a forward pass could not be recorded or executed as a graph.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The forward pass panicked while it was recorded.
    #[error(
        "the forward pass cannot be recorded: {reason} (after {after}). {}",
        advice(reason)
    )]
    Forward {
        /// What the forward pass said.
        reason: String,
        /// The last operation before it, with the parameters that it reads.
        after: String,
    },
    /// A tensor of the result does not come from the recording.
    #[error(
        "tensor {index} of the result was not computed from the recorded model and inputs: \
         compute it inside of the closure, from what the closure is given"
    )]
    ForeignOutput {
        /// Its position among the tensors of the result.
        index: usize,
    },
    /// What the forward pass leaves in a running state is not part of the recording.
    #[error(
        "what the forward pass leaves in the running state `{path}` cannot be recorded: {reason}. \
         Compute it from what the closure is given"
    )]
    RunningState {
        /// Its path; all of them where it may be any.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The model has no parameters, and the inputs no tensors: there is no device to run on.
    #[error("neither the model nor the inputs have a tensor, so there is no device to run on")]
    NoDevice,
    /// What the operations read is on several devices.
    #[error(
        "{what} is on {found}, other tensors that the forward pass reads are on {device}: move the model \
         and its inputs to one device before the closure. A `clone` of a model shares its running \
         statistics, so that moving one moves those of the other: save one and load it elsewhere"
    )]
    SeveralDevices {
        /// The parameter or the input.
        what: String,
        /// Where it is.
        found: String,
        /// Where the others are.
        device: String,
    },
    /// A model or a tensor is on a backend that this project has no operations for.
    #[error(
        "there are no operations of burn-lean for the backend {backend}: move the model and its inputs to flex, \
         to ndarray, or to a device of CubeCL (wgpu, Vulkan, Metal, CUDA, its CPU runtime)"
    )]
    UnsupportedBackend {
        /// Burn's name of the backend.
        backend: String,
    },
    /// The result of the closure holds no tensor.
    #[error(
        "the recorded closure gives no tensor, so that nothing of it has to be computed: return \
         what it computes"
    )]
    NoResult,
    /// Burn's capture refused the recording.
    #[error(
        "Burn's capture device refused the recording: {reason}{}",
        advice_of_capture(reason)
    )]
    Capture {
        /// What Burn said.
        reason: String,
    },
    /// The device failed while numbers were read back.
    #[error("reading from the device failed: {reason}")]
    Device {
        /// What Burn said.
        reason: String,
    },
    /// An operation cannot be executed.
    #[error(
        "operation `{operation}` of {module} cannot be executed from a recording: {why}. Write it with other \
         operations, or compute it outside of the recorded closure"
    )]
    Operation {
        /// Name of the operation.
        operation: &'static str,
        /// The module it belongs to, as far as it is known.
        module: String,
        /// What is missing.
        why: String,
    },
    /// Burn panics in an operation.
    #[error(
        "operation `{operation}` of {module} panics: {reason}. Look at the values that arrive there, indices \
         beyond the end for example, and at the memory of the device"
    )]
    Panics {
        /// Name of the operation.
        operation: &'static str,
        /// The module it belongs to, as far as it is known.
        module: String,
        /// What Burn said, and where.
        reason: String,
    },
    /// An operation that the model carries, a fake quantizer say, refused a tensor.
    #[error("`{path}` cannot be applied: {why}")]
    Hook {
        /// Path of the module in the model.
        path: String,
        /// What it said.
        why: String,
    },
    /// Gradients of the recording differ from those of the model: something inside of the forward
    /// pass stops gradients, which a recording does not show.
    #[error(
        "the gradient of `{parameter}` through the recording is off by {error:.1e} of its size: \
         the forward pass stops gradients somewhere (`detach`), which a recording cannot show. Call \
         `burn_lean::stop_gradient(x)` in the place of `x.detach()`; in code that is not yours detach \
         outside of the recorded closure, which returns what the loss is made of"
    )]
    StopsGradients {
        /// Path of the parameter, or `input` and its place.
        parameter: String,
        /// Distance of the gradients, relative to the norm of the right one.
        error: f32,
    },
    /// A recording was executed with another model or with inputs of other shapes.
    #[error("the recording is of {recorded}, but got {found}: record again")]
    Mismatch {
        /// What was recorded.
        recorded: String,
        /// What came.
        found: String,
    },
    /// A value that was to take the place of a parameter has another shape or dtype.
    #[error("`{path}` is {expected}: {found} cannot take its place")]
    Replacement {
        /// Path of the parameter.
        path: String,
        /// What it is.
        expected: String,
        /// What came.
        found: String,
    },
    /// A walk needs at least one batch.
    #[error("there is no batch to walk over: give at least one")]
    NoBatch,
    /// A walk is over an evaluation, but the model or an input is on an autodiff device.
    #[error(
        "a walk is over an evaluation, but the recording is of a training pass: give it \
         `model.valid()`, and inputs on a device without autodiff"
    )]
    Training,
    /// The forward pass did something else for another batch.
    #[error(
        "the forward pass of batch {batch} differs from that of batch 0: {found} instead of \
         {expected}. Batches may differ in shape, not in what is computed; a loop over time computes \
         something else for another length: pad or cut sequences to one length, or take batches of one kind"
    )]
    Differs {
        /// The batch.
        batch: usize,
        /// What it does.
        found: String,
        /// What the first one does.
        expected: String,
    },
    /// The result of a walk was asked for before its end.
    #[error("the walk is not at its end: call `finish` before asking for results")]
    Unfinished,
    /// Activations could not be written to a file or read back.
    #[error(
        "activations cannot be kept in files in {}: {reason}. Free space there, or choose another folder",
        .folder.display()
    )]
    Spill {
        /// The folder.
        folder: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// An operand or result that is not there, or of another kind.
    #[error("tensor {index} of operation `{operation}` cannot be shown: {why}")]
    Operand {
        /// Name of the operation.
        operation: &'static str,
        /// The position that was asked for.
        index: usize,
        /// What is there.
        why: String,
    },
    /// A tensor was asked for where it is not there: it is made later, or nothing reads it any more.
    #[error(
        "`{tensor}` is not alive at operation {operation} of the recording: ask for it at an operation that \
         reads it, or right after the one that makes it"
    )]
    NotAlive {
        /// The tensor.
        tensor: TensorId,
        /// Which operation, counted from 0.
        operation: usize,
    },
    /// A parameter that the recorded operations do not read.
    #[error(
        "no operation of the recording reads a parameter `{path}` of this rank: check the path, \
         and that the forward pass calls its module"
    )]
    Parameter {
        /// The path that was asked for.
        path: String,
    },
}

/// What to do about a tensor of a recording that is over.
const EARLIER: &str = "The closure reads a tensor that an earlier pass left: a cache of keys and values, a \
                       hidden state. Such a state goes in with the inputs and comes back with the results \
                       (`tensors!` names the tensors of a type of your own; those of Burn's caches are \
                       private)";

/// Of a forward pass that would fail anyway.
const FAILS_ANYWAY: &str =
    "It would not run without a recording either, where a shape or a value does not fit";

/// Of dtypes that no operation takes together, which a GPU computes all the same, wrongly.
const OTHER_DTYPE: &str =
    "The dtype of an input is not that of the weights that it meets: cast the input, or the model";

impl GraphError {
    /// Whether it is of the recording: called by itself, the model may well run.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_graph::record;
    ///
    /// let device = Device::flex();
    /// let model = LinearConfig::new(4, 2).init(&device);
    /// let x = Tensor::<2>::ones([3, 4], &device);
    /// let reads = record(&model, &x, |model, x| {
    ///     let y = model.forward(x);
    ///     y.clone() / y.sum().into_scalar::<f32>()
    /// });
    /// assert!(reads.unwrap_err().is_of_recording());
    /// let fails_anyway = record(&model, &x, |model, x| model.forward(x.reshape([2, 5])));
    /// assert!(!fails_anyway.unwrap_err().is_of_recording());
    /// ```
    pub fn is_of_recording(&self) -> bool {
        match self {
            Self::Forward { reason, .. } => ![FAILS_ANYWAY, OTHER_DTYPE].contains(&advice(reason)),
            Self::ForeignOutput { .. }
            | Self::RunningState { .. }
            | Self::Capture { .. }
            | Self::Operation { .. }
            | Self::StopsGradients { .. } => true,
            _ => false,
        }
    }
}

/// What to do about a forward pass that panicked so while it was recorded: with a message, and its place at the end.
fn advice(reason: &str) -> &'static str {
    // The user's own files may have any name.
    let (said, place) = reason.rsplit_once(" (at ").unwrap_or((reason, ""));
    let reads_in = |package: &str, file: &str| {
        said.contains("no concrete value") && place.contains(package) && place.contains(file)
    };
    let elsewhere = said.contains("wrong backend") || said.contains("same device");
    // Two recordings have two capture devices, unless the second is lent that of the first.
    let is_earlier = elsewhere && said.matches("Capture(").count() > 1;
    if is_earlier || said.contains("scope is already complete") {
        EARLIER
    } else if elsewhere {
        "The closure uses a tensor or a module that it was not given, makes one on a device from outside of \
         it, or moves one to another device: pass tensors in its input, make a second model a part of the \
         model, and build what holds tensors, as a loss with weights, inside of the closure, on the device \
         of what the closure is given (`x.device()`)"
    } else if reads_in("burn-nn", "ctc.rs") {
        "Burn's `CTCLoss` reads the lengths where it is built with debug assertions: build with `--release`, or \
         compute the loss outside of the closure, from the log-probabilities that it returns"
    } else if reads_in("burn-tensor", "check.rs") || reads_in("burn-tensor", "orderable.rs") {
        "While recording, tensors have no values, and Burn's `one_hot` and `one_hot_fill` read them: pass \
         the one-hot tensor as an input, or make it by `labels.unsqueeze_dim::<2>(1).equal(classes)` with \
         `classes = Tensor::<1, Int>::arange(0..count, &device).unsqueeze()`"
    } else if said.contains("not implemented") && place.contains("burn-router") {
        "Burn does not record this operation, which by itself may well run: its quantization of tensors \
         (`quantize`, `quantize_dynamic`) is one. Compute it outside of the recorded closure, or write it with \
         other operations"
    } else if said.contains("DTypeMismatch") {
        OTHER_DTYPE
    } else if said.contains("capture device with autodiff") {
        "A BatchNorm that is called twice in training reads what its first call has left: run the closure once \
         for each batch and add the losses outside of it, which leaves the model what it is, or call it once on \
         both batches joined (`Tensor::cat`), whose statistics are those of both. A module of the closure's own \
         is built outside of it and made a part of the model; `to_device` and `backward` are called outside"
    } else if ["no concrete value", "autodiff", "apture"]
        .iter()
        .any(|cause| said.contains(cause) || place.contains("burn-") && place.contains(cause))
    {
        "While recording, tensors have no values and no backward pass: read values (`into_scalar`, \
         `into_data`), call `backward`, `inner` or `to_device` outside of the recorded closure"
    } else {
        FAILS_ANYWAY
    }
}

fn advice_of_capture(reason: &str) -> String {
    match reason.contains("undeclared input") {
        true => format!(". {EARLIER}"),
        false => String::new(),
    }
}
