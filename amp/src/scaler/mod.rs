//! The gradient scaler: rules of the scale, the decision on a step, and what it leaves behind.

pub(crate) mod grad_scaler;
pub(crate) mod loss_scale;
pub(crate) mod record;
pub(crate) mod report;
pub(crate) mod running_statistics;
pub(crate) mod speculative;
pub(crate) mod verdict;

pub use grad_scaler::{GradScaler, GradScalerConfig};
pub use loss_scale::{DynamicLossScale, LossScale, LossScaleState};
pub use record::GradScalerRecord;
pub use report::{Overflow, SkipCause, StepReport};
pub use speculative::Speculative;
#[cfg(feature = "train")]
pub(crate) use speculative::changed;
