//! What came of pruning layer by layer.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    Masks, Selection,
    layerwise::{Candidate, JudgedCandidate, Shares},
};

/// A model that was pruned layer by layer.
#[derive(Debug, Clone)]
pub struct LayerwisePruned<M> {
    /// The model, with zeros; nothing holds them yet. `masks.attach(model)` does.
    pub model: M,
    /// Which weights were kept. Some of them may be zero in the model: those that read
    /// [dead features](LayerwiseLayer::dead_features), where no value makes a difference.
    pub masks: Masks,
    /// Which parameters were pruned, and why others were not.
    pub selection: Selection,
    /// What was done.
    pub report: LayerwiseReport,
}

/// What was done, layer by layer, and how the candidates compare.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerwiseReport {
    /// What the number of weights that each layer keeps comes from: never [`Shares::Auto`].
    pub shares: Shares,
    /// The candidate that was taken.
    pub chosen: Candidate,
    /// All of them as they were judged, in the order in which they were tried.
    pub candidates: Vec<JudgedCandidate>,
    /// Whether the held-out examples tell the chosen candidate from every other one: their mean
    /// divergences differ by more than two standard errors. True where there is only one candidate.
    pub can_tell: bool,
    /// The divergence of a network with one answer for everything, the mean of the dense network's. A pruned
    /// one that has no less has lost what the dense one knew.
    #[serde(default, with = "burn_lean_reparam::json::float")]
    pub constant_divergence: f64,
    /// Examples that layers were fitted to.
    pub calibration_examples: usize,
    /// Examples that only judged.
    pub held_out_examples: usize,
    /// The layers of the chosen candidate, in the order of the forward pass.
    pub layers: Vec<LayerwiseLayer>,
    /// BatchNorm layers with new running statistics.
    pub recalibrated: usize,
    /// Batches whose outputs are of other rows than the dense network's, as of
    /// [`own_targets`](LayerwiseLayer::own_targets). Where there are any, divergences say nothing: no other candidate
    /// is tried, and nothing is tuned. [`Shares::Auto`] goes by them all the same: name the shares.
    #[serde(default)]
    pub unpaired: usize,
    /// Steps in which all values were tuned together.
    pub tuning_steps: usize,
    /// Wall clock, all candidates together.
    pub seconds: f64,
}

impl fmt::Display for LayerwiseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for one in &self.candidates {
            let chosen = if one.candidate == self.chosen {
                "*"
            } else {
                " "
            };
            writeln!(
                f,
                "{chosen} {:<16} divergence {:.5} ± {:.5}, disagrees in {:.2} %, {:.1} s",
                format!("{:?}", one.candidate),
                one.divergence,
                one.standard_error,
                100.0 * one.disagreement,
                one.seconds
            )?;
        }
        let noise = if self.can_tell {
            ""
        } else {
            ", within the noise"
        };
        let chosen = self.candidates.iter();
        let mut chosen = chosen.filter(|one| one.candidate == self.chosen);
        if self.unpaired == 0 && chosen.any(|one| one.divergence >= self.constant_divergence) {
            let constant = self.constant_divergence;
            writeln!(
                f,
                "  no nearer than one answer for everything, {constant:.5}"
            )?;
        }
        write!(
            f,
            "  shares by {:?}, fitted to {} examples, judged on {} others{noise}; {:.1} s",
            self.shares, self.calibration_examples, self.held_out_examples, self.seconds
        )
    }
}

/// What happened to one weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerwiseLayer {
    /// Path of the parameter.
    pub path: String,
    /// Weights of it.
    pub weights: usize,
    /// Weights kept. The model may have fewer nonzeros: the fitted value of a weight that reads one of the
    /// [`dead_features`](Self::dead_features) is zero.
    pub kept: usize,
    /// How its values were found.
    pub refitted: Refitted,
    /// Its outputs' squared error on the calibration examples, as a fraction of what they vary by
    /// (without the ridge); `None` where it was not fitted.
    pub error: Option<f64>,
    /// λ, what was added to the diagonal of XᵀX/n.
    pub ridge: f64,
    /// Features that are 0 (or constant, where a bias can take them over) in all examples.
    pub dead_features: usize,
    /// Rows that XᵀX was summed over.
    pub rows: usize,
    /// Batches in which rows are not those that the dense network has there, because their order, or which of
    /// them take part, follows from the data and came out otherwise. There the layer is fitted to what its dense
    /// weights give for the inputs that the pruned network has.
    #[serde(default)]
    pub own_targets: usize,
}

/// How the values of a layer were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refitted {
    /// Fitted to the outputs of the dense layer.
    Fitted,
    /// Dense values: the candidate says so, or all of them are kept and nothing before them has changed.
    Dense,
    /// Dense values: several operations read the weight.
    Shared,
    /// Dense values: the weight is looked up in, or takes part in no product with a matrix of rows.
    NoProduct,
    /// Dense values: an N:M pattern counts along another axis of the weight than the one that is
    /// summed over.
    OtherAxis,
}
