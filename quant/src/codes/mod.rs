//! Numbers as they are stored: codes, where Burn and the device keep them, and the codes of weights.

#[cfg(feature = "kernels")]
pub(crate) mod kernel;
pub(crate) mod product;
pub(crate) mod quantized_tensor;
pub(crate) mod storage;
pub(crate) mod stored;
pub(crate) mod weights;

pub use quantized_tensor::QuantizedTensor;
pub use weights::{quantized_weights, seen_weights};
