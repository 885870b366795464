//! After training: Burn's quantized tensors, how they are stored, and files.

pub(crate) mod conversion_report;
pub(crate) mod convert;
pub(crate) mod graph;
pub(crate) mod quantized_tensor;
pub(crate) mod safetensors_file;
pub(crate) mod storage;
pub(crate) mod stored;
