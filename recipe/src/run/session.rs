//! What the stages of one run share.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_deploy::{Export, Form};
use burn_lean_graph::{Tensors, model_device};
use burn_lean_prune::{Batch, Masks};
use burn_lean_quant::{load_record, save_safetensors};
use burn_lean_reparam::{each_plain_float, own_copy};

use super::progress::Listener;
use super::train::Trainer;
use super::{Latency, Progress, Run, StageOutcome, dtype, key_seed, seed};
use crate::state::files::FILES;
use crate::state::{Kept, State};
use crate::task::{Batches, predictor};
use crate::tensors::{Finish, on_device};
use crate::{Format, Recipe, RecipeError, Row, Task, TrainStage};

/// At least so many runs of the forward pass, whose median is the latency.
const LATENCY_RUNS: usize = 31;
/// In which caches fill and threads wake up: runs that do not count.
const WARM_UP: Duration = Duration::from_millis(100);
/// After so long [`LATENCY_RUNS`] are enough.
const LATENCY_TIME: Duration = Duration::from_millis(300);

/// Inputs or targets of a batch.
pub(crate) trait Examples: Tensors + Batch {}
impl<V: Tensors + Batch> Examples for V {}

/// What a forward pass gives.
pub(crate) trait Outputs: Tensors + Send + Sync + 'static {}
impl<V: Tensors + Send + Sync + 'static> Outputs for V {}

/// What the stages of one run share.
pub(crate) struct Session<'s, 'r, 'a, M, I, T, O> {
    pub(crate) run: &'s Run<'r>,
    pub(crate) recipe: &'s Recipe,
    pub(crate) task: &'s Task<'a, M, I, T, O>,
    pub(crate) state: State,
    /// For training.
    pub(crate) device: Device,
    /// Without autodiff.
    pub(crate) inner: Device,
}

/// A model as a stage leaves it, and the bytes that it is shipped in.
pub(crate) struct Shipped<M> {
    pub(crate) model: M,
    pub(crate) file: Vec<u8>,
}

impl<M: Module> Shipped<M> {
    /// As Burn records it.
    pub(crate) fn dense(model: M) -> Result<Self, RecipeError> {
        let bytes = model.valid().into_record().into_bytes();
        let bytes = bytes.map_err(RecipeError::task)?;
        // Without a copy, where the allocation is that of a vector.
        let file = bytes
            .try_into_vec::<u8>()
            .unwrap_or_else(|bytes| bytes.to_vec());
        Ok(Self { model, file })
    }
}

impl<'r, 'a, M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, 'r, 'a, M, I, T, O> {
    pub(crate) fn listener(&self) -> &Listener<'r> {
        &self.run.listener
    }

    pub(crate) fn dtype(&self, train: &TrainStage) -> Result<FloatDType, RecipeError> {
        let dtype = train.dtype.unwrap_or(self.recipe.dtype);
        dtype::resolve(dtype, self.recipe.fallback, &self.device)
    }

    /// The batches of an epoch of the stage of this key.
    pub(crate) fn batches(&self, key: &str, epoch: u64) -> Batches<'a, I, T> {
        self.task
            .batches(seed(self.recipe.seed, key, epoch, u64::MAX))
    }

    /// Inputs of one pass, as many examples in each as in the first that has any.
    pub(crate) fn inputs<'t>(&'t self, key: &'t str) -> impl Iterator<Item = I> + 't {
        let mut size = None;
        let first = self.batches(key, 0).map(|(inputs, _)| inputs);
        first.filter(move |inputs| match inputs.examples() {
            0 => false,
            examples => *size.get_or_insert(examples) == examples,
        })
    }

    /// The mean loss of a batch.
    pub(crate) fn loss(&self, model: &M, batch: &(I, T)) -> Tensor<1> {
        let outputs = (self.task.forward)(model, batch.0.clone());
        (self.task.loss)(outputs, batch.1.clone())
    }

    /// Batches of one stage of the solver of this key, pass after pass until one has none; a Fisher sample
    /// takes `least` examples, and those of a smaller batch belong to none.
    pub(crate) fn examples(
        &self,
        key: &'static str,
        stage: u64,
        least: usize,
    ) -> impl Iterator<Item = (I, T)> + use<'_, 'r, 'a, M, I, T, O> {
        let fits = move |batch: &(I, T)| batch.0.examples() >= least;
        let passes = (0u64..).map_while(move |pass| {
            let mut batches = self.task.batches(seed(self.recipe.seed, key, stage, pass));
            let mut first = batches.next()?;
            // Where none is large enough the solver gets the last one, and refuses it.
            while !fits(&first)
                && let Some(next) = batches.next()
            {
                first = next;
            }
            Some(std::iter::once(first).chain(batches.filter(fits)))
        });
        passes.flatten()
    }

    /// One example.
    pub(crate) fn example(&self) -> Result<I, RecipeError> {
        match self.batches("example", 0).next() {
            Some((inputs, _)) if inputs.examples() == 0 => Err(RecipeError::EmptyBatch {
                stage: "recipe".into(),
            }),
            Some((inputs, _)) => Ok(on_device(&inputs.slice(0..1), &self.inner)),
            None => Err(RecipeError::NoBatch {
                stage: "recipe".into(),
            }),
        }
    }

    /// A stage: made, or loaded by `load` where an earlier run has finished it; then measured, written,
    /// kept.
    pub(crate) fn stage(
        &self,
        key: &str,
        name: &str,
        load: impl FnOnce(ModuleRecord) -> Result<M, RecipeError>,
        make: impl FnOnce() -> Result<M, RecipeError>,
        ship: impl Fn(M) -> Result<Shipped<M>, RecipeError>,
    ) -> Result<StageOutcome<M>, RecipeError> {
        let made = self.stage_with_masks(key, name, load, || Ok((make()?, None)), ship);
        Ok(made?.0)
    }

    /// The same of a stage that may also make masks, which are kept with the model.
    pub(crate) fn stage_with_masks(
        &self,
        key: &str,
        name: &str,
        load: impl FnOnce(ModuleRecord) -> Result<M, RecipeError>,
        make: impl FnOnce() -> Result<(M, Option<Masks>), RecipeError>,
        ship: impl Fn(M) -> Result<Shipped<M>, RecipeError>,
    ) -> Result<(StageOutcome<M>, Option<Masks>), RecipeError> {
        let finished = self.state.finished(key)?;
        let finished =
            finished.and_then(|(record, mut kept)| Some((record, kept.row.take()?, kept)));
        // Another device may have trained it, in another dtype: row, file and progress have one name.
        let name = match &finished {
            Some((_, row, _)) => row.stage.clone(),
            None => name.to_string(),
        };
        let name = name.as_str();
        let at = |error: RecipeError| error.at(name);
        self.listener().tell(&Progress::Started {
            stage: name.to_string(),
        })?;
        if let Some((record, mut row, kept)) = finished {
            let Shipped { model, file } = load(record).and_then(&ship).map_err(at)?;
            // The same tensors, with identities of their own.
            row.bytes = self.write(name, file)?;
            if row.accuracy.is_none() {
                row.accuracy = self.accuracy(&model.valid()).map_err(at)?;
            }
            if kept.latency != self.run.latency.name() {
                // That of another place is not to be compared with.
                row.latency_ms = self.latency(&model.valid()).map_err(at)?;
            }
            self.state.tidy(key)?;
            self.listener()
                .tell(&Progress::Finished { row: row.clone() })?;
            return Ok((StageOutcome::new(row, model), kept.masks));
        }
        let start = Instant::now();
        let (made, masks) = make().map_err(at)?;
        let seconds = start.elapsed().as_secs_f64();
        let Shipped { model, file } = ship(made.clone()).map_err(at)?;
        // Before anything that may fail: a stage can take hours.
        let bytes = self.write(name, file)?;
        let row = self.measure(name, &model, bytes, seconds).map_err(at)?;
        let kept = Kept {
            row: Some(row.clone()),
            masks: masks.clone(),
            seconds,
            latency: self.run.latency.name().into(),
        };
        self.state.keep(key, &made, kept, || {
            self.listener().tell(&Progress::Keeping {
                stage: name.to_string(),
            })
        })?;
        self.state.tidy(key)?;
        self.listener()
            .tell(&Progress::Finished { row: row.clone() })?;
        Ok((StageOutcome::new(row, model), masks))
    }

    /// Trains `model` as the plan says, from its latest checkpoint.
    pub(crate) fn trained(
        &self,
        key: &str,
        name: &str,
        plan: &TrainStage,
        model: M,
        teacher: Option<&M>,
    ) -> Result<M, RecipeError> {
        let mut trainer = Trainer::new(self, key, name, plan, teacher)?;
        let epochs = plan.epochs;
        let mut model = trainer.begin(model, 0..epochs as u64)?;
        for epoch in 0..epochs {
            model = trainer.epoch(model, epoch as u64, (epoch, epochs), |part| {
                plan.rate((epoch as f64 + part) / epochs as f64)
            })?;
        }
        Ok(model)
    }

    fn measure(&self, name: &str, model: &M, bytes: u64, seconds: f64) -> Result<Row, RecipeError> {
        let model = model.valid();
        let accuracy = self.accuracy(&model)?;
        let mut nonzeros = 0;
        each_plain_float(&model, |_, float| {
            let values = float.values();
            nonzeros += values.iter().filter(|value| **value != 0.0).count() as u64;
        });
        Ok(Row {
            stage: name.into(),
            accuracy,
            bytes,
            nonzeros,
            latency_ms: self.latency(&model)?,
            seconds,
        })
    }

    /// What the evaluation of the task says.
    fn accuracy(&self, model: &M) -> Result<Option<f64>, RecipeError> {
        match &self.task.evaluate {
            Some(evaluate) => evaluate(&predictor(self.task, model, &self.inner)).map(Some),
            None => Ok(None),
        }
    }

    /// The median time of one example [ms].
    fn latency(&self, model: &M) -> Result<Option<f64>, RecipeError> {
        Ok(match self.run.latency {
            Latency::None => None,
            Latency::Burn => {
                let example = self.example()?;
                let predict = predictor(self.task, model, &self.inner);
                Some(median_ms(|| {
                    let input = on_device(&example, &self.inner);
                    let start = Instant::now();
                    predict(input)?.map_tensors(&mut Finish);
                    Ok(start.elapsed())
                })?)
            }
            #[cfg(feature = "engine")]
            Latency::Engine => {
                let example = self.example()?;
                let export = Export::record(model, &example, |model, input| {
                    (self.task.forward)(model, input)
                })?;
                let engine = burn_lean_deploy::EngineConfig::new().compile(export)?;
                Some(median_ms(|| {
                    let start = Instant::now();
                    engine.run(&example)?;
                    Ok(start.elapsed())
                })?)
            }
        })
    }

    /// Writes the file that a model is shipped in, where there is a folder for it, and drops it: its length.
    fn write(&self, name: &str, file: Vec<u8>) -> Result<u64, RecipeError> {
        if let Some(path) = self.path(name, "model") {
            FILES.write(&path, &file)?;
        }
        Ok(file.len() as u64)
    }

    /// Writes the files that the recipe asks for of a last model.
    pub(crate) fn export(&self, name: &str, model: &M) -> Result<(), RecipeError> {
        for format in &self.recipe.export {
            let extension = match format {
                Format::Record => "bpk",
                Format::Safetensors => "safetensors",
                Format::Onnx => "onnx",
            };
            let Some(path) = self.path(name, extension) else {
                continue;
            };
            let model = model.valid();
            match format {
                Format::Record => {
                    let bytes = model.into_record().into_bytes();
                    let bytes =
                        bytes.map_err(|error| RecipeError::io("cannot write", &path, error))?;
                    FILES.write(&path, &bytes)?;
                }
                Format::Safetensors => {
                    save_safetensors(&model, &path)?;
                }
                Format::Onnx => {
                    let export = Export::record(&model, &self.example()?, |model, input| {
                        (self.task.forward)(model, input)
                    })?;
                    let exported = export.to_onnx(Form::Qdq)?;
                    // The file is another model than its row there. A layer repeats why its input's is left out.
                    let layers = exported.layers.iter();
                    let layers = layers.filter_map(|layer| layer.reason.as_deref());
                    let reasons = export.quantization().left_float().chain(layers);
                    for reason in reasons.collect::<BTreeSet<_>>() {
                        tracing::warn!(stage = name, reason, "stays a float in the ONNX file");
                    }
                    FILES.write(&path, &exported.model.to_bytes()?)?;
                }
            }
        }
        Ok(())
    }

    fn path(&self, name: &str, extension: &str) -> Option<PathBuf> {
        let folder = self.run.output.as_ref()?;
        Some(folder.join(format!("{}.{extension}", slug(name))))
    }
}

/// Loads a record of this model; the model is a copy of the caller's.
pub(crate) fn load<M: Module>(model: M, record: ModuleRecord) -> Result<M, RecipeError> {
    Ok(load_record(model, record)?)
}

/// A copy that shares nothing that training changes: running statistics are copied.
///
/// What trains trains on, a teacher does not, and the strategy of gradient checkpointing stays. A model on a
/// device without autodiff trains as a whole.
pub(crate) fn own<M: Module>(model: &M) -> M {
    match model_device(model).is_some_and(|device| device.is_autodiff()) {
        true => own_copy(model),
        false => model.valid().train(),
    }
}

/// The median of what `run` takes, in milliseconds.
fn median_ms(run: impl Fn() -> Result<Duration, RecipeError>) -> Result<f64, RecipeError> {
    let begin = Instant::now();
    run()?;
    let mut times = Vec::new();
    while times.len() < LATENCY_RUNS || begin.elapsed() < LATENCY_TIME {
        let is_warm = begin.elapsed() > WARM_UP || !times.is_empty();
        let time = run()?;
        if is_warm {
            times.push(1e3 * time.as_secs_f64());
        }
    }
    Ok(median(times))
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The name of a stage behind what has been done before it.
pub(crate) fn after(done: Option<&str>, name: String) -> String {
    match done {
        Some(done) => format!("{done}, {name}"),
        None => name,
    }
}

/// The name of a stage as that of a file.
pub(crate) fn slug(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_alphanumeric());
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    words.join("-").to_lowercase()
}

/// A seed of its own for what is random on the device in a stage without steps.
pub(crate) fn seed_device<M, I, T, O>(session: &Session<'_, '_, '_, M, I, T, O>, key: &str) {
    session.device.seed(key_seed(session.recipe.seed, key));
}
