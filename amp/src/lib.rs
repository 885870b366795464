//! Automatic mixed precision for [Burn](https://burn.dev): half-precision compute over FP32
//! master weights, without rewriting the model.

mod autocast;
mod device;
mod emulation;
mod error;
mod float_tensors;
mod grad_scaler;
mod gradients;
#[cfg(feature = "train")]
mod learner;
mod loss_scale;
mod report;

pub use autocast::{
    Autocast, AutocastConfig, Caster, KeptBecause, MasterWeight, ParameterPrecision,
    full_precision, parameter_precision,
};
pub use device::{Fallback, MixedMatmul, SelfTest, self_test, supported_dtypes};
pub use emulation::round_to;
pub use error::AmpError;
pub use float_tensors::FloatTensors;
pub use grad_scaler::{GradScaler, GradScalerConfig};
pub use gradients::Unscaled;
#[cfg(feature = "train")]
pub use learner::{
    Amp, AmpInferenceStep, AmpLrScheduler, AmpTrainStep, LossScaleMetric, Monitor,
    SkippedStepsMetric,
};
pub use loss_scale::{DynamicLossScale, LossScale, LossScaleState};
pub use report::{Overflow, ParameterOverflow, SkipCause, StepReport};
