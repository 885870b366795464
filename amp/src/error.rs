//! What can go wrong, with what to do about it.

use burn::tensor::{DType, FloatDType};
use burn_lean_graph::GraphError;
use burn_lean_reparam::{AttachError, Rejected};

use crate::scaler::report::SkipCause;

/// Every error of this crate.
///
/// Functions that consume a model return it inside a [`Rejected`]; `?` converts that into an
/// `AmpError` where the model is not needed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AmpError {
    /// The device cannot compute in the requested dtype.
    #[error(
        "{device} cannot compute in {dtype:?}; it can in {}. Choose one of these, or a fallback \
         (`with_fallback` of `Autocast` and `AutocastConfig`): F32, or emulation{}",
        list(.supported),
        if *.emulation { "" } else { " (not available for this device in this build)" }
    )]
    UnsupportedDtype {
        /// What was asked for.
        dtype: FloatDType,
        /// The device, as Burn prints it.
        device: String,
        /// The float dtypes it can compute in.
        supported: Vec<FloatDType>,
        /// Whether [`Fallback::Emulate`](crate::Fallback::Emulate) would work there.
        emulation: bool,
    },
    /// The dtype is no compute dtype of autocast.
    #[error("{dtype:?} is not a compute dtype of autocast; use F16, BF16, or F32 for no cast")]
    NotAComputeDtype {
        /// What was asked for.
        dtype: FloatDType,
    },
    /// The device says it supports the dtype, but computes wrong numbers in it.
    #[error(
        "{device} fails the {dtype:?} self-test `{check}`: expected {expected}, found {found}; \
         mixed precision would be wrong there. Use F32 on this device"
    )]
    SelfTest {
        /// The device, as Burn prints it.
        device: String,
        /// The dtype under test.
        dtype: FloatDType,
        /// The check that failed.
        check: &'static str,
        /// What a correct device gives.
        expected: String,
        /// What this one gave.
        found: String,
    },
    /// Attaching the casts failed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A parameter is in half precision already, so that it is no master weight, and would be rounded twice on
    /// the way to the other half precision.
    #[error(
        "parameter `{path}` is {dtype:?} already, but master weights, and weights that `materialize_half` \
         rounds, are F32: load or convert the model in F32 first"
    )]
    ParameterDtype {
        /// Path of the parameter.
        path: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A weight has numbers that F16 does not have.
    #[error(
        "parameter `{path}` has a number of magnitude {largest}, which is infinite in F16: use BF16, or \
         keep it in F32 with `AutocastConfig::with_full_precision`"
    )]
    HalfRange {
        /// Path of the parameter.
        path: String,
        /// Its largest magnitude.
        largest: f32,
    },
    /// The forward pass could not be recorded, or not executed from its recording.
    #[error("{}{}", .0, region_instead(.0))]
    Graph(#[from] GraphError),
    /// What reparameterizations make of the weights could not be recorded.
    #[error(
        "in which precision the weights compute cannot be told, as what their reparameterizations \
         make of them cannot be recorded: {0}"
    )]
    EffectiveWeights(#[source] GraphError),
    /// The loss handed to `scale` is not FP32.
    #[error(
        "the loss is {dtype:?}, but it must be F32 to be scaled (65536 is infinite in F16): cast \
         the model's output with `Autocast::forward` and compute the loss outside of it"
    )]
    LossDtype {
        /// Its dtype.
        dtype: DType,
    },
    /// A gradient is not FP32.
    #[error(
        "the gradient of `{path}` is {dtype:?}: gradients are unscaled in F32. {}",
        match .parameter {
            DType::F32 => "The parameter is F32: dtypes were mixed in the forward pass, which not every \
                           device refuses. Call its module in a `full_precision` region, or train with \
                           `Autocast::run`; `audit` names all such calls",
            _ => "The parameter itself is half; keep F32 parameters and let `AutocastConfig::prepare` \
                  cast them",
        }
    )]
    GradientDtype {
        /// Path of the parameter.
        path: String,
        /// The gradient's dtype.
        dtype: DType,
        /// The parameter's own.
        parameter: DType,
    },
    /// No parameter of the model has a gradient.
    #[error(
        "no parameter of the model has a gradient: check that the model is on an autodiff device, \
         that the loss depends on it, and that the gradients were made from this very model; of one \
         that was moved to another device by `to_device` nothing has: move it by `fork`"
    )]
    NoGradients,
    /// The crate was built without the kernels for a backend.
    #[error(
        "burn-lean-amp was built without the feature of the backend of {device}: turn it on (`flex`, \
         `ndarray`, `wgpu`, `vulkan`, `metal`, `cuda` or `cpu`), as in Burn"
    )]
    MissingFeature {
        /// The device.
        device: String,
    },
    /// The gradients to apply are those of another model.
    #[error(
        "there is an unscaled gradient of `{path}`, which is no parameter of the model to step: \
         `unscale` the gradients with the model that they are applied to"
    )]
    ForeignGradients {
        /// Path of the parameter in the model that the gradients were unscaled with.
        path: String,
    },
    /// `update` without a preceding `apply`.
    #[error("`update` was called, but no gradients were applied since the last one")]
    NothingToUpdate,
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
    /// The two steps of a model under [`OwnSteps`](crate::OwnSteps) do not go backward from the same loss.
    #[error(
        "the gradient of `{path}` is {training} by `TrainStep::step` and {inference} by the loss of \
         `InferenceStep::step`, which is what would be trained: implement `AmpTrainStep` for the model \
         instead of using `OwnSteps`"
    )]
    StepsDiffer {
        /// Path of a parameter in the model.
        path: String,
        /// An element of its gradient by Burn's `TrainStep`.
        training: f32,
        /// The same by the loss of its `InferenceStep`.
        inference: f32,
    },
    /// Too many steps in a row were skipped.
    #[error(
        "{consecutive} steps in a row were skipped, the last at loss scale {loss_scale}: {cause}{}. {}",
        .parameter.as_ref().map(|path| format!("; first non-finite gradient: `{path}`")).unwrap_or_default(),
        cure(*.cause, *.loss_scale)
    )]
    Diverged {
        /// Skipped steps in a row.
        consecutive: usize,
        /// Loss scale of the last one.
        loss_scale: f32,
        /// Why the last one was skipped.
        cause: SkipCause,
        /// First parameter, in module order, whose gradient was not finite.
        parameter: Option<String>,
    },
    /// The FP32 pass of [`calibrate_scale`](crate::calibrate_scale) is not finite itself.
    #[error(
        "the gradient of `{parameter}` is not finite in FP32, where the loss is {loss}: no loss \
         scale helps. Look for the cause in FP32 first, in the batch or in the model"
    )]
    NotFiniteInF32 {
        /// First parameter, in module order, whose gradient is not finite.
        parameter: String,
        /// The loss.
        loss: f32,
    },
    /// A record is of another version, damaged, or of something else.
    #[error("cannot load {what}: {reason}")]
    Record {
        /// What was being loaded.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Burn could not load the state of an optimizer on its default device.
    #[error(
        "the state of the optimizer could not be loaded: {reason}. Burn loads it on its default \
         device, whatever the model is on. If that is a GPU that this machine lacks, set the \
         environment variable BURN_DEVICE to the device of the model (flex, ndarray), or make the \
         optimizer with `ResumableOptimizer`"
    )]
    OptimizerState {
        /// What Burn said.
        reason: String,
    },
    /// Burn would load the state of an optimizer in another dtype than it was saved in, which its parameter does
    /// not have either.
    #[error(
        "the state of the optimizer for `{parameter}` is {recorded:?}, but Burn loads it as {loaded:?}, the default \
         of its device: make the optimizer with `ResumableOptimizer`, which keeps the dtype for `Adam` and `AdamW`, \
         or, if all parameters have one dtype, configure the device with {recorded:?} as its default \
         (`Device::configure`) before its first tensor: for a plain optimizer that is `Device::default()`"
    )]
    OptimizerDtype {
        /// Path of the parameter.
        parameter: String,
        /// What the state is in the checkpoint.
        recorded: DType,
        /// What was loaded.
        loaded: DType,
    },
    /// A checkpoint of a later step is there.
    #[error(
        "there is a checkpoint of step {latest}, so that of step {step} would never be the newest: \
         if training went back, give up what came after with `Checkpoints::discard_after`; if another \
         training saves there, give each a folder of its own"
    )]
    LaterCheckpoint {
        /// The step to save.
        step: u64,
        /// The newest step.
        latest: u64,
    },
    /// Another process, or another thread, writes into the folder of checkpoints.
    #[error(
        "another process or thread is writing checkpoints into {folder}: wait for its end, or give each \
         training a folder of its own"
    )]
    CheckpointsInUse {
        /// The folder.
        folder: String,
    },
    /// There is no complete checkpoint of a step.
    #[error(
        "there is no checkpoint of step {step} in {folder}, but {}",
        known(.steps)
    )]
    NoCheckpoint {
        /// The step that was asked for.
        step: u64,
        /// Where.
        folder: String,
        /// Steps of those that are there, ascending.
        steps: Vec<u64>,
    },
    /// A file could not be read or written.
    #[error("{action} {path}: {reason}")]
    Io {
        /// What was tried, for example `cannot write`.
        action: &'static str,
        /// The file.
        path: String,
        /// The system's reason.
        reason: String,
    },
    /// The model's forward pass could not be recorded.
    #[error("the audit could not run the forward pass to its end: {reason}")]
    Audit {
        /// What was in the way.
        reason: String,
    },
    /// Operations of the forward pass cannot be trusted.
    #[error(
        "the forward pass cannot be trusted: {}. Call modules that have F32 parameters or constants \
         in a `full_precision` region, and cast tensors that the model makes itself with \
         `to_region`; `Autocast::run` needs neither",
        .sites.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    UnsoundOperations {
        /// All places of them.
        sites: Vec<crate::audit::CallSite>,
    },
    /// The device failed while numbers were read back.
    #[error("reading from the device failed: {reason}")]
    Device {
        /// What Burn said.
        reason: String,
    },
}

impl<M> From<Rejected<M, AmpError>> for AmpError {
    fn from(rejected: Rejected<M, AmpError>) -> Self {
        rejected.into_error()
    }
}

/// What to do where the forward pass cannot be recorded; nothing where a region would not help.
fn region_instead(error: &GraphError) -> &'static str {
    match error.is_of_recording() {
        true => "; `AutocastConfig::prepare` and `Autocast::forward` do without a recording",
        false => "",
    }
}

/// What to do about skipped steps of this cause, the last of them at `loss_scale`.
fn cure(cause: SkipCause, loss_scale: f32) -> &'static str {
    match cause {
        SkipCause::ScaleIsStatic => {
            "A smaller `LossScale::Static`, `LossScale::Dynamic` or BF16 may help"
        }
        SkipCause::ScaleTooHigh => {
            "The loss scale was still to be lowered: allow more skipped steps in a row \
             (`max_consecutive_skips`), and more than `hysteresis`, or begin with a smaller `init_scale`, as \
             `calibrate_scale` proposes it"
        }
        SkipCause::ScaleAtFloor if loss_scale > 1.0 => "A lower `min_scale` may help",
        SkipCause::ScaleAtFloor if loss_scale > f32::MIN_POSITIVE => {
            "`calibrate_scale` says which smaller loss scale would help, if any; BF16 may do without one"
        }
        SkipCause::OtherReplica => "The report of that replica says why",
        SkipCause::ScaleAtFloor | SkipCause::LossNotFinite | SkipCause::NormNotFinite => {
            "Lowering the loss scale further would not help"
        }
    }
}

fn list(dtypes: &[FloatDType]) -> String {
    let names: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
    names.join(", ")
}

/// The steps that checkpoints are there of.
fn known(steps: &[u64]) -> String {
    match steps {
        [] => "none of any other".into(),
        steps => {
            let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
            format!("of {}", steps.join(", "))
        }
    }
}
