//! What a newcomer needs, on one page: `use burn_lean::prelude::*`.
//!
//! | | |
//! |---|---|
//! | mixed precision | [`Autocast`], [`GradScalerConfig`]; [`full_precision`] for calls that stay in F32 |
//! | a recorded pass | [`stop_gradient`] in the place of `detach` |
//! | quantization | [`QatConfig`] or [`PtqConfig`], [`QuantizedForward`] to run the result, [`ConvertConfig`] at the end |
//! | pruning | [`Pruner`] from inputs, [`Outputs`] for what it judges by, [`PrunerConfig`] from gradients, [`Masks`] to hold the zeros |
//! | batches | tensors, tuples of them, or a struct that [`tensors!`] names |
//! | what is shipped | [`SparseRecord`], [`save_safetensors`], [`Export`] |
//! | the same as methods of a model | [`LeanModule`] |
//!
//! Everything else is in the crates, by rooms: `burn_lean::quant::range`, for example.

pub use crate::amp::{Autocast, GradScalerConfig, full_precision};
pub use crate::deploy::Export;
pub use crate::graph::tensors;
pub use crate::prune::layerwise::Outputs;
pub use crate::prune::{
    Budget, FisherConfig, Masks, Pruner, PrunerConfig, SolverConfig, SparseRecord,
};
pub use crate::quant::{
    ConvertConfig, PtqConfig, QatConfig, QuantizedForward, WeightConfig, advance, fold_for,
    load_safetensors, save_safetensors,
};
pub use crate::reparam::{ChainReparameterizer, attach};
pub use crate::{LeanModule, stop_gradient};
