//! Pruning for [Burn](https://burn.dev): which weights to remove at the least loss, from the
//! gradients of a trained model.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod bits;
mod budget;
mod error;
mod feasible;
mod gradient_matrix;
mod layout;
mod mask;
mod masking;
mod masks;
mod method;
mod problem;
mod solution;
mod solver;
mod sparsity;
mod walk;

pub use budget::Budget;
pub use error::PruneError;
pub use gradient_matrix::GradientMatrix;
pub use layout::{Layer, LayerKind, Layout};
pub use mask::Mask;
pub use masking::{AttachMasks, rewind};
pub use masks::{Masks, ParameterMask};
pub use method::{ChitaConfig, IhtConfig, Method, Refit};
pub use problem::{Objective, Problem};
pub use solution::{Solution, Step, Termination, TracePoint};
pub use solver::{DeadColumns, SolverConfig, solve};
pub use sparsity::{Groups, SparsityPattern};
