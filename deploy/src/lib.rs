//! Models written with [Burn](https://burn.dev), out of Burn.
//!
//! - [`Export`] records a forward pass and writes it as [ONNX](https://onnx.ai): float, or with the
//!   codes of quantized weights and the quantized activations of a model;
//! - `Engine` (feature `engine`) runs the same graph on the CPU, by what is fastest here, in exact
//!   integers where they pay, and takes and returns Burn's tensors;
//! - [`Quantization`] says which edges of a graph are quantized, and how.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "engine")]
mod engine;
mod error;
mod export;
mod onnx;
mod quantization;

#[cfg(feature = "engine")]
pub use engine::{
    Arithmetic, Backend, Engine, EngineConfig, EngineReport, FloatStorage, IntegerKernels,
    OnnxFile, SparseLayer, SparseOutcome, Timed, integer_kernels,
};
pub use error::DeployError;
pub use export::{Execution, Export, Exported, Form, LayerReport, OpenAxis};
pub use onnx::{Dimension, ElementType, Initializer, OnnxModel, OnnxNode, ValueInfo};
pub(crate) use quantization::Edge;
pub use quantization::{ActivationQuantization, DynamicGrid, Quantization};
