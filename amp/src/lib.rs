//! Automatic mixed precision for [Burn](https://burn.dev): half-precision compute over FP32
//! master weights, without rewriting the model.

mod audit;
mod autocast;
mod checkpoint;
mod device;
mod emulation;
mod error;
mod float_tensors;
mod forensics;
mod grad_scaler;
mod gradients;
mod loss_scale;
mod record;
mod report;
mod speculative;

pub use audit::{Audit, AuditedOperation, Finding, Memory, audit};
pub use autocast::{
    Autocast, AutocastConfig, Caster, KeptBecause, MasterWeight, ParameterPrecision,
    full_precision, parameter_precision,
};
pub use checkpoint::Checkpoints;
pub use device::{Fallback, MixedMatmul, SelfTest, self_test, supported_dtypes};
pub use emulation::round_to;
pub use error::AmpError;
pub use float_tensors::FloatTensors;
pub use forensics::{ParameterGradient, ScaleCalibration, calibrate_scale, inspect_gradients};
pub use grad_scaler::{GradScaler, GradScalerConfig};
pub use gradients::Unscaled;
pub use loss_scale::{DynamicLossScale, LossScale, LossScaleState};
pub use record::GradScalerRecord;
pub use report::{Overflow, ParameterOverflow, SkipCause, StepReport};
pub use speculative::Speculative;
