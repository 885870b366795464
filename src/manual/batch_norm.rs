//! What becomes of BatchNorm.
//!
//! | under | statistics | what to do |
//! |---|---|---|
//! | [`Autocast::run`](crate::amp::Autocast::run) | F32, updated as always; a skipped step leaves no infinity in them | nothing |
//! | a region | F32 | call it in [`full_precision`](crate::amp::full_precision()); [`audit`](crate::amp::audit()) names the calls |
//! | quantization | folded into the layer before | [`fold_for`](crate::quant::fold_for), before `prepare`; during QAT `Schedule::with_freeze_batch_norm_at`, which runs that are recorded heed; in a region or a loop of plain calls it takes `advance` after each step |
//! | pruning | stale: they are those of the dense network | `Pruner` measures them on the way, `PrunerConfig` judges ([`RunningStatistics`](crate::prune::RunningStatistics)); after fine-tuning [`recompute_batch_norm`](crate::prune::recompute_batch_norm) |
//!
//! Burn's clones of a model share running statistics: what trains or moves one (`to_device`) does so to
//! those of the others. A copy with its own is `model.valid()`, which `train()` gives gradients again.
//!
//! Folding is exact up to rounding, with the epsilon that the forward pass shows:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::conv::{Conv2d, Conv2dConfig};
//! use burn::nn::{BatchNorm, BatchNormConfig};
//! use burn::tensor::{Device, Distribution, Tensor, activation::relu};
//! use burn_lean::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Block {
//!     conv: Conv2d,
//!     norm: BatchNorm,
//! }
//!
//! impl Block {
//!     fn forward(&self, x: Tensor<4>) -> Tensor<4> {
//!         relu(self.norm.forward(self.conv.forward(x)))
//!     }
//! }
//!
//! let device = Device::flex();
//! let block = Block {
//!     conv: Conv2dConfig::new([3, 8], [3, 3]).init(&device),
//!     norm: BatchNormConfig::new(8).with_epsilon(1e-3).init(&device),
//! };
//! let x = Tensor::<4>::random([2, 3, 8, 8], Distribution::Default, &device);
//! let before = block.forward(x.clone());
//! let block = fold_for(block, x.clone(), Block::forward)?;
//! // The convolution alone is now what both were.
//! let after = relu(block.conv.forward(x));
//! assert!((after - before).abs().max().into_scalar::<f32>() < 1e-5);
//! # Ok::<(), burn_lean::quant::QuantError>(())
//! ```
//!
//! A norm is left alone where its layer is also used without it, or runs elsewhere:
//! [`Audit::norm_pairs`](crate::quant::inspect::Audit::norm_pairs) says why.
