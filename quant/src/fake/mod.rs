//! Fake quantization, the operation: its gradients, and its kernels for the host, for GPUs and composed
//! of tensor operations.

pub(crate) mod codes;
pub(crate) mod compiled;
pub(crate) mod composed;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "cube")]
pub(crate) mod fused;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) mod host;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) mod in_memory;
pub(crate) mod kernel;
pub(crate) mod learned;
pub(crate) mod op;
pub(crate) mod qparams;
pub(crate) mod range;
pub(crate) mod scale;
pub(crate) mod straight_through;

pub use codes::{from_codes, to_codes};
pub use learned::{Clip, LearnedGradient, fake_quantize_learned};
pub use op::fake_quantize;
pub use qparams::QuantParams;
pub use range::Range;
