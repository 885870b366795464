//! What a compressed model is worth beside the original: a report with bounds.

mod answers;
mod bounds;
mod energy;
mod html;
mod perturbation;
mod plots;
mod statistics;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_lean_graph::Tensors;
use burn_lean_prune::Batch;
use burn_lean_quant::{QuantizedForward, Site, fold_for, health, quantizers};
use burn_lean_reparam::{AnyFloat, FloatVisitor, each_plain_float, visit_plain_floats};
use serde::{Deserialize, Serialize};

pub use answers::{Answers, ReliabilityBin};
pub use energy::{Energy, EnergyCounter, EnergyMeter, EnergyPart};
pub use perturbation::Perturbation;
pub use statistics::{Share, mcnemar, wilson};

use crate::check::Check;
use crate::state::files::FILES;
use crate::task::predictor;
use crate::tensors::{Finish, on_device};
use crate::{Bounds, BrokenBound, RecipeError, StageOutcome, Task};

/// How two models are compared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrustConfig {
    /// Confidence of intervals, above 0 and below 1. Default: 0.95.
    pub confidence: f64,
    /// Bins of the reliability diagram and of the expected calibration error. Default: 15.
    pub bins: usize,
    /// What is done to inputs. Default: noise of 0.25, 0.5 and 1 deviation, shifts by one and two
    /// places either way, offsets of half a deviation.
    pub perturbations: Vec<Perturbation>,
    /// How long energy is measured, where it can be: counters of GPUs move ten times a second. Default: 1 s.
    pub energy_time: Duration,
    /// What the compressed model must keep. Default: nothing.
    pub bounds: Bounds,
}

impl Default for TrustConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// One of the two models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Side {
    /// The row of its stage.
    pub stage: String,
    /// Share of the examples that it has right.
    pub accuracy: Share,
    /// Expected calibration error, 0 to 1.
    pub ece: f64,
    /// Its reliability diagram.
    pub reliability: Vec<ReliabilityBin>,
    /// Bytes of its record.
    pub bytes: u64,
    /// Latency of one example in milliseconds, where the run measured it: in Burn or in the engine.
    pub latency_ms: Option<f64>,
    /// Energy of one example, in Burn.
    pub energy: Energy,
}

/// Accuracies under a perturbation, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Robustness {
    /// What was done to the inputs.
    pub perturbation: Perturbation,
    /// Accuracy of the original.
    pub original: f64,
    /// Accuracy of the compressed model.
    pub compressed: f64,
}

/// How near numbers are to what they stand for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerSqnr {
    /// Path of the weight, or of the weight of the layer whose activation it is.
    pub path: String,
    /// What it is of: `weight`, or an activation: `input`, `output`…
    pub site: String,
    /// 10 · log₁₀(Σx² / Σ(x − y)²) in dB, at most 200: of a weight, x in the original, its batch
    /// normalizations folded where those of the compressed model are, and y in the compressed model,
    /// pruning and training included; of an activation, x before and y after its quantizer.
    pub sqnr: f64,
}

/// A compressed model beside the original.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trust {
    /// Labelled examples.
    pub examples: usize,
    /// Confidence of the intervals.
    pub confidence: f64,
    /// The model before.
    pub original: Side,
    /// The model after.
    pub compressed: Side,
    /// Share of the examples that the two answer differently.
    pub disagreement: Share,
    /// Examples that only the original has right.
    pub only_original: usize,
    /// Examples that only the compressed model has right.
    pub only_compressed: usize,
    /// p of [`mcnemar`] of these: small where the accuracies differ by more than chance.
    pub mcnemar_p: f64,
    /// Accuracies on changed inputs, under each perturbation that changes inputs of this kind.
    pub robustness: Vec<Robustness>,
    /// Of each weight and of each quantized activation. Of two quantized models, one of which has its batch
    /// normalizations folded, weights do not compare.
    pub layers: Vec<LayerSqnr>,
    /// The bounds that it was held against.
    #[serde(default)]
    pub bounds: Bounds,
    /// Those that are broken.
    pub broken: Vec<BrokenBound>,
}

impl TrustConfig {
    /// With the defaults.
    pub fn new() -> Self {
        Self {
            confidence: 0.95,
            bins: 15,
            perturbations: vec![
                Perturbation::Noise(0.25),
                Perturbation::Noise(0.5),
                Perturbation::Noise(1.0),
                Perturbation::Shift(-2),
                Perturbation::Shift(-1),
                Perturbation::Shift(1),
                Perturbation::Shift(2),
                Perturbation::Offset(-0.5),
                Perturbation::Offset(0.5),
            ],
            energy_time: Duration::from_secs(1),
            bounds: Bounds::default(),
        }
    }

    /// With bounds.
    pub fn with_bounds(mut self, bounds: Bounds) -> Self {
        self.bounds = bounds;
        self
    }

    /// With other perturbations.
    pub fn with_perturbations(mut self, perturbations: Vec<Perturbation>) -> Self {
        self.perturbations = perturbations;
        self
    }

    /// Compares two stages of an [`Outcome`](crate::Outcome) on labelled examples that neither was
    /// made with; `test` gives them from the start each time it is called.
    ///
    /// # Errors
    ///
    /// [`RecipeError::Invalid`] of the config, or of a model without parameters; [`RecipeError::TaskLacks`] without
    /// [`Task::with_logits`]; [`RecipeError::NoTestExample`]; [`RecipeError::Task`] where `test` gives other
    /// labels the next time; what a forward pass says. A broken bound is none: it is in the report, and
    /// [`Trust::check`] makes it one.
    pub fn compare<M, I, T, O, B>(
        &self,
        task: &Task<'_, M, I, T, O>,
        original: &StageOutcome<M>,
        compressed: &StageOutcome<M>,
        test: impl Fn() -> B,
    ) -> Result<Trust, RecipeError>
    where
        M: Module,
        I: Tensors + Batch,
        O: Tensors + Send + Sync + 'static,
        B: IntoIterator<Item = (I, Tensor<1, Int>)>,
    {
        let check = Check("report");
        let inside = self.confidence > 0.0 && self.confidence < 1.0;
        check.accept(inside, "confidence", self.confidence, "above 0 and below 1")?;
        check.accept(self.bins >= 1, "bins", self.bins, "at least 1")?;
        for perturbation in &self.perturbations {
            let fits = perturbation.is_finite();
            let expected = "of a strength that is a finite F32";
            check.accept(fits, "perturbations", perturbation, expected)?;
        }
        self.bounds.validate(check.0)?;
        let [first, second] = [original, compressed].map(|stage| stage.model.valid());
        let answers = |model: &M, perturbation: Option<Perturbation>| {
            self.answers(task, model, perturbation, &test)
        };
        let before = answers(&first, None)?;
        let after = answers(&second, None)?;
        before.check_examples(&after)?;
        let (mut only_original, mut only_compressed) = (0, 0);
        for (before, after) in before.right().zip(after.right()) {
            only_original += usize::from(before && !after);
            only_compressed += usize::from(after && !before);
        }
        let pairs = before.predicted().iter().zip(after.predicted());
        let differing = pairs.filter(|(before, after)| before != after).count();
        let mut robustness = Vec::new();
        let first_inputs = test().into_iter().next().map(|(inputs, _)| inputs);
        let concerns = |perturbation: &&Perturbation| {
            first_inputs
                .as_ref()
                .is_some_and(|inputs| perturbation.concerns(inputs))
        };
        for perturbation in self.perturbations.iter().filter(concerns) {
            let accuracy = |model: &M| {
                let answers = answers(model, Some(*perturbation))?;
                before.check_examples(&answers)?;
                Ok::<_, RecipeError>(answers.correct() as f64 / answers.len() as f64)
            };
            robustness.push(Robustness {
                perturbation: *perturbation,
                original: accuracy(&first)?,
                compressed: accuracy(&second)?,
            });
        }
        let mut layers = weights(task, [original, compressed], [&first, &second], &test)?;
        layers.extend(activations(task, &second, &test)?);
        let mut trust = Trust {
            examples: before.len(),
            confidence: self.confidence,
            original: self.side(task, original, &first, &before, &test)?,
            compressed: self.side(task, compressed, &second, &after, &test)?,
            disagreement: wilson(differing, before.len(), self.confidence),
            only_original,
            only_compressed,
            mcnemar_p: mcnemar(only_original, only_compressed),
            robustness,
            layers,
            bounds: self.bounds,
            broken: Vec::new(),
        };
        trust.broken = self.bounds.broken(&trust);
        Ok(trust)
    }

    fn answers<M, I, T, O, B>(
        &self,
        task: &Task<'_, M, I, T, O>,
        model: &M,
        perturbation: Option<Perturbation>,
        test: impl Fn() -> B,
    ) -> Result<Answers, RecipeError>
    where
        M: Module,
        I: Tensors,
        O: Tensors + Send + Sync + 'static,
        B: IntoIterator<Item = (I, Tensor<1, Int>)>,
    {
        let Some(logits) = &task.logits else {
            return Err(RecipeError::TaskLacks {
                stage: "report".into(),
                what: "the logits",
                method: "Task::with_logits",
            });
        };
        let device = device_of(model)?;
        let predict = predictor(task, model, &device);
        let batches = test().into_iter().enumerate();
        let answers = Answers::collect(batches.map(|(number, (inputs, labels))| {
            let inputs = match perturbation {
                Some(perturbation) => perturbation.apply(&inputs, number as u64),
                None => inputs,
            };
            Ok((logits(&predict(inputs)?), labels))
        }))?;
        match answers.is_empty() {
            false => Ok(answers),
            true => Err(RecipeError::NoTestExample),
        }
    }

    fn side<M, I, T, O, B>(
        &self,
        task: &Task<'_, M, I, T, O>,
        stage: &StageOutcome<M>,
        model: &M,
        answers: &Answers,
        test: impl Fn() -> B,
    ) -> Result<Side, RecipeError>
    where
        M: Module,
        I: Tensors + Batch,
        O: Tensors + Send + Sync + 'static,
        B: IntoIterator<Item = (I, Tensor<1, Int>)>,
    {
        let device = device_of(model)?;
        let energy = match EnergyMeter::open(&device) {
            Err(error) => Energy::NotMeasurable {
                reason: error.to_string(),
            },
            Ok(meter) => {
                let predict = predictor(task, model, &device);
                let example = example(&test, &device);
                // As a latency is measured: until the numbers are there.
                let run = |example: &I| -> Result<(), RecipeError> {
                    predict(example.clone())?.map_tensors(&mut Finish);
                    Ok(())
                };
                // Caches fill.
                let mut failed = example.as_ref().and_then(|example| run(example).err());
                let energy = meter.energy(|| {
                    let mut tasks = 0;
                    let start = Instant::now();
                    while let Some(example) = &example
                        && start.elapsed() < self.energy_time
                        && failed.is_none()
                    {
                        failed = run(example).err();
                        tasks += 1;
                    }
                    tasks
                });
                if let Some(error) = failed {
                    return Err(error);
                }
                energy
            }
        };
        Ok(Side {
            stage: stage.row.stage.clone(),
            accuracy: wilson(answers.correct(), answers.len(), self.confidence),
            ece: answers.calibration_error(self.bins),
            reliability: answers.reliability(self.bins),
            bytes: stage.row.bytes,
            latency_ms: stage.row.latency_ms,
            energy,
        })
    }
}

impl Trust {
    /// Refuses a broken bound: what a CI gate ends with.
    ///
    /// # Errors
    ///
    /// [`RecipeError::BrokenBounds`].
    pub fn check(&self) -> Result<(), RecipeError> {
        match self.broken.is_empty() {
            true => Ok(()),
            false => Err(RecipeError::BrokenBounds {
                broken: self.broken.clone(),
            }),
        }
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// As one HTML page with its figures in it: it needs no other file and no network.
    ///
    /// # Errors
    ///
    /// [`RecipeError::Task`] where a figure cannot be drawn.
    pub fn to_html(&self) -> Result<String, RecipeError> {
        html::page(self)
    }

    /// Writes the page to `path`, and the JSON beside it with the ending `.trust.json`, in the place of `.html`
    /// where there is that.
    ///
    /// # Errors
    ///
    /// As [`to_html`](Self::to_html), and [`RecipeError::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), RecipeError> {
        let path = path.as_ref();
        if let Some(folder) = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
        {
            FILES.create_folder(folder)?;
        }
        FILES.write(path, self.to_html()?.as_bytes())?;
        let is_html = |extension: &OsStr| extension.eq_ignore_ascii_case("html");
        let json = match path.extension().is_some_and(is_html) {
            true => path.with_extension("trust.json"),
            // Another ending may be a part of the name: `report-v1.0`.
            false => {
                let mut name = path.as_os_str().to_os_string();
                name.push(".trust.json");
                PathBuf::from(name)
            }
        };
        FILES.write(&json, self.to_json().as_bytes())
    }
}

fn device_of<M: Module>(model: &M) -> Result<Device, RecipeError> {
    let device = model.devices().into_iter().next();
    device.ok_or_else(|| RecipeError::no_parameters("report"))
}

/// The first example of a test.
fn example<I, L, B>(test: impl Fn() -> B, device: &Device) -> Option<I>
where
    I: Tensors + Batch,
    B: IntoIterator<Item = (I, L)>,
{
    let mut batches = test().into_iter().map(|(inputs, _)| inputs);
    let inputs = batches.find(|inputs| inputs.examples() > 0)?;
    Some(on_device(&inputs.slice(0..1), device))
}

/// Weights of two models: of an original, folded as the compressed one is, and of that.
fn weights<M, I, T, O, B>(
    task: &Task<'_, M, I, T, O>,
    stages: [&StageOutcome<M>; 2],
    [original, compressed]: [&M; 2],
    test: impl Fn() -> B,
) -> Result<Vec<LayerSqnr>, RecipeError>
where
    M: Module,
    I: Tensors + Batch,
    O: Tensors + Send + Sync + 'static,
    B: IntoIterator<Item = (I, Tensor<1, Int>)>,
{
    let original = match stages.map(|stage| stage.folded) {
        [false, true] if quantizers(original).is_empty() => {
            let Some(example) = example(test, &device_of(original)?) else {
                return Ok(Vec::new());
            };
            let forward = |model: &M, inputs: I| (task.forward)(model, inputs);
            fold_for(original.clone(), example, forward)?
        }
        [before, after] if before == after => original.clone(),
        _ => return Ok(Vec::new()),
    };
    // Stored are also codes, and floats off their grid.
    let mut matrices = Matrices::default();
    visit_plain_floats(&compressed.clone().materialize(), &mut matrices);
    let mut layers = Vec::new();
    // Both models as vectors at once would be twice their F32 sizes on the host.
    each_plain_float(&original.materialize(), |at, float| {
        let path = at.path();
        let is_matrix = float.shape().len() >= 2;
        let Some(other) = matrices.0.get(&path).filter(|_| is_matrix) else {
            return;
        };
        let (values, other) = (float.values(), other.values());
        if values.len() == other.len() {
            layers.push(LayerSqnr {
                path,
                site: "weight".into(),
                sqnr: sqnr(&values, &other),
            });
        }
    });
    Ok(layers)
}

/// Activations of a compressed model.
fn activations<M, I, T, O, B>(
    task: &Task<'_, M, I, T, O>,
    compressed: &M,
    test: impl Fn() -> B,
) -> Result<Vec<LayerSqnr>, RecipeError>
where
    M: Module,
    I: Tensors + Batch,
    O: Tensors + Send + Sync + 'static,
    B: IntoIterator<Item = (I, Tensor<1, Int>)>,
{
    if quantizers(compressed).is_empty() {
        return Ok(Vec::new());
    }
    let device = device_of(compressed)?;
    let quantized = QuantizedForward::new();
    let mut batches = test().into_iter();
    let first = batches.find(|(inputs, _)| inputs.examples() > 0);
    let found = health(compressed, |model| {
        first.into_iter().try_for_each(|(inputs, _)| {
            let inputs = on_device(&inputs, &device);
            let run = quantized.run(model, inputs, |model, inputs| (task.forward)(model, inputs));
            run.map(drop)
        })
    });
    let found = match found {
        // Weights alone are quantized, and converted.
        Err(burn_lean_quant::QuantError::NoData { .. }) => return Ok(Vec::new()),
        found => found?,
    };
    let activations = found.quantizers.into_iter();
    let activations = activations.filter(|quantizer| quantizer.site != Site::Weight);
    let layers = activations.map(|quantizer| LayerSqnr {
        path: quantizer.layer,
        site: format!("{:?}", quantizer.site).to_lowercase(),
        sqnr: bounded(quantizer.sqnr),
    });
    Ok(layers.collect())
}

/// Weights of rank 2 and more by their paths, not read yet.
#[derive(Default)]
struct Matrices(HashMap<String, Box<dyn AnyFloat>>);

impl FloatVisitor for Matrices {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if D >= 2 {
            self.0.insert(path.into(), Box::new(param.clone()));
        }
    }
}

fn sqnr(x: &[f32], y: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let signal: f64 = x.iter().map(|x| square(f64::from(*x))).sum();
    let noise = x.iter().zip(y);
    let noise: f64 = noise
        .map(|(x, y)| square(f64::from(*x) - f64::from(*y)))
        .sum();
    match noise == 0.0 {
        true => bounded(f64::INFINITY),
        false => bounded(10.0 * (signal / noise).log10()),
    }
}

/// A number that JSON has.
fn bounded(decibels: f64) -> f64 {
    match decibels.is_nan() {
        true => 0.0,
        false => decibels.clamp(-200.0, 200.0),
    }
}
