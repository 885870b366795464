//! Whole runs: stages, budgets, schedules, and what is kept on disk in between.

pub(crate) mod checksum;
pub(crate) mod gradual;
pub(crate) mod gradual_pruner;
pub(crate) mod pruner;
pub(crate) mod schedule;
pub(crate) mod stage;
pub(crate) mod stage_budgets;
pub(crate) mod stage_store;
pub(crate) mod start;
pub(crate) mod training;

pub use gradual::GradualConfig;
pub use gradual_pruner::{GradualPruned, GradualPruner, LayerwiseStage, StageMethod};
pub use pruner::{Pruned, PrunerConfig, StageReport};
pub use schedule::SparsitySchedule;
pub use training::{Epoch, StageTraining};
