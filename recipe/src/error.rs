//! What can go wrong with a recipe.

use std::fmt::Display;
use std::path::Path;

use burn_lean_amp::AmpError;
use burn_lean_deploy::DeployError;
use burn_lean_prune::PruneError;
use burn_lean_quant::QuantError;
use burn_lean_reparam::{AttachError, Rejected};

use crate::BrokenBound;

/// What can go wrong with a recipe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// A file is no recipe.
    #[error("cannot read the recipe {path}: {reason}")]
    File {
        /// The file, or `text` where there is none.
        path: String,
        /// What the parser says, with the place.
        reason: String,
    },
    /// A field is out of range, or does not go together with another one.
    #[error("`{stage}.{field}` is {value}, but must be {expected}")]
    Invalid {
        /// The stage: `recipe`, `train`, `prune`, `prune.tune`, `quantize[0]`, `quantize[0].train`…; `run`,
        /// `report`, `bounds`.
        stage: String,
        /// Its field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        expected: String,
    },
    /// A text names no numbers.
    #[error("`{text}` is no number format: int2 to int8, uint2 to uint8, e4m3, e5m2, e2m1 or none")]
    Numbers {
        /// The text.
        text: String,
    },
    /// A stage needs something that the task does not say.
    #[error("`{stage}` needs {what}: call `{method}`")]
    TaskLacks {
        /// The stage.
        stage: String,
        /// What is missing.
        what: &'static str,
        /// The method of [`Task`](crate::Task) or [`Run`](crate::Run) that says it.
        method: &'static str,
    },
    /// A weight that a stage works on carries a reparameterization already: an adapter, a mask or a quantizer of
    /// before.
    #[error(
        "`{stage}`: `{path}` carries the reparameterization `{name}` already, and would get another one: \
         fold it in with `Module::materialize` before the run, or leave the weight out by `exclude` \
         (the method `gradual` takes a model that carries nothing)"
    )]
    Reparameterized {
        /// The stage: `prune`, `quantize[0]`…
        stage: String,
        /// Path of the weight.
        path: String,
        /// Name of what it carries.
        name: String,
    },
    /// The loader gave no batch.
    #[error(
        "`{stage}`: the loader gave no batch: `batches` of the task must give some for every seed"
    )]
    NoBatch {
        /// The stage.
        stage: String,
    },
    /// The test set of a report gave no example.
    #[error(
        "`report`: `test` gave no example: it is called several times, and must give all examples from the \
         start each time"
    )]
    NoTestExample,
    /// A batch that is trained on, or that an example is taken of, has none.
    #[error("`{stage}`: a batch has no example: leave empty batches out of the loader")]
    EmptyBatch {
        /// The stage.
        stage: String,
    },
    /// A training epoch ended with a loss or with weights that are infinite or NaN, in mixed precision after steps that were
    /// all skipped. With a state folder the last checkpoint is kept.
    #[error(
        "`{stage}`, epoch {epoch}: the training has diverged, its last loss is {loss}{}: lower \
         `learning_rate`, set `max_norm`, and look for NaN in the batches",
        .parameter.as_ref().map_or(String::new(), |path| format!(", and `{path}` is not finite"))
    )]
    Diverged {
        /// The stage.
        stage: String,
        /// Its epoch, as progress shows it.
        epoch: usize,
        /// The last loss, before the last step.
        loss: f32,
        /// A parameter with an infinity or NaN, where nothing looks at gradients (without a loss scale).
        parameter: Option<String>,
    },
    /// A closure of the task failed.
    #[error("{reason}")]
    Task {
        /// What it said.
        reason: String,
    },
    /// The progress callback ended the run; everything finished is kept.
    #[error(
        "ended by the progress callback in stage `{stage}`; with a state folder the next run goes \
         on from the last checkpoint"
    )]
    Interrupted {
        /// The stage.
        stage: String,
    },
    /// The state folder is of another version, or belongs to another run.
    ///
    /// Compared are the recipe without `export`, `bounds` and `checkpoint_steps`; the identity of the run; the
    /// tensors of the initial model, to the bit; and what its weights carry: the tensors of adapters, masks, ranges
    /// and scales, and of quantizers the config, the schedule, the step, and whether they quantize, observe and
    /// learn. Not compared are constants, the scale of an adapter for example, and which parameters are frozen:
    /// they belong into [`Run::with_identity`](crate::Run::with_identity).
    #[error(
        "the state in {folder} is that of another run: {field} is {found} here and {kept} there; \
         name another folder, or remove this one"
    )]
    StateOfAnotherRun {
        /// The state folder.
        folder: String,
        /// What differs, for example `prune.sparsity`.
        field: String,
        /// Its value in the folder.
        kept: String,
        /// Its value here.
        found: String,
    },
    /// A file of the state folder is damaged.
    #[error("{path} is damaged: {reason}; remove {remove}")]
    State {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
        /// What is given up.
        remove: &'static str,
    },
    /// Another run writes into the state folder.
    #[error(
        "the state in {folder} is in use by another run: wait for its end, or name another folder"
    )]
    StateInUse {
        /// The state folder.
        folder: String,
    },
    /// A file or folder cannot be read or written.
    #[error("{action} {path}: {reason}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: String,
        /// What the system says.
        reason: String,
    },
    /// A stage failed.
    #[error("stage `{stage}`: {error}")]
    Stage {
        /// The stage.
        stage: String,
        /// Why.
        #[source]
        error: Box<RecipeError>,
    },
    /// Models do not average.
    #[error("{path}: {reason}")]
    Soup {
        /// The tensor, or the model.
        path: String,
        /// Why.
        reason: String,
    },
    /// A compressed model breaks bounds.
    #[error("{}", broken.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    BrokenBounds {
        /// Each of them.
        broken: Vec<BrokenBound>,
    },
    /// A counter of energy is not there, or cannot be read.
    #[error("{counter}: {reason}")]
    EnergyCounter {
        /// `RAPL (CPU)`, `NVML (GPU)`, or the name of a counter of one's own.
        counter: String,
        /// Why.
        reason: String,
    },
    /// What tasks on a device take is not known.
    #[error("not measurable here: {reason}")]
    Energy {
        /// Why, for each kind of counter.
        reason: String,
    },
    /// Of mixed precision.
    #[error("{}", of_amp(.0))]
    Amp(#[from] AmpError),
    /// Of quantization.
    #[error("{}", of_quant(.0))]
    Quant(#[from] QuantError),
    /// Of pruning.
    #[error(transparent)]
    Prune(#[from] PruneError),
    /// Of export.
    #[error(transparent)]
    Deploy(#[from] DeployError),
    /// Of several reparameterizations on one weight.
    #[error(transparent)]
    Attach(#[from] AttachError),
}

impl RecipeError {
    /// A model that has nothing to train or to compress.
    pub(crate) fn no_parameters(stage: &str) -> Self {
        Self::Invalid {
            stage: stage.into(),
            field: "model",
            value: "one without parameters".into(),
            expected: "one that has some".into(),
        }
    }

    /// An error of a closure of the task, an evaluation for example.
    pub fn task(reason: impl Display) -> Self {
        Self::Task {
            reason: reason.to_string(),
        }
    }

    /// Of a counter of energy.
    pub(crate) fn counter(counter: &str, reason: impl Display) -> Self {
        Self::EnergyCounter {
            counter: counter.into(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path, reason: impl Display) -> Self {
        Self::Io {
            action,
            path: path.display().to_string(),
            reason: reason.to_string(),
        }
    }

    /// Of a file of a finished stage.
    pub(crate) fn state(path: &Path, reason: impl Display) -> Self {
        Self::State {
            path: path.display().to_string(),
            reason: reason.to_string(),
            remove: "the folders of this stage and of those after it to run them again",
        }
    }

    /// Of the file that says whose state it is.
    pub(crate) fn run_file(path: &Path, reason: impl Display) -> Self {
        Self::State {
            path: path.display().to_string(),
            reason: reason.to_string(),
            remove: "the state folder to begin anew",
        }
    }

    /// Of a recipe in this file.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::File { reason, .. } => Self::File {
                path: path.display().to_string(),
                reason,
            },
            error => error,
        }
    }

    /// In which stage it happened; what names one already stays as it is.
    pub(crate) fn at(self, stage: &str) -> Self {
        match self {
            Self::Invalid { .. }
            | Self::TaskLacks { .. }
            | Self::Reparameterized { .. }
            | Self::NoBatch { .. }
            | Self::NoTestExample
            | Self::EmptyBatch { .. }
            | Self::Diverged { .. }
            | Self::Interrupted { .. }
            | Self::StateOfAnotherRun { .. }
            | Self::State { .. }
            | Self::StateInUse { .. }
            | Self::Stage { .. } => self,
            error => Self::Stage {
                stage: stage.into(),
                error: Box::new(error),
            },
        }
    }
}

/// What a program that calls `amp` itself can do, a recipe cannot.
fn of_amp(error: &AmpError) -> String {
    match error {
        AmpError::Graph(graph) if graph.is_of_recording() => format!(
            "{graph}; in F32 (`dtype = \"f32\"`) a training without quantizers needs no recording"
        ),
        error => error.to_string(),
    }
}

/// Likewise of `quant`.
fn of_quant(error: &QuantError) -> String {
    match error {
        QuantError::Graph(graph) if graph.is_of_recording() => format!(
            "{graph}; a recipe quantizes recorded forward passes alone: without a recording `PtqConfig` and \
             `QatConfig` do, where layers are called by `forward_q`"
        ),
        error => error.to_string(),
    }
}

macro_rules! from_rejected {
    ($($error:ty),*) => {$(
        impl<M> From<Rejected<M, $error>> for RecipeError {
            fn from(rejected: Rejected<M, $error>) -> Self {
                rejected.into_error().into()
            }
        }
    )*};
}
from_rejected!(AmpError, QuantError, PruneError, AttachError, RecipeError);
