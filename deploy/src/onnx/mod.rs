//! ONNX files: what is in them, and how they are written.

#[cfg(feature = "engine")]
pub(crate) mod lengths;
mod model;
mod protobuf;

#[cfg(feature = "engine")]
pub(crate) use model::part;
pub(crate) use model::{Attribute, Body, ENGINE, MICROSOFT};
pub use model::{Dimension, ElementType, Initializer, OnnxModel, OnnxNode, ValueInfo};
