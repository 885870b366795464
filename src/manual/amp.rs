//! Training in half precision.
//!
//! The forward pass is recorded, and each operation runs in the precision that it needs; weights stay
//! FP32. Three lines of a loop change, none of the model:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::{Device, FloatDType, Tensor};
//! use burn_lean::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Net {
//!     linear: Linear,
//!     norm: BatchNorm,
//!     head: Linear,
//! }
//!
//! impl Net {
//!     fn loss(&self, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
//!         let x = self.norm.forward(self.linear.forward(x)).tanh();
//!         (self.head.forward(x) - y).square().mean()
//!     }
//! }
//!
//! let device = Device::flex().autodiff();
//! device.seed(1);
//! let mut model = Net {
//!     linear: LinearConfig::new(2, 8).init(&device),
//!     norm: BatchNormConfig::new(8).init(&device),
//!     head: LinearConfig::new(8, 1).init(&device),
//! };
//! let x = Tensor::<2>::from_floats([[0., 0.], [0., 1.], [1., 0.], [1., 1.]], &device);
//! let y = Tensor::<2>::from_floats([[0.], [1.], [1.], [0.]], &device);
//!
//! let autocast = Autocast::new(FloatDType::F16);
//! let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16).init()?;
//! let mut optim = AdamWConfig::new().init();
//! let mut losses = Vec::<f32>::new();
//! for _ in 0..100 {
//!     let batch = (x.clone(), y.clone());
//!     let loss = autocast.run(&model, batch, Net::loss)?;
//!     let grads = GradientsParams::from_grads(scaler.scale(loss)?.backward(), &model);
//!     model = scaler.step(&mut optim, 0.05, model, grads)?;
//!     // Read with the step: reading the loss before `backward` would let a GPU run dry.
//!     losses.extend(scaler.report().and_then(|report| report.loss));
//! }
//! assert!(losses[99] < 0.1 * losses[0], "{losses:?}");
//! # Ok::<(), burn_lean::amp::AmpError>(())
//! ```
//!
//! # Four batches to a step, clipped, with a schedule, going on after a kill
//!
//! ```
//! use std::error::Error;
//!
//! use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
//! use burn::tensor::{Device, FloatDType, Tensor, TensorData};
//! use burn_lean::amp::{Checkpoints, ResumableOptimizer};
//! use burn_lean::prelude::*;
//!
//! const STEPS: u64 = 40;
//!
//! /// Their order follows from `step`.
//! fn four_batches(step: u64, device: &Device) -> Vec<(Tensor<2>, Tensor<2>)> {
//!     let batches = 4 * step..4 * step + 4;
//!     let at = |batch: u64| [0, 1, 2, 3].map(|item| [(4 * batch + item) as f32, item as f32]);
//!     let batches = batches.map(|batch| {
//!         let x = Tensor::<2>::from_data(at(batch), device).sin();
//!         (x.clone(), x.sum_dim(1))
//!     });
//!     batches.collect()
//! }
//!
//! /// Trains up to `end`, from the newest checkpoint on if there is one.
//! fn train(checkpoints: &Checkpoints, end: u64) -> Result<TensorData, Box<dyn Error>> {
//!     let device = Device::flex().autodiff();
//!     device.seed(1);
//!     let model: Linear = LinearConfig::new(2, 1).init(&device);
//!     let autocast = Autocast::new(FloatDType::F16);
//!     let fresh = || ResumableOptimizer::new(AdamWConfig::new().build(), &device).init();
//!     let (mut model, mut optim, mut scaler) = match checkpoints.latest()? {
//!         Some(step) => checkpoints.load(step, model, fresh())?,
//!         None => {
//!             let scaler = GradScalerConfig::for_dtype(FloatDType::F16).with_max_norm(Some(1.0));
//!             (model, fresh(), scaler.init()?)
//!         }
//!     };
//!     // Not in a checkpoint: schedule, random numbers, place in the data, half-accumulated gradients.
//!     let mut schedule = CosineAnnealingLrSchedulerConfig::new(0.1, STEPS as usize).init()?;
//!     let state = scaler.state();
//!     for _ in 0..state.steps - state.skipped_steps {
//!         schedule.step();
//!     }
//!     let (mut lr, mut sum) = (schedule.step(), GradientsAccumulator::new());
//!     for step in state.steps..end {
//!         for batch in four_batches(step, &device) {
//!             let loss = autocast.run(&model, batch, |model: &Linear, (x, y)| {
//!                 (model.forward(x) - y).square().mean()
//!             })?;
//!             let grads = scaler.scale(loss.div_scalar(4.0))?.backward();
//!             sum.accumulate(&model, GradientsParams::from_grads(grads, &model));
//!         }
//!         model = scaler.step(&mut optim, lr.clone(), model, sum.grads())?;
//!         if !scaler.report().is_some_and(|report| report.skipped) {
//!             lr = schedule.step();
//!         }
//!         if (step + 1) % 10 == 0 {
//!             checkpoints.save(step + 1, &model, &optim, &scaler)?;
//!         }
//!     }
//!     Ok(model.weight.val().into_data())
//! }
//!
//! let (folder, other) = (tempfile::tempdir()?, tempfile::tempdir()?);
//! let checkpoints = Checkpoints::new(folder.path());
//! train(&checkpoints, 25)?; // killed: the steps from 20 on are lost
//! assert_eq!(checkpoints.latest()?, Some(20));
//! let resumed = train(&checkpoints, STEPS)?;
//! assert_eq!(resumed, train(&Checkpoints::new(other.path()), STEPS)?);
//! # Ok::<(), Box<dyn Error>>(())
//! ```
//!
//! # Which dtype
//!
//! BF16 where the device computes in it: it needs no loss scale, and the loop is the same. F16 where it
//! does not (Vulkan, WebGPU). A device with neither is a typed error, or emulates
//! ([`Fallback`](crate::amp::Fallback)).
//!
//! # Where something is wrong
//!
//! | you see | look at |
//! |---|---|
//! | `one_hot` in the error | Burn reads the indices: pass the one-hot tensor as an input, or compare the labels with `arange` |
//! | an error about `detach` | [`stop_gradient`](crate::stop_gradient) in its place |
//! | an error about a value that is read, or `detach` in code that is not yours | the forward pass cannot be recorded: [`AutocastConfig::prepare`](crate::amp::AutocastConfig::prepare) and a region do without |
//! | a part of the model that needs F32 for reasons of its own | call it in [`full_precision`](crate::amp::full_precision()), or name its layers: [`Autocast::with_module`](crate::amp::Autocast::with_module) |
//! | steps of a small model that take long | [`Autocast::cached`](crate::amp::Autocast::cached): each step is recorded otherwise |
//! | in a region: mixed dtypes | [`audit`](crate::amp::audit()) names all calls that belong into [`full_precision`](crate::amp::full_precision()), in one run |
//! | skipped steps | the [`StepReport`](crate::amp::StepReport) says which parameter overflowed; a few at the start are how the scale is found |
//! | `OptimizerState` when a checkpoint is loaded, a panic in Burn's Learner | Burn loads the state of an optimizer on its default device, which is not there: [`ResumableOptimizer`](crate::amp::ResumableOptimizer) from the start |
//! | `OptimizerDtype` | Burn loads the state in the default dtype of that device: [`ResumableOptimizer`](crate::amp::ResumableOptimizer) for `Adam` and `AdamW`; for others configure the device with the dtype of the parameters, if they all have one |
//! | `Diverged` | what it says; [`calibrate_scale`](crate::amp::calibrate_scale), which fails where FP32 is not finite either |
