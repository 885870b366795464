//! Automatic mixed precision for [Burn](https://burn.dev): half-precision compute over FP32
//! master weights, without rewriting the model.
//!
//! ```text
//! master weights (F32) ─cast─▶ half weights ─forward─▶ output ─cast─▶ F32 loss · scale
//!        ▲                                                                  │ backward
//!        └── optimizer step, or skip ◀── finite? ◀── unscale ◀── F32 gradients
//! ```
//!
//! A training loop changes in three places, the model in none:
//!
//! ```
//! use burn::nn::loss::{MseLoss, Reduction};
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::{Device, FloatDType, Tensor};
//! use burn_lean_amp::{Autocast, GradScalerConfig};
//!
//! let device = Device::flex().autodiff();
//! let mut model = LinearConfig::new(2, 1).init(&device);
//! let mut optim = AdamWConfig::new().init();
//!
//! let autocast = Autocast::new(FloatDType::F16);
//! let mut scaler = GradScalerConfig::for_dtype(autocast.dtype()).init()?;
//! let mut losses = Vec::new();
//! for _ in 0..50 {
//!     let x = Tensor::<2>::from_floats([[0., 1.], [1., 0.], [1., 1.]], &device);
//!     let y = Tensor::<2>::from_floats([[1.], [-1.], [0.]], &device);
//!     // 1. Run the forward pass, with the loss, in mixed precision.
//!     let loss = autocast.run(&model, (x, y), |model, (x, y)| {
//!         MseLoss::new().forward(model.forward(x), y, Reduction::Mean)
//!     })?;
//!     losses.push(loss.clone().into_scalar::<f32>());
//!     // 2. Scale the loss.
//!     let grads = scaler.scale(loss)?.backward();
//!     let grads = GradientsParams::from_grads(grads, &model);
//!     // 3. Step through the scaler.
//!     model = scaler.step(&mut optim, 0.1, model, grads)?;
//! }
//! assert!(losses[49] < 0.01 * losses[0]);
//! # Ok::<(), burn_lean_amp::AmpError>(())
//! ```
//!
//! # Two ways
//!
//! | | [`Autocast::run`] | [`AutocastConfig::prepare`] and [`Autocast::forward`] |
//! |---|---|---|
//! | how | the pass is recorded, each operation runs in the precision that it needs | a region in which weights and inputs are half, and all operations with them |
//! | edits | none | [`full_precision`] around BatchNorm, recurrent layers, encodings; [`to_region`] |
//! | large activations in F16 | right up to 30,000 | as far as [`modules`] says |
//! | memory | norms and losses keep F32, softmax what products read of it | all activations are half |
//! | cannot | read values, stop gradients inside | – |
//! | under the Learner | `autocast.run(self, item, …)` in `AmpTrainStep` | `autocast.forward(…)` there |
//!
//! Take the first, and the second for what cannot be recorded. On flex the first holds fewer bytes, too. On
//! an H200 with Burn's `fusion` and `autotune` a transformer block took 0.75 (BF16) and 0.85 (F16) of a step in
//! F32 the first way, and more than twice as long as F32 the second.
//!
//! # Which dtype
//!
//! | device | choose | why |
//! |---|---|---|
//! | NVIDIA since Ampere, Metal, flex | BF16 | the exponents of F32: no loss scale, nothing underflows |
//! | older NVIDIA, Vulkan, WebGPU | F16 | no BF16 arithmetic there; needs the [`GradScaler`] |
//! | ndarray | F32 | it has no half types; [`Fallback::Emulate`] checks what F16 would do |
//!
//! BF16 has 8 bits of precision, F16 has 11: where BF16 loses accuracy (statistics of norms,
//! small differences), put that module in a [`full_precision`] region or use F16 with scaling.
//! [`GradScalerConfig::for_dtype`] picks the loss scaling that the dtype needs: for BF16 a
//! look at the gradients alone, so the loop is the same. A CPU gains memory from half precision, not speed.
//!
//! # What it does
//!
//! - [`AutocastConfig`] attaches the casts; [`Autocast::forward`] is the region they work in;
//!   [`full_precision`] is for what Burn cannot run in half. [`materialize_half`] stores the weights
//!   in half precision, for inference.
//! - [`GradScaler`] with [`LossScale`]: none, static, dynamic; clipping by the global norm;
//!   gradient accumulation; several optimizers. [`Speculative`] is the same without ever waiting
//!   for the device. [`Checkpoints`] survive being killed; a [`ResumableOptimizer`] loads where
//!   Burn's default device is not there.
//! - [`audit()`] looks at every operation before training, and lists all calls that a region needs in
//!   full precision; [`self_test()`] at the device;
//!   [`StepReport`], [`Overflow`] and [`inspect_gradients`] at what went wrong;
//!   [`calibrate_scale`] proposes the first loss scale.
//! - Skipped steps, changes of the scale and fallbacks are [`tracing`] events.
//!
//! Which module needs what is in [`modules`].
//!
//! # Limits
//!
//! In a region the dtype of an operation is that of its operands. Tensors that the model makes itself
//! inside of its forward pass are F32 and do not mix with half ones: [`to_region`] casts them, and
//! [`audit()`] finds those that are not. [`Autocast::run`] needs neither.
//!
//! Burn adds up a convolution in half precision itself, on flex in F16 and, where nothing is tuned, on GPUs: a sum of
//! many terms stands still there, and gradients of weights are too small. [`Autocast::run`] adds up in F32, on GPUs
//! where it finds that terms are lost, on operands in half. A region cannot: there a warning tells, and
//! [`convolution_of_4096_ones`](self_test::SelfTest::convolution_of_4096_ones).
//!
//! Burn loads the state of an optimizer on its default device: where a GPU backend is compiled in and there is no
//! GPU, a plain optimizer cannot be resumed. A [`ResumableOptimizer`] can. It also loads the state in that device's
//! default dtype: of F64 parameters, and of F32 ones where the default is half, only `Adam` and `AdamW` in a
//! [`ResumableOptimizer`] go on, unless the default is made that of all parameters. [`Checkpoints`] refuse others; under
//! Burn's Learner nothing looks, and the next step panics, or is wrong without a word on GPUs.
//!
//! # Feature flags
//!
//! - `flex`, `ndarray`, `wgpu`, `vulkan`, `metal`, `cuda`, `cpu`: forwarded to Burn; a backend's
//!   feature also compiles emulation for it, and that of a GPU the kernel that unscales gradients and looks at
//!   them in one pass.
//! - `train`: integration with Burn's `Learner`.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// The way of every module of `burn-nn` through AMP.
#[doc = include_str!("../MODULES.md")]
pub mod modules {}

/// The README's example, so that it compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub mod audit;
pub mod autocast;
pub mod checkpoint;
pub mod device;
mod error;
pub mod gradients;
#[cfg(feature = "train")]
pub mod learner;
pub mod scaler;
pub mod self_test;

/// What training in mixed precision takes: `use burn_lean_amp::prelude::*`.
pub mod prelude {
    pub use crate::{
        AmpError, Autocast, AutocastConfig, GradScaler, GradScalerConfig, LossScale, full_precision,
    };
}

pub use audit::audit;
pub use autocast::{
    Autocast, AutocastConfig, full_precision, materialize_half, parameter_precision, to_region,
};

pub use burn_lean_graph::{Form, GraphError, Precision, TensorMapper, Tensors, tensors};
pub use checkpoint::{Checkpoints, ResumableOptimizer};
pub use device::{Fallback, supported_dtypes};
pub use error::AmpError;
pub use gradients::{Unscaled, calibrate_scale, inspect_gradients};
#[cfg(feature = "train")]
pub use learner::{
    AfterStep, Amp, AmpInferenceStep, AmpTrainStep, LossScaleMetric, OwnSteps, ResumedDataLoader,
    SkippedStepsMetric,
};
pub use scaler::{
    DynamicLossScale, GradScaler, GradScalerConfig, LossScale, Overflow, SkipCause, Speculative,
    StepReport,
};

pub use self_test::self_test;
