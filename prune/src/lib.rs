//! Pruning for [Burn](https://burn.dev): layer by layer from inputs alone ([`Pruner`], where to begin), by
//! magnitude in stages, or CHITA, the best subset of weights under the gradients of a loss; masks that hold
//! the zeros, and networks without them.
//!
//! CHITA:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::LinearConfig;
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_lean_prune::{
//!     Budget, FisherConfig, PruneReport, PrunerConfig, SolverConfig, SparseRecord,
//! };
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(8, 4).init(&device);
//! let config = PrunerConfig::new(SolverConfig::new(Budget::Sparsity(0.75)), FisherConfig::new(20));
//! let pruned = config.prune(
//!     model,
//!     // The mean loss of a batch …
//!     |model, x: &Tensor<2>| model.forward(x.clone()).square().mean(),
//!     // … and batches from a seed: 20 examples for gradients, the others to choose the ridge by.
//!     |seed| {
//!         device.seed(seed);
//!         [Tensor::random([32, 8], Distribution::Normal(0.0, 1.0), &device)]
//!     },
//! )?;
//! let report = PruneReport::new(&pruned.model, &pruned.selection)?;
//! assert_eq!(report.nonzeros, 8);
//! // Train on: whatever the optimizer does, the zeros stay.
//! let model = pruned.masks.attach(pruned.model)?;
//! // Ship it without them.
//! let bytes = SparseRecord::from_module(&model.valid().materialize())?.to_bytes()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # From a model to a pruned one
//!
//! - [`Pruner`]: layer by layer, from inputs alone: where to begin; [`GradualPruner`] in stages,
//!   also by magnitude alone, with training between them;
//! - [`PrunerConfig`]: one stage (CHITA) or several with fresh gradients (CHITA++), each to a target
//!   of its [`SparsitySchedule`]; [`GradualConfig`] trains in between;
//! - [`Batch`]: what a loader yields; tuples of tensors are one already;
//! - [`Selection`]: which parameters are pruned, and why others are not;
//! - [`Budget`] and [`SparsityPattern`]: how much is kept (in all, per layer, in operations as
//!   [`flops()`] counts them), and in which shape (single weights, N:M, groups);
//! - [`Method`]: CHITA, and what to compare it with;
//! - [`GridConfig`]: kept weights on the grid of a quantized model, by the same objective;
//! - [`RunningStatistics`]: what becomes of BatchNorm;
//! - [`recompute_batch_norm`], [`mean_loss`], [`PruneReport`]: what to do with the outcome.
//!
//! # Step by step
//!
//! - [`FisherConfig`]: the [`GradientMatrix`] of a model;
//! - [`Problem`]: the regression over it; [`solve`] and [`solve_with_ridge`]: its [`Solution`];
//! - [`Selection::flatten`] and [`Selection::unflatten`]: the way from the model and back.
//!
//! # Zeros that stay
//!
//! - [`Masks`], also of the largest weights or from the zeros of a checkpoint;
//!   [`AttachMasks`](masks::AttachMasks); [`rewind`]: the survivors back at earlier values;
//! - [`SparseRecord`]: files without zeros (`Engine` of `burn-lean-deploy` finds in a whole model which
//!   matrices are faster without theirs);
//! - [`Shrink`]: a whole model with smaller layers, in one call, as far as its recorded forward pass
//!   shows what goes together; [`load_shrunk`]: its record back into a new model;
//!
//! # Rooms
//!
//! Here are the names that most programs need. What belongs to one subject alone lives in its module, as the
//! steps of a solver in [`problem`].
//!
//! # Feature flags
//!
//! `flex`, `ndarray`, `wgpu`, `vulkan`, `metal`, `cuda` and `cpu` are forwarded to Burn.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
pub mod fisher;
mod host;
pub mod layerwise;
pub mod masks;
pub mod model;
pub mod problem;
pub mod run;
pub mod shrink;
pub mod solver;
pub mod sparse;
pub mod statistics;

pub use error::PruneError;
pub use fisher::{Fisher, FisherConfig, GradientMatrix};
pub use layerwise::{Effort, Pruner, Shares};

pub use masks::{Mask, Masks, rewind};
pub use model::{Batch, LayerKind, Layout, PruneReport, Selection, flops, mean_loss};
pub use problem::{Budget, Groups, Problem, Solution, SparsityPattern};

pub use run::{GradualConfig, GradualPruner, Pruned, PrunerConfig, SparsitySchedule, StageMethod};

pub use shrink::{Shrink, load_shrunk};
pub use solver::{
    ChitaConfig, DeadColumns, GridConfig, Method, Ridge, RidgeChoice, SolverConfig, solve,
    solve_with_ridge,
};
pub use sparse::SparseRecord;
pub use statistics::{RunningStatistics, recompute_batch_norm};
