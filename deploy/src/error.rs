//! What cannot be exported or run, and what to do then.

use std::path::PathBuf;

use burn_lean_graph::GraphError;
use burn_lean_quant::QuantError;

/// Why a model could not be exported or run by the engine.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DeployError {
    /// The forward pass could not be recorded.
    #[error("{}{}", .0, without(.0))]
    Graph(#[from] GraphError),
    /// The quantizers of the model are not ready.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// An operation that ONNX, or this crate, has no operator for.
    #[error(
        "operation `{operation}` of {module} has no ONNX operator here: {why}. Compute it outside \
         of the exported forward pass, or write it with other operations"
    )]
    Operator {
        /// Name of the operation.
        operation: &'static str,
        /// The module it belongs to, as far as it is known.
        module: String,
        /// What is missing.
        why: String,
    },
    /// An axis that was to stay open, and what keeps it from that.
    #[error(
        "the axis `{name}` cannot stay open: {reason}. Compute what depends on its size from tensors \
         that have it (of `PaddingConfig::Same` with a stride, take `Explicit`), or leave it out of the open axes"
    )]
    OpenAxis {
        /// Its name; of several that cannot be open together, all of them.
        name: String,
        /// Which operation depends on its size, and how.
        reason: String,
    },
    /// A dtype that ONNX, or this crate, does not know.
    #[error("`{what}` has the dtype {dtype}, which cannot be exported: cast it to another one")]
    Dtype {
        /// Which tensor.
        what: String,
        /// Its dtype.
        dtype: String,
    },
    /// Quantized weights that the integers of ONNX cannot hold.
    #[error("the weight `{path}` cannot be exported as integers: {reason}")]
    Weight {
        /// Its path.
        path: String,
        /// Why.
        reason: String,
    },
    /// More than a file can hold.
    #[error("the model takes {bytes} bytes, but an ONNX file holds less than 2 GiB")]
    TooLarge {
        /// Its bytes.
        bytes: usize,
    },
    /// A file could not be read or written.
    #[error("{}: {reason}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The engine refused a model: a truncated or foreign file, or an operator that it lacks.
    #[error("the engine cannot load the model: {reason}")]
    Load {
        /// What it said.
        reason: String,
    },
    /// A number of a config is out of its range.
    #[error("{field} is {value}, but must be {expected}")]
    InvalidConfig {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// The engine failed while it computed.
    #[error("the engine failed: {reason}")]
    Run {
        /// What it said.
        reason: String,
    },
    /// An ONNX file was run with another number of inputs than it has.
    #[error(
        "the file has {expected} inputs, but got {found}: give one tensor for each, in the order of the file"
    )]
    FileInputs {
        /// How many it has.
        expected: usize,
        /// How many came.
        found: usize,
    },
    /// Inputs or outputs are not those that the engine was compiled for.
    #[error("the engine was compiled for {compiled}, but got {found}: compile it for these, too")]
    Mismatch {
        /// What it was compiled for.
        compiled: String,
        /// What came.
        found: String,
    },
}

/// Of a forward pass that may well run by itself.
fn without(error: &GraphError) -> &'static str {
    match error.is_of_recording() {
        true => "; there is no export without a recording",
        false => "",
    }
}
