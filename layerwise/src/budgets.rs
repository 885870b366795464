//! How a budget is shared over layers.

use crate::Elimination;
use crate::error::LayerwiseError;

/// How many weights each layer keeps of `keep` in all, so that what their removals cost together,
/// each layer's by its `importance`, is least as the greedy orders go: always the weight is next that
/// is the cheapest of all layers' next ones.
///
/// The objectives of two layers are in the units of their own outputs; an importance brings them to
/// the same, as 1 / [`LayerProblem::scale`](crate::LayerProblem::scale) or a Fisher weight does.
///
/// # Errors
///
/// [`LayerwiseError::Mismatch`] for another number of importances, [`LayerwiseError::Invalid`] for one
/// that is negative or not finite, [`LayerwiseError::KeepsTooMany`].
pub fn share_budget(
    layers: &[&Elimination],
    importance: &[f64],
    keep: usize,
) -> Result<Vec<usize>, LayerwiseError> {
    crate::error::same("importances of layers", layers.len(), importance.len())?;
    let wrong = |weight: &&f64| !(**weight >= 0.0 && weight.is_finite());
    if let Some(weight) = importance.iter().find(wrong) {
        return Err(LayerwiseError::Invalid {
            field: "importance",
            value: weight.to_string(),
            expected: "finite and at least 0",
        });
    }
    let weights: usize = layers.iter().map(|layer| layer.weights()).sum();
    if keep > weights {
        return Err(LayerwiseError::KeepsTooMany { keep, weights });
    }
    // The losses of one order need not rise: a cheap weight behind a dear one waits for it.
    let mut removals: Vec<(f64, usize)> = Vec::new();
    for (at, layer) in layers.iter().enumerate() {
        let mut highest = 0.0_f64;
        removals.extend(layer.losses().map(|loss| {
            highest = highest.max(loss * importance[at]);
            (highest, at)
        }));
    }
    removals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut kept: Vec<usize> = layers.iter().map(|layer| layer.weights()).collect();
    let mut left = weights;
    for (_, at) in removals {
        if left == keep {
            break;
        }
        kept[at] -= 1;
        left -= 1;
    }
    Ok(kept)
}
