//! Statistics of BatchNorm, measured anew.

pub(crate) mod batch_norm;
pub(crate) mod running;

pub use batch_norm::recompute_batch_norm;
pub use running::{JudgedStatistics, RunningStatistics};
