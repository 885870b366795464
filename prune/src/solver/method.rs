//! The methods that choose a support, from a random one to the whole of CHITA.

use burn::config::Config;
use serde::{Deserialize, Serialize};

/// How the weights to keep are chosen, and what happens to their values.
///
/// | method | score of a weight | values of the kept weights |
/// |---|---|---|
/// | `Random` | a random number | dense |
/// | `Magnitude` | \|w₀\| | dense |
/// | `DiagonalFisher` | w₀²·(Σᵢ gᵢⱼ² / n + ridge) | dense |
/// | `WoodFisher` | w₀² / \[F_b⁻¹\]ⱼⱼ, F_b a block of the Fisher | back-solved, block by block |
/// | `BackSolve` | \|w₀\| | back-solved |
/// | `Chita` | the objective: OBS score over a shrinking support, then splicing | back-solved |
///
/// Each of them obeys the sparsity pattern and the budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Method {
    /// Chance, from the seed of the config.
    Random,
    /// The largest weights; per layer with a budget per layer.
    Magnitude,
    /// Optimal Brain Damage with the diagonal of the empirical Fisher
    /// ([LeCun et al., 1990](https://papers.nips.cc/paper/1989/hash/6c9882bbac1c7093bd25041881277658-Abstract.html)).
    DiagonalFisher,
    /// Optimal Brain Surgeon scores from inverted blocks of the empirical Fisher
    /// ([WoodFisher, Singh & Alistarh, 2020](https://arxiv.org/abs/2004.14340)).
    WoodFisher {
        /// Consecutive weights in a block; blocks do not cross parameters.
        block_size: usize,
    },
    /// The support of `Magnitude`, its values from the exact regression on it.
    BackSolve,
    /// A support that shrinks in stages, re-solved at each of them, then splicing.
    Chita(ChitaConfig),
}

/// The stages and the local search of [`Method::Chita`].
#[derive(Config, Debug, PartialEq)]
pub struct ChitaConfig {
    /// The first support, as a multiple of k; at least 1. Without stages it is k. Default 2.
    #[config(default = 2.0)]
    pub expansion: f64,
    /// Stages in which the support shrinks geometrically to k; each one re-solves. Default 3.
    #[config(default = 3)]
    pub stages: usize,
    /// Rounds of splicing after the stages, at most; 0 for none. In each of them many pruned weights
    /// enter and as many kept ones leave; they end where one lowers the objective by less than a
    /// thousandth. The objective (in blocks, that of the blocks) is not higher than without. Default 3.
    #[config(default = 3)]
    pub max_splices: usize,
}
