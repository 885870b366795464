//! In Burn's Learner (feature `train`).
//!
//! | what | how |
//! |---|---|
//! | mixed precision | a model with Burn's `TrainStep` and `InferenceStep` goes into the Learner as `Amp::new(OwnSteps::new(model), …)` |
//! | a step of one's own | the model implements `AmpTrainStep` in the place of Burn's `TrainStep`, and goes into the Learner as `Amp` |
//! | after each step | `with_after_step(advance)`: quantizers move on, masks follow a schedule; without mixed precision `AfterStep::new(model, advance)` |
//! | the loss scale | is in Burn's own checkpoints, and a metric: `LossScaleMetric`, `SkippedStepsMetric` |
//! | errors | stop the training through `Monitor::interrupter`, and are in `Monitor::error` |
//! | a restart on shuffled data | `ResumedDataLoader` takes up the order where it was |
//!
//! A step of one's own is that of a plain loop without its last two lines:
//!
//! ```text
//! impl AmpTrainStep for Classifier {
//!     type Input = Batch;
//!     type Output = ClassificationOutput;
//!
//!     fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, Self::Output) {
//!         let output = autocast.run(self, batch, |model, batch| model.classify(batch)).unwrap();
//!         (output.loss.clone(), output)
//!     }
//! }
//! ```
//!
//! The examples `amp_learner` and `combined` are whole programs.
#![cfg_attr(
    not(feature = "train"),
    doc = "This build is without the feature: `AmpTrainStep` and what follows is not in it."
)]
