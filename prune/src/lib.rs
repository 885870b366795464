//! Pruning for [Burn](https://burn.dev): which weights to remove at the least loss, from the
//! gradients of a trained model.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod budget;
mod error;
mod feasible;
mod gradient_matrix;
mod layout;
mod method;
mod problem;
mod ridge;
mod solution;
mod solver;
mod sparsity;

pub use budget::Budget;
pub use error::PruneError;
pub use gradient_matrix::GradientMatrix;
pub use layout::{Layer, LayerKind, Layout};
pub use method::{ChitaConfig, IhtConfig, Method, Refit};
pub use problem::{Objective, Problem};
pub use ridge::{JudgedRidge, Ridge, RidgeChoice, RidgeSweep, solve_with_ridge};
pub use solution::{Solution, Step, Termination, TracePoint};
pub use solver::{DeadColumns, SolverConfig, solve};
pub use sparsity::{Groups, SparsityPattern};
