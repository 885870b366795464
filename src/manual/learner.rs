//! In Burn's Learner (feature `train`).
//!
//! | what | how |
//! |---|---|
//! | mixed precision | a model with Burn's `TrainStep` and `InferenceStep` goes into the Learner as `Amp::from_prepared(OwnSteps::new(model), Autocast::new(dtype), &GradScalerConfig::for_dtype(dtype))`. `Amp::new` is for steps in a region (`autocast.forward`) and leaves its casts on the weights: `materialize` what `into_model` gives before it is pruned or quantized |
//! | a step of one's own | the model implements `AmpTrainStep` in the place of Burn's `TrainStep`, and goes into the Learner as `Amp` |
//! | after each step | the quantizers of the model move on by themselves; `with_after_step`: masks follow a schedule; without mixed precision `AfterStep::new(model, advance)`, where the model's own steps call its quantizers: those of activations of an unedited model act in `Amp::from_prepared(OwnSteps::new(model), Autocast::new(FloatDType::F32), &GradScalerConfig::for_dtype(FloatDType::F32))` |
//! | several devices | quantizers of activations observe, and begin to learn, in replicas, which are dropped: calibrate before; a warning says where that was not done. Learned scales of weights (`Learned::Lsq`) begin by `with_after_step(advance)`: without it they never do, and nothing says so |
//! | tied weights | stay one parameter in `Amp` and `AfterStep`; freeze a copy that is to stay as it is, a teacher with the identities of its student say (`student.valid().no_grad()`): without it, a part of a model for evaluation trains after `train()`, and `reparam::Training` gives back what was |
//! | a scaled initialization | by `reparam::map_leaf`: what `Param::map` makes of a weight by an operation is no leaf, and Burn's Learner trains it nowhere. A recipe does |
//! | the loss scale | is in Burn's own checkpoints, and a metric: `LossScaleMetric`, `SkippedStepsMetric` |
//! | errors | stop the training through `Monitor::interrupter`, and are in `Monitor::error` |
//! | another training of the same `Amp` | `Monitor::reset` before it, or the error or stop of the last one ends it after a batch |
//! | gradient checkpointing | the model is made on `device.autodiff().gradient_checkpointing()`; `SupervisedTraining::gradient_checkpointing` panics in Burn 0.22.1, whose forks leave parameters without it. `Module::train` takes it off, `reparam::Training` gives it back |
//! | a restart on shuffled data | `ResumedDataLoader` takes up the order where it was |
//!
//! A step of one's own is that of a plain loop without its last two lines:
//!
#![cfg_attr(feature = "train", doc = "```")]
#![cfg_attr(not(feature = "train"), doc = "```text")]
//! use burn::module::Module;
//! use burn::nn::loss::CrossEntropyLossConfig;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor};
//! use burn::train::{ClassificationOutput, Learner};
//! use burn_lean::amp::{Amp, AmpInferenceStep, AmpTrainStep};
//! use burn_lean::prelude::*;
//! use burn_lean::quant::{Schedule, quantizers, module::Phase};
//!
//! #[derive(Module, Debug)]
//! struct Classifier {
//!     layer: Linear,
//! }
//!
//! type Batch = (Tensor<2>, Tensor<1, Int>);
//!
//! impl Classifier {
//!     fn classify(&self, (x, labels): Batch) -> ClassificationOutput {
//!         let logits = self.layer.forward(x);
//!         let cross_entropy = CrossEntropyLossConfig::new().init(&logits.device());
//!         let loss = cross_entropy.forward(logits.clone(), labels.clone());
//!         ClassificationOutput::new(loss, logits, labels)
//!     }
//! }
//!
//! impl AmpTrainStep for Classifier {
//!     type Input = Batch;
//!     type Output = ClassificationOutput;
//!
//!     fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ClassificationOutput) {
//!         let labels = batch.1.clone();
//!         let (loss, logits) = autocast
//!             .run(self, batch, |model, batch| {
//!                 let output = model.classify(batch);
//!                 (output.loss, output.output)
//!             })
//!             .expect("the model can be recorded");
//!         (loss.clone(), ClassificationOutput::new(loss, logits, labels))
//!     }
//! }
//!
//! impl AmpInferenceStep for Classifier {
//!     type Input = Batch;
//!     type Output = ClassificationOutput;
//!
//!     fn inference_step(&self, _: &Autocast, batch: Batch) -> ClassificationOutput {
//!         // A plain call would leave activations float: metrics of another model.
//!         let quantized = QuantizedForward::new();
//!         quantized.run(self, batch, Self::classify).expect("as in training")
//!     }
//! }
//!
//! let device = Device::flex().autodiff();
//! let model = Classifier { layer: LinearConfig::new(8, 3).init(&device) };
//! let model = QatConfig::new()
//!     .with_schedule(Schedule::new().with_quantize_from(2))
//!     .prepare(model)?;
//! let config = GradScalerConfig::for_dtype(FloatDType::F16);
//! let amp = Amp::from_prepared(model, Autocast::new(FloatDType::F16), &config)?;
//! let monitor = amp.monitor();
//! let schedule = amp.lr_scheduler(0.1)?;
//! let mut learner = Learner::new(amp, SgdConfig::new().init(), schedule);
//! // What `SupervisedTraining::launch` does with each batch, given `monitor.interrupter()`:
//! let x = Tensor::<2>::random([16, 8], Distribution::Default, &device);
//! let labels = Tensor::<1, Int>::zeros([16], &device);
//! for _ in 0..3 {
//!     let step = learner.train_step((x.clone(), labels.clone()));
//!     learner.lr_step();
//!     learner.optimizer_step(step.grads);
//! }
//! assert_eq!(monitor.error(), None);
//! let state = learner.model().state()?;
//! assert_eq!((state.steps, state.skipped_steps), (3, 0));
//! let quantized = quantizers(learner.model().model());
//! assert!(quantized.iter().all(|located| located.quantizer.phase() == Phase::ObserveAndQuantize));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Gradual pruning
//!
//! A stage is one training of so many epochs, with a new optimizer and the same cosine, here in mixed precision.
//! What goes wrong stops the pruning with the model, and so does a stop in the dashboard: Burn hands back the model
//! of a training that broke off as that of one that ended.
//!
#![cfg_attr(feature = "train", doc = "```no_run")]
#![cfg_attr(not(feature = "train"), doc = "```text")]
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use burn::data::dataloader::DataLoader;
//! use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
//! use burn::module::{Module, ModuleDisplay};
//! use burn::optim::SgdConfig;
//! use burn::tensor::FloatDType;
//! use burn::train::{Learner, SupervisedTraining};
//! use burn_lean::amp::{Amp, AmpError, AmpInferenceStep, AmpTrainStep};
//! use burn_lean::prelude::*;
//! use burn_lean::prune::{PruneError, run::StageTraining};
//! use burn_lean::reparam::{Rejected, Training};
//!
//! /// What `GradualConfig::prune_by_stage` and `GradualPruner::prune_by_stage` call after each stage.
//! fn train_stage<M, B>(
//!     model: M,
//!     training: &StageTraining,
//!     (train, valid): (Arc<dyn DataLoader<B>>, Arc<dyn DataLoader<B>>),
//!     folder: &Path,
//! ) -> Result<M, Rejected<M, PruneError>>
//! where
//!     M: Module + ModuleDisplay + AmpTrainStep<Input = B> + AmpInferenceStep<Input = B> + 'static,
//!     B: Send + 'static,
//! {
//!     let failed = |error: AmpError| PruneError::Training { reason: error.to_string() };
//!     let scaler = GradScalerConfig::for_dtype(FloatDType::F16);
//!     let trains = Training::of(&model);
//!     let amp = Amp::from_prepared(model, Autocast::new(FloatDType::F16), &scaler)
//!         .map_err(|rejected| rejected.map_error(failed))?;
//!     let steps = training.epochs * train.num_items().div_ceil(32); // of a loader with batches of 32
//!     let cosine = CosineAnnealingLrSchedulerConfig::new(training.learning_rate(0.0), steps)
//!         .with_min_lr(training.learning_rate(1.0));
//!     let (monitor, schedule) = match amp.lr_scheduler(cosine) {
//!         Ok(schedule) => (amp.monitor(), schedule),
//!         Err(error) => return Err(PruneError::training(amp.into_model(), error)),
//!     };
//!     let result = SupervisedTraining::new(folder, train, valid)
//!         .num_epochs(training.epochs)
//!         .with_interrupter(monitor.interrupter())
//!         .launch(Learner::new(amp, SgdConfig::new().init(), schedule));
//!     // It comes back as it is deployed; `train` would set a teacher to training, too.
//!     let model = trains.restore(result.model.into_model());
//!     match (monitor.error(), result.error, result.interrupted) {
//!         (None, None, None) => Ok(model),
//!         (Some(error), ..) => Err(PruneError::training(model, error)),
//!         (_, Some(error), _) => Err(PruneError::training(model, error)),
//!         (.., Some(stop)) => {
//!             let reason = stop.reason.unwrap_or_else(|| "it was stopped".into());
//!             Err(PruneError::training(model, reason))
//!         }
//!     }
//! }
//! ```
//!
//! The closure of `prune_by_stage` is then `|model, training| train_stage(model, training, loaders(), folder)`.
//!
//! The examples `amp_learner` and `combined` are whole programs.
#![cfg_attr(
    not(feature = "train"),
    doc = "This build is without the feature: `AmpTrainStep` and what follows is not in it."
)]
