//! burn-lean makes models written for [Burn](https://burn.dev) lean, without rewriting them.
//!
//! - [`amp`]: automatic mixed precision, F16 and BF16 compute over FP32 master weights;
//! - [`quant`]: fake quantization, quantization-aware training, calibration, conversion;
//! - [`prune`]: layer by layer from inputs (where to begin), by magnitude in stages, or CHITA from gradients;
//!   masks that hold, and smaller networks;
//! - [`deploy`]: ONNX files, and a CPU engine with integer kernels;
//! - [`recipe`]: the extensions in one order, from a file, resumable; the report on what came out;
//! - [`layerwise`]: which weights of one layer to keep, from XᵀX of its inputs;
//! - [`oneshot`]: language models and other large networks, compressed block by block;
//! - [`graph`]: one recorded forward pass, and its execution under rules;
//! - [`reparam`]: what the extensions need to share one weight.
//!
//! Where to begin: [`manual`], a chapter for each task; [`prelude`], the names that most programs need;
//! [`LeanModule`], the verbs as methods of a model.
//!
//! # Feature flags
//!
//! None is on by default.
//!
//! - `flex`, `ndarray`, `wgpu`, `vulkan`, `metal`, `cuda`, `cpu`: Burn's backends, forwarded to it; each also
//!   compiles fake quantization and emulated half precision for the backend. Name those that `burn` has.
//!   `cuda`, `vulkan` and `wgpu` also read the energy of NVIDIA's GPUs, for the report of a [`recipe`];
//! - `fusion`: Burn's kernel fusion;
//! - `train`: mixed precision in Burn's Learner;
//! - `engine`: `Engine` of [`deploy`], on the CPU, and latencies of it in a [`recipe`].

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

pub use burn_lean_graph::hooks::stop_gradient;
pub use verbs::LeanModule;
