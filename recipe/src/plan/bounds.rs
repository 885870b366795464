//! Bounds that a compressed model must keep.

use serde::{Deserialize, Serialize};

use crate::RecipeError;
use crate::check::Check;

/// Bounds that a compressed model must keep; those not given are none. The gate of a CI:
/// `[bounds]` in the file of a recipe, or in a [`TrustConfig`](crate::TrustConfig).
///
/// ```
/// use burn_lean_recipe::Bounds;
///
/// let bounds = Bounds {
///     max_accuracy_drop: Some(1.0),
///     max_bytes: Some(100_000),
///     ..Bounds::default()
/// };
/// # let _ = bounds;
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bounds {
    /// Accuracy that may be lost [points of percent].
    pub max_accuracy_drop: Option<f64>,
    /// Accuracy that must be left [%].
    pub min_accuracy: Option<f64>,
    /// Examples that the two models may answer differently [%].
    pub max_disagreement: Option<f64>,
    /// Expected calibration error, 0 to 1.
    pub max_ece: Option<f64>,
    /// Bytes of the record.
    pub max_bytes: Option<u64>,
    /// Latency in milliseconds.
    pub max_latency_ms: Option<f64>,
    /// Accuracy that may be lost more than by the original, under any perturbation that changes inputs
    /// of this kind [points of percent].
    pub max_robustness_drop: Option<f64>,
}

impl Bounds {
    /// Whether there is none.
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses numbers that are none: nothing keeps them.
    pub(crate) fn validate(&self, stage: &str) -> Result<(), RecipeError> {
        let bounds = [
            ("max_accuracy_drop", self.max_accuracy_drop),
            ("min_accuracy", self.min_accuracy),
            ("max_disagreement", self.max_disagreement),
            ("max_ece", self.max_ece),
            ("max_latency_ms", self.max_latency_ms),
            ("max_robustness_drop", self.max_robustness_drop),
        ];
        for (field, bound) in bounds {
            let bound = bound.unwrap_or_default();
            Check(stage).accept(bound.is_finite(), field, bound, "a finite number")?;
        }
        Ok(())
    }
}
