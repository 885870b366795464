//! How many bytes a sparse record saves.

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::Encoding;

/// Bytes of one tensor in a sparse record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorSize {
    /// Path of the parameter.
    pub path: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Elements with a bit set.
    pub nonzeros: usize,
    /// How it is stored.
    pub encoding: Encoding,
    /// Bytes of its elements in memory.
    pub dense_bytes: usize,
    /// Bytes in the record, without the tensor's entry in the header.
    pub sparse_bytes: usize,
}

/// Bytes of a sparse record, tensor by tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RecordSizes {
    /// Every tensor, in the model's order.
    pub tensors: Vec<TensorSize>,
    /// Bytes of the elements of all tensors in memory.
    pub dense_bytes: usize,
    /// Bytes of the whole file, header and checksum included.
    pub file_bytes: usize,
}
