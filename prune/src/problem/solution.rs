//! What a solver returns.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::problem::objective::Objective;

/// Weights with their support, and how the solver came to them.
#[derive(Debug, Clone)]
pub struct Solution {
    /// The pruned weights, `[p]`, on the device of the gradients: zero outside of the support.
    pub weights: Tensor<1>,
    /// Indices of the kept weights, ascending.
    pub support: Vec<usize>,
    /// The objective, over all p weights.
    pub objective: f64,
    /// Its terms.
    pub terms: Objective,
    /// How far the values may be from the best ones on this support, as a fraction of the sum of
    /// squares: ‖gradient on the support‖² / 4λ bounds the distance from above, and so does the
    /// objective, which is no square below 0. At 1 nothing is known: the ridge is so small that F32
    /// does not tell it from 0, as a warning says where the values were to be exact. On a grid it is
    /// what the grid costs, at most.
    pub relative_gap: f64,
    /// Steps: stages, splices, sweeps.
    pub iterations: usize,
    /// The objective over time.
    pub trace: Vec<TracePoint>,
    /// Codes and scales, where the weights lie on a grid.
    pub rounded: Option<Rounded>,
}

/// Weights as whole multiples of scales.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rounded {
    /// The layers on a grid, in the order of their config.
    pub layers: Vec<RoundedLayer>,
    /// The objective before anything was rounded.
    pub real: f64,
    /// The objective with every weight at its nearest code, on the first support and scales.
    pub nearest: f64,
}

/// The codes of one parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoundedLayer {
    /// Its path.
    pub path: String,
    /// Groups with a scale of their own along each axis.
    pub groups: Vec<usize>,
    /// The scale of each group, row-major.
    pub scales: Vec<f32>,
    /// The code of each weight, row-major; the weight is code · scale, in F32.
    pub codes: Vec<i32>,
}

/// One point of a [`Solution::trace`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TracePoint {
    /// The objective after the step; during the search it is computed over the samples that
    /// matter, so that it may be a little below the true one.
    pub objective: f64,
    /// Nonzeros.
    pub k: usize,
    /// Seconds since the solver began.
    pub seconds: f64,
    /// What was done.
    pub step: Step,
}

/// The steps that solvers are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Step {
    /// The first support.
    Start,
    /// A stage of a shrinking support.
    Shrink,
    /// Many pruned weights against as many kept ones.
    Splice,
    /// Exact minimum on the support.
    BackSolve,
    /// The first codes on a grid.
    Round,
    /// Sweep of coordinate descent over codes.
    CodeDescent,
    /// The best scales for the codes.
    Scales,
}
