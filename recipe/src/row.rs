//! What was measured of the model of one stage.

use serde::{Deserialize, Serialize};

/// What was measured of the model of one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// `FP32`, `AMP BF16` or, where nothing was trained, `dense`; `shrunk to 50 %`; `pruned 90 %`;
    /// `pruned 90 %, W8A8`…
    pub stage: String,
    /// What the evaluation of the task says; `None` without one.
    pub accuracy: Option<f64>,
    /// Bytes of the record: Burn's of a dense model, the sparse one of others.
    pub bytes: u64,
    /// Numbers of the model that are not zero.
    pub nonzeros: u64,
    /// Median time of one example in milliseconds.
    pub latency_ms: Option<f64>,
    /// Wall clock of what made the model in seconds; after a restart, of the part after it.
    pub seconds: f64,
}
