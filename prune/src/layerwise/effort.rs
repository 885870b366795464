//! How much a pruner does.

use burn_lean_graph::{Tensors, Walk};
use serde::{Deserialize, Serialize};

/// Passes that tuning is worth beginning for.
const LEAST: usize = 4;

/// How much a [`Pruner`](crate::Pruner) does beyond one walk through the layers.
///
/// The difference is the tuning at the end: passes over the calibration examples in which all kept
/// weights, biases and gains follow the gradients of the distance from the dense network's outputs (no
/// labels). Its bound is in multiplications of the forward pass, so that the same call does the same
/// everywhere:
///
/// | effort | multiplications of all passes | passes | candidates |
/// |---|---|---|---|
/// | `Quick` | 0 | 0 | as configured, magnitude |
/// | `Standard` | 10¹¹ | 4 to 32, or none | and tuned |
/// | `Thorough` | 10¹² | 4 to 128, or none | and fitted values on magnitude's support |
///
/// Fewer than four passes gain nothing: a network of which the bound affords fewer is not tuned. A
/// quarter of the passes, and at least 24 steps, come first: where they harm, the others are left out.
/// Where that were half of all, all passes are one course.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Effort {
    /// Without gradients.
    Quick,
    /// About a minute on two cores for a ResNet20 on 32 × 32 pixels, seconds for small networks.
    #[default]
    Standard,
    /// About ten times that.
    Thorough,
}

impl Effort {
    /// Passes over examples of which one pass takes so many multiplications.
    pub(crate) fn passes(self, multiplications: f64, examples: usize) -> usize {
        let (all, most) = match self {
            Self::Quick => return 0,
            Self::Standard => (1e11, 32),
            Self::Thorough => (1e12, 128),
        };
        match (all / multiplications.max(1.0)) as usize {
            passes if passes < LEAST || examples == 0 => 0,
            passes => passes.min(most),
        }
    }
}

/// Multiplications of the products with weights in the forward pass of the first batch.
pub(crate) fn multiplications<O: Tensors>(walk: &Walk<O>) -> f64 {
    let nodes: Vec<_> = walk.graph().nodes().collect();
    let of = |product: burn_lean_graph::Product| {
        if product.is_embedding() {
            return 0.0;
        }
        let outputs = nodes[product.node].operation().outputs().next();
        let places = outputs.map_or(0, |output| output.shape.num_elements());
        places as f64 * product.inputs as f64
    };
    walk.products().into_iter().map(of).sum()
}
