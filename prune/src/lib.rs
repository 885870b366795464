//! Pruning for [Burn](https://burn.dev): which weights to remove at the least loss, from the
//! gradients of a trained model.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod batch;
mod budget;
mod error;
mod evaluation;
mod feasible;
mod fisher;
mod gradient_matrix;
mod layout;
mod method;
mod plain_rows;
mod problem;
mod schedule;
mod selection;
mod solution;
mod solver;
mod sparsity;

pub use batch::Batch;
pub use budget::Budget;
pub use error::PruneError;
pub use evaluation::mean_loss;
pub use fisher::{Fisher, FisherConfig, FisherReport};
pub use gradient_matrix::GradientMatrix;
pub use layout::{Layer, LayerKind, Layout};
pub use method::{ChitaConfig, IhtConfig, Method, Refit};
pub use problem::{Objective, Problem};
pub use schedule::Schedule;
pub use selection::{ExcludedBecause, SelectedParameter, Selection};
pub use solution::{Solution, Step, Termination, TracePoint};
pub use solver::{DeadColumns, SolverConfig, solve};
pub use sparsity::{Groups, SparsityPattern};
