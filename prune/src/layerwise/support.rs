//! Which weights of a layer stay.

use burn_lean_layerwise::Method;
use serde::{Deserialize, Serialize};

/// How the weights of a layer that stay are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SupportMethod {
    /// The largest.
    Magnitude,
    /// Magnitude times the deviation of the input, over the whole layer
    /// ([Wanda](https://arxiv.org/abs/2306.11695)).
    Wanda,
    /// One pass over the columns ([SparseGPT](https://arxiv.org/abs/2301.00774)).
    SparseGpt,
    /// Optimal brain surgeon, one weight after the other.
    Obs,
    /// The best of those and of a splitting ([ALPS](https://arxiv.org/abs/2406.07831)) as a start, then
    /// exchanges and splicing; of large layers the splitting alone.
    BestSubset,
}

impl SupportMethod {
    pub(super) fn method(self) -> Method {
        match self {
            Self::Magnitude => Method::Magnitude,
            Self::Wanda => Method::Wanda,
            Self::SparseGpt => Method::SparseGpt { block: 128 },
            Self::Obs => Method::Obs,
            Self::BestSubset => Method::BestSubset,
        }
    }
}
