//! What passes through a model: statistics of BatchNorm, norms of activations.

pub(crate) mod activation_norms;
pub(crate) mod batch_norm;
pub(crate) mod running;

pub use activation_norms::activation_norms;
pub use batch_norm::recompute_batch_norm;
pub use running::{JudgedStatistics, RunningStatistics};
