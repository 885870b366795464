//! A whole model seen from outside: which weights are pruned, how they lie in one vector, what they cost.

pub(crate) mod batch;
pub(crate) mod carried;
pub(crate) mod checks;
pub(crate) mod evaluation;
pub(crate) mod flatten;
pub(crate) mod flops;
pub(crate) mod layout;
pub(crate) mod recorded;
pub(crate) mod report;
pub(crate) mod selection;

pub use batch::Batch;
pub use evaluation::mean_loss;
pub use flops::flops;
pub use layout::{Layer, LayerKind, Layout};
pub use report::{LayerReport, PruneReport};
pub(crate) use selection::largest;
pub use selection::{ExcludedBecause, SelectedParameter, Selection};
