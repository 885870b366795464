//! Fewer weights.
//!
//! # From inputs alone
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Distribution, Tensor, activation::relu};
//! use burn_lean::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Net {
//!     body: Linear,
//!     head: Linear,
//! }
//!
//! let device = Device::flex().autodiff();
//! let net = Net {
//!     body: LinearConfig::new(16, 64).init(&device),
//!     head: LinearConfig::new(64, 4).init(&device),
//! };
//! // Layers are fitted to the first batch; the last one judges.
//! let inputs = [192, 64].map(|examples| {
//!     Tensor::<2>::random([examples, 16], Distribution::Default, &device)
//! });
//! let forward = |net: &Net, x| net.head.forward(relu(net.body.forward(x)));
//! let pruned = Pruner::new(Budget::Sparsity(0.5)).prune(net, forward, inputs)?;
//! assert_eq!(pruned.masks.nonzeros(), (16 * 64 + 64 * 4) / 2);
//! // The zeros hold under any optimizer …
//! let net = pruned.masks.attach(pruned.model)?;
//! // … and are not stored.
//! let bytes = SparseRecord::from_module(&net.valid().materialize())?.to_bytes()?;
//! assert!(bytes.len() < 4 * (16 * 64 + 64 * 4 + 64 + 4));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # From gradients
//!
//! [`PrunerConfig`](crate::prune::PrunerConfig) is CHITA, the best subset of weights under the
//! empirical Fisher, in one stage or several; it takes a loss and labelled batches, budgets per layer
//! or in operations, and N:M patterns. Take it where labels are there and stages with training in
//! between are wanted ([`GradualConfig`](crate::prune::GradualConfig)); take the first to begin with.
//!
//! # Afterwards
//!
//! Fine-tune with the masks attached. [`Masks::from_zeros`](crate::prune::Masks::from_zeros) recovers
//! them from a checkpoint. Zeros make files smaller, and nothing faster by themselves:
//! [`Shrink`](crate::prune::Shrink) makes a whole model's layers smaller in one call, where units are
//! gone, or down to a share of the multiplications.
