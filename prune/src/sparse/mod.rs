//! Pruned weights in few bytes.

mod codes;
mod encoding;
mod fault;
mod file;
mod loader;
mod record;
mod sizes;

pub use encoding::Encoding;
pub use fault::RecordFault;
pub use record::SparseRecord;
pub use sizes::{RecordSizes, TensorSize};
