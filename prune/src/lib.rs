//! Pruning for [Burn](https://burn.dev): which weights to remove at the least loss, from the
//! gradients of a trained model.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod activation_norms;
mod batch;
mod batch_norm;
mod bits;
mod block_stage;
mod budget;
mod checks;
mod collection;
mod error;
mod evaluation;
mod executor;
mod feasible;
mod fisher;
mod flatten;
mod flops;
mod gradient_matrix;
mod gradual;
mod kernel_rows;
mod layout;
mod mask;
mod masking;
mod masks;
mod method;
mod not_finite;
mod objective;
mod per_example;
mod plain_rows;
mod problem;
mod product;
mod pruner;
mod reduced;
mod report;
mod rewind;
mod ridge;
mod schedule;
mod selection;
mod shrink;
mod solution;
mod solver;
mod sparse;
mod sparsity;
mod stage_budgets;
mod stage_store;
mod start;
mod trace;

pub use activation_norms::activation_norms;
pub use batch::Batch;
pub use batch_norm::recompute_batch_norm;
pub use budget::Budget;
pub use error::PruneError;
pub use evaluation::mean_loss;
pub use fisher::{Fisher, FisherConfig, FisherReport, GradientMethod};
pub use flops::flops;
pub use gradient_matrix::GradientMatrix;
pub use gradual::{Epoch, GradualConfig};
pub use layout::{Layer, LayerKind, Layout};
pub use mask::Mask;
pub use masking::AttachMasks;
pub use masks::{Masks, ParameterMask};
pub use method::{ChitaConfig, IhtConfig, Method, Refit};
pub use objective::Objective;
pub use problem::Problem;
pub use pruner::{Pruned, PrunerConfig, StageReport};
pub use report::{LayerReport, PruneReport};
pub use rewind::rewind;
pub use ridge::{JudgedRidge, Ridge, RidgeChoice, RidgeSweep, solve_with_ridge};
pub use schedule::Schedule;
pub use selection::{ExcludedBecause, SelectedParameter, Selection};
pub use shrink::{
    NormalizedConv2d, PrunedAttention, shrink_conv, shrink_conv_linear, shrink_heads, shrink_linear,
};
pub use solution::{Solution, Step, Termination, TracePoint};
pub use solver::{DeadColumns, SolverConfig, solve};
pub use sparse::{
    Encoding, NMTensor, RecordFault, RecordSizes, SparseLinear, SparseRecord, TensorSize,
};
pub use sparsity::{Groups, SparsityPattern};
