//! What became of products.

use serde::Serialize;

/// How a layer is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub enum Execution {
    /// Codes times codes, summed in I32.
    Integer,
    /// Floats times weights that are kept as codes and dequantized inside of the product.
    WeightsInteger,
    /// Floats times floats that were computed from codes once.
    DequantizedOnce,
    /// `DequantizeLinear` before the product: a runtime that has integer kernels fuses it, another
    /// one dequantizes at every use. Of a table of embeddings, where they have a scale each or all one
    /// and codes have 8 bits, the rows that are taken, else all.
    Qdq,
    /// Floats times floats; nothing of it is quantized.
    Float,
    /// Floats times the weights that are not zero.
    Sparse,
}

impl std::fmt::Display for Execution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Integer => "integer",
            Self::WeightsInteger => "integer weights",
            Self::DequantizedOnce => "dequantized once",
            Self::Qdq => "quantize, dequantize",
            Self::Float => "float",
            Self::Sparse => "without zeros",
        })
    }
}

/// What became of a matrix product or convolution, or of a quantized table of which rows are taken.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerReport {
    /// Position of its operation in the graph.
    pub node: usize,
    /// Path of its weight; `?` where both sides are activations.
    pub path: String,
    /// The operation: `linear`, `conv2d`…
    pub operation: &'static str,
    /// How it is computed.
    pub execution: Execution,
    /// Why it is not computed in integers, where something of it is quantized.
    pub reason: Option<String>,
    /// Bytes of its weight as the file has it.
    pub weight_bytes: usize,
}

#[cfg(feature = "engine")]
impl LayerReport {
    pub(crate) fn is_integer(&self) -> bool {
        matches!(
            self.execution,
            Execution::Integer | Execution::WeightsInteger
        )
    }
}
