//! burn-lean makes models written for [Burn](https://burn.dev) lean, without rewriting them.
//!
//! - [`amp`]: automatic mixed precision, F16 and BF16 compute over FP32 master weights;
//! - [`quant`]: fake quantization, quantization-aware training, calibration, conversion;
//! - [`prune`]: CHITA, pruning as best-subset selection over a low-rank empirical Fisher;
//! - [`deploy`]: ONNX files, and a CPU engine with integer kernels;
//! - [`recipe`]: the extensions in one order, from a file, resumable; the report on what came out;
//! - [`layerwise`]: which weights of one layer to keep, from XᵀX of its inputs;
//! - [`oneshot`]: language models and other large networks, compressed block by block;
//! - [`graph`]: one recorded forward pass, and its execution under rules;
//! - [`reparam`]: what the extensions need to share one weight.
//!
//! Where to begin: [`manual`], a chapter for each task; [`prelude`], the names that most programs need;
//! [`LeanModule`], the verbs as methods of a model.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub use burn_lean_amp as amp;
pub use burn_lean_deploy as deploy;
pub use burn_lean_graph as graph;
pub use burn_lean_layerwise as layerwise;
pub use burn_lean_oneshot as oneshot;
pub use burn_lean_prune as prune;
pub use burn_lean_quant as quant;
pub use burn_lean_recipe as recipe;
pub use burn_lean_reparam as reparam;

pub mod manual;
pub mod prelude;
mod verbs;

pub use verbs::LeanModule;
