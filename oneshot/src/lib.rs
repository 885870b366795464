//! Language models and other large networks, compressed in one pass over a little calibration data.
//!
//! [`OneShot`] walks through a model block by block. Calibration batches arrive at each layer as the
//! compressed layers before it leave them, XᵀX is summed up, the weights are pruned, rounded to a
//! grid, or both, one after the other, and what the compressed layer gives goes on. Memory is that of the model,
//! one block's XᵀX, and the activations between two layers, in files where asked; of a model that is too
//! large, [`OneShot::compress_blocks`] has one block in memory at a time. The model is not edited: its
//! forward pass is recorded ([`burn_lean_graph::Walk`]).
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_lean_oneshot::{OneShot, Preset};
//!
//! let device = Device::flex();
//! let model: Linear = LinearConfig::new(16, 8).init(&device);
//! let batches = [0, 1].map(|_| Tensor::<2>::random([32, 16], Distribution::Default, &device));
//! let done = OneShot::new("sparse-0.5-w4a16-g8".parse().unwrap())
//!     .compress(model, batches, |model, x| model.forward(x))
//!     .unwrap();
//! let [layer] = &done.report.layers[..] else { panic!() };
//! assert_eq!((layer.path.as_str(), layer.zeros >= 64), ("weight", true));
//! let output = done.model.forward(Tensor::ones([1, 16], &device));
//! # assert_eq!(output.dims(), [1, 8]);
//! ```
//!
//! # What is compressed
//!
//! Every weight that a `matmul`, `linear` or convolution reads, but for embeddings and what is
//! shared with one (a tied head), and what [`Preset::skip`] names. A weight that several
//! operations read is refused with its paths, unless all of them are skipped. What is no matrix of its own
//! (the experts of a mixture in one parameter, a part of a matrix) stays, and is in [`Report::left`].
//!
//! # Beyond the published methods
//!
//! Three choices that [`Preset::as_published`] takes back: [`Target::Original`] (a layer reproduces
//! what the original model computes there, so that it makes good the errors of those before it, also
//! across residual sums), [`Order::Layer`], and for grids searched ranges and refined codes
//! ([`Rounding::Compensated`]).

#![cfg_attr(docsrs, feature(doc_cfg))]

mod block;
mod collect;
mod driver;
mod error;
mod file;
mod grid;
mod prepared;
mod preset;
mod report;
mod round;
mod scaling;
mod sealed;
mod solve;
mod state;
mod stream;
mod structure;
mod weight;
mod work;

pub use driver::{Compressed, OneShot};
pub use error::OneShotError;
pub use file::load_compressed;
pub use prepared::Prepared;
pub use preset::{
    Activations, Order, Pattern, Preset, Prune, PruneMethod, Quantize, Rounding, Scaling, Target,
};
pub use report::{BlockReport, LayerReport, Report};
pub use stream::Streamed;
pub use weight::{CompressedWeight, Grid};
