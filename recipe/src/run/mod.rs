//! Doing what a recipe says: stage after stage, from where an earlier run was ended.

mod check;
mod checksum;
mod dtype;
mod progress;
mod prune;
mod quantize;
mod rounded;
mod session;
mod shrink;
mod train;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn_lean_graph::{Tensors, model_device};
use burn_lean_prune::{Batch, Masks};
use burn_lean_reparam::{Rejected, settle};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use checksum::checksums;
use progress::Listener;
pub use progress::Progress;
use quantize::Source;
use session::{Examples, Outputs, Session, Shipped, load, own};

use crate::state::State;
use crate::state::files::FILES;
use crate::{Recipe, RecipeError, Row, Task, TrainStage};

/// Where the latency of a model is measured, with one example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Latency {
    /// Nowhere.
    None,
    /// In Burn, on the device of the model.
    #[default]
    Burn,
    /// In the engine for the CPU, on the threads of rayon's pool.
    #[cfg(feature = "engine")]
    Engine,
}

impl Latency {
    /// As a state folder says it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Burn => "burn",
            #[cfg(feature = "engine")]
            Self::Engine => "engine",
        }
    }
}

/// The model of one stage.
#[derive(Debug, Clone)]
pub struct StageOutcome<M> {
    /// What was measured.
    pub row: Row,
    /// The model: plain, zeros folded in; converted where it is quantized.
    pub model: M,
    /// Whether its batch normalizations went into the layers before them.
    pub folded: bool,
}

impl<M> StageOutcome<M> {
    /// Of a stage that folds nothing.
    fn new(row: Row, model: M) -> Self {
        Self {
            row,
            model,
            folded: false,
        }
    }
}

/// What came out of a recipe.
#[derive(Debug, Clone)]
pub struct Outcome<M> {
    /// The stages in their order; the first is the dense model.
    pub stages: Vec<StageOutcome<M>>,
    /// The zeros of a pruned model.
    pub masks: Option<Masks>,
}

impl<M> Outcome<M> {
    /// The dense model.
    pub fn dense(&self) -> &StageOutcome<M> {
        &self.stages[0]
    }

    /// The model of the last stage.
    pub fn last(&self) -> &StageOutcome<M> {
        &self.stages[self.stages.len() - 1]
    }

    /// What was measured, in the order of the stages.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.stages.iter().map(|stage| &stage.row)
    }
}

/// Runs a recipe.
///
/// With a [state folder](Self::with_state) a run that ends at any moment, by a kill too, goes on from
/// its last finished stage or checkpoint when it is started again; on a CPU what comes out is bit by
/// bit what an uninterrupted run gives, if `batches` and `loss` of the task follow from their
/// arguments alone.
#[derive(Debug)]
pub struct Run<'a> {
    recipe: &'a Recipe,
    state: Option<PathBuf>,
    identity: Value,
    pub(crate) output: Option<PathBuf>,
    pub(crate) latency: Latency,
    pub(crate) listener: Listener<'a>,
}

impl<'a> Run<'a> {
    /// Without state and output, with progress bars on a terminal.
    pub fn new(recipe: &'a Recipe) -> Self {
        Self {
            recipe,
            state: None,
            identity: Value::Null,
            output: None,
            latency: Latency::Burn,
            listener: Listener::bars(),
        }
    }

    /// Keeps finished stages and checkpoints in this folder, and goes on from what is in it.
    ///
    /// The initial model, with what it carries, must be the same to the bit: adapters that begin at random need
    /// a seed of the device, ranges of quantizers the same calibration.
    pub fn with_state(mut self, folder: impl AsRef<Path>) -> Self {
        self.state = Some(folder.as_ref().into());
        self
    }

    /// What else the models depend on, data and batches above all: kept beside the recipe in the
    /// [state folder](Self::with_state), which refuses a run where it differs. Constants of layers and adapters
    /// (a dropout, the scale of a [`Lora`](burn::module::Lora)) and which parameters are frozen belong into it,
    /// too: no checksum of the model has them. Default: nothing.
    ///
    /// ```
    /// # use burn_lean_recipe::{Recipe, Run};
    /// # let recipe = Recipe::new();
    /// let images = [("a.png", 7), ("b.png", 2)];
    /// let run = Run::new(&recipe).with_state("state").with_identity((32, images))?;
    /// # Ok::<(), burn_lean_recipe::RecipeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`RecipeError::Invalid`] for what JSON cannot say, a map whose keys are no names for example.
    pub fn with_identity(mut self, identity: impl Serialize) -> Result<Self, RecipeError> {
        let identity = serde_json::to_value(identity);
        self.identity = identity.map_err(|error| RecipeError::Invalid {
            stage: "run".into(),
            field: "identity",
            value: error.to_string(),
            expected: "something that JSON can say".into(),
        })?;
        Ok(self)
    }

    /// Writes the record of each stage, and what the recipe exports, into this folder.
    ///
    /// A `.model` is Burn's record of a dense or smaller model, and a
    /// [`SparseRecord`](burn_lean_prune::SparseRecord) of others. What was quantized loads into a model with
    /// the same quantizers
    /// ([`QatConfig::prepare`](burn_lean_quant::QatConfig::prepare)); its record, where it was pruned and then
    /// trained with fake quantization, into a chain of no masks (`Masks::new(vec![])`) and these, its
    /// `.safetensors` into either. Of weights that are pruned and left out of quantization such a record has
    /// the masks.
    pub fn with_output(mut self, folder: impl AsRef<Path>) -> Self {
        self.output = Some(folder.as_ref().into());
        self
    }

    /// Measures the latency elsewhere.
    pub fn with_latency(mut self, latency: Latency) -> Self {
        self.latency = latency;
        self
    }

    /// Tells a callback what happens, instead of bars. It can end the run: what is finished is kept.
    pub fn with_progress(
        mut self,
        callback: impl FnMut(&Progress) -> ControlFlow<()> + 'a,
    ) -> Self {
        self.listener = Listener::callback(callback);
        self
    }

    /// Runs the recipe on a model.
    ///
    /// # Errors
    ///
    /// The model comes back in the error as it was.
    /// - Before anything is computed: those of [`Recipe::validate`], [`RecipeError::TaskLacks`], of
    ///   the dtype on this device, [`RecipeError::StateOfAnotherRun`], [`RecipeError::Invalid`] for
    ///   what does not fit the parameters of the model or the batches,
    ///   [`RecipeError::Reparameterized`] for a weight to prune or to quantize that carries something
    ///   already, and [`RecipeError::Stage`] for blocks of `quantize` that rounding with the Fisher
    ///   cannot use.
    /// - [`RecipeError::Stage`] with what a stage says; [`RecipeError::Interrupted`] by the callback;
    ///   [`RecipeError::State`] and [`RecipeError::Io`] of files.
    pub fn run<M, I, T, O>(
        &self,
        model: M,
        task: &Task<'_, M, I, T, O>,
    ) -> Result<Outcome<M>, Rejected<M, RecipeError>>
    where
        M: Module,
        I: Tensors + Batch,
        T: Tensors + Batch,
        O: Tensors + Send + Sync + 'static,
    {
        self.outcome(&model, task)
            .map_err(|error| Rejected::new(model, error))
    }

    fn outcome<M: Module, I: Examples, T: Examples, O: Outputs>(
        &self,
        model: &M,
        task: &Task<'_, M, I, T, O>,
    ) -> Result<Outcome<M>, RecipeError> {
        self.recipe.validate()?;
        self.check(task)?;
        let device = model_device(model).ok_or_else(|| RecipeError::no_parameters("recipe"))?;
        let mut session = Session {
            run: self,
            recipe: self.recipe,
            task,
            state: State::default(),
            inner: device.clone().without_autodiff(),
            device: match device.is_autodiff() {
                true => device,
                false => device.autodiff(),
            },
        };
        for train in self.trainings() {
            session.dtype(train)?;
        }
        // First of all: parameters get their values in the order of the model.
        settle(model);
        let state = self.state.as_deref();
        let state = state.map(|folder| (folder, checksums(model)));
        session.check(model)?;
        if let Some(folder) = &self.output {
            FILES.create_folder(folder)?;
        }
        session.state = State::open(state, self.recipe, &self.identity)?;
        let session = session;

        let dense = session.train(model)?;
        let mut stages = vec![dense];
        let mut masks = None;
        // What has been done to the last model.
        let done = |stages: &[StageOutcome<M>]| match stages {
            [_] => None,
            stages => stages.last().map(|stage| stage.row.stage.clone()),
        };
        if let Some(shrink) = &self.recipe.shrink {
            let shrunk = session.shrink(shrink, &stages[0].model)?;
            stages.push(shrunk);
        }
        if let Some(prune) = &self.recipe.prune {
            let from = &stages[stages.len() - 1].model;
            let (pruned, found) =
                session.prune(prune, from, &stages[0].model, done(&stages).as_deref())?;
            stages.push(pruned);
            masks = Some(found);
        }
        let last_float = stages.len() - 1;
        let done = done(&stages);
        for quantize in &self.recipe.quantize {
            let source = Source {
                model: &stages[last_float].model,
                masks: masks.as_ref(),
                dense: &stages[0].model,
                done: done.as_deref(),
            };
            let quantized = session.quantize(quantize, &source)?;
            stages.push(quantized);
        }
        let first_exported = match self.recipe.quantize.is_empty() {
            true => last_float,
            false => last_float + 1,
        };
        for stage in &stages[first_exported..] {
            let name = &stage.row.stage;
            let exported = session.export(name, &stage.model);
            exported.map_err(|error| error.at(name))?;
        }
        Ok(Outcome { stages, masks })
    }

    /// Everything that is trained.
    fn trainings(&self) -> impl Iterator<Item = &TrainStage> {
        let shrink = self.recipe.shrink.iter().flat_map(|shrink| &shrink.tune);
        let prune = self.recipe.prune.iter().flat_map(|prune| &prune.tune);
        let quantize = self.recipe.quantize.iter();
        let quantize = quantize.flat_map(|quantize| &quantize.train);
        let train = self.recipe.train.iter();
        train.chain(shrink).chain(prune).chain(quantize)
    }

    /// Refuses what the task lacks.
    fn check<M, I, T, O>(&self, task: &Task<'_, M, I, T, O>) -> Result<(), RecipeError> {
        let lacks = |stage: &str, what, method| {
            Err(RecipeError::TaskLacks {
                stage: stage.into(),
                what,
                method,
            })
        };
        for distillation in self.trainings().flat_map(|train| &train.distillation) {
            if task.logits.is_none() {
                return lacks("distillation", "the logits", "Task::with_logits");
            }
            if distillation.features > 0.0 && task.features.is_none() {
                return lacks("distillation", "features", "Task::with_features");
            }
        }
        match self.recipe.export.is_empty() || self.output.is_some() {
            true => Ok(()),
            false => lacks("export", "a folder", "Run::with_output"),
        }
    }
}

impl<M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, '_, '_, M, I, T, O> {
    /// The dense model: trained, or as it was given.
    fn train(&self, given: &M) -> Result<StageOutcome<M>, RecipeError> {
        const KEY: &str = "0-train";
        let name = match &self.recipe.train {
            None => "dense".to_string(),
            Some(train) => match self.dtype(train)? {
                burn::tensor::FloatDType::F32 => "FP32".into(),
                dtype => format!("AMP {dtype:?}"),
            },
        };
        self.stage(
            KEY,
            &name,
            |record| load(own(given), record),
            || match &self.recipe.train {
                Some(train) => self.trained(KEY, &name, train, own(given), None),
                None => Ok(own(given)),
            },
            Shipped::dense,
        )
    }
}

/// A seed for one purpose, from that of the recipe.
pub(crate) fn seed(seed: u64, key: &str, epoch: u64, index: u64) -> u64 {
    [epoch, index]
        .into_iter()
        .fold(key_seed(seed, key), |seed, number| {
            mixed(seed ^ mixed(number))
        })
}

pub(crate) fn key_seed(seed: u64, key: &str) -> u64 {
    mixed(seed ^ u64::from(crc32fast::hash(key.as_bytes())) << 32)
}

/// The finalizer of SplitMix64 after its increment.
fn mixed(number: u64) -> u64 {
    let z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
