//! How many weights each layer keeps.

use burn_lean_layerwise::Keep;
use serde::{Deserialize, Serialize};

use crate::model::checks;
use crate::{Budget, Layout, PruneError, SparsityPattern};

/// How a budget over all layers is shared, embeddings and what else cannot be fitted among them. The same
/// fraction in each is [`Budget::PerLayer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Shares {
    /// [`Magnitude`](Self::Magnitude) or [`Lamp`](Self::Lamp): the one by which the network diverges less
    /// from the dense one where each layer keeps its largest weights as they are (fitted to the first batch,
    /// where magnitude leaves a layer nothing), with new statistics of BatchNorm from the first batch, by the
    /// examples that judge. Magnitude where each layer's number is given.
    Auto,
    /// As many as pruning by magnitude over all layers together leaves in each.
    Magnitude,
    /// As many as layer-adaptive magnitude leaves in each (LAMP, Lee et al., ICLR 2021): a weight's
    /// square, as a fraction of the squares of all weights of its layer that are not smaller, is compared
    /// over all layers. No layer is emptied.
    Lamp,
}

/// Whether a layer keeps nothing.
pub(crate) fn empties_any(kept: &[bool], layout: &Layout) -> bool {
    let mut layers = layout.layers().iter();
    layers.any(|layer| !kept[layer.range()].contains(&true))
}

/// By layer-adaptive magnitude, so many in all.
pub(crate) fn lamp(weights: &[f32], keep: usize, layout: &Layout) -> Vec<bool> {
    let mut scores = Vec::new();
    for layer in layout.layers() {
        let mut order: Vec<usize> = layer.range().collect();
        order.sort_by(|a, b| weights[*b].abs().total_cmp(&weights[*a].abs()));
        let mut sum = 0.0;
        scores.extend(order.into_iter().map(|at| {
            let square = f64::from(weights[at]).powi(2);
            sum += square;
            (if sum > 0.0 { square / sum } else { 0.0 }, at)
        }));
    }
    // Stable: of a layer, the larger weights come first.
    scores.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let mut kept = vec![false; weights.len()];
    for (_, at) in &scores[..keep] {
        kept[*at] = true;
    }
    kept
}

/// What one layer's solver is told.
pub(crate) fn keep(pattern: &SparsityPattern, count: usize) -> Keep {
    match pattern {
        SparsityPattern::NM { n, m } => Keep::NOfM { n: *n, m: *m },
        _ => Keep::Weights(count),
    }
}

/// Whether a budget is shared between the layers at all.
pub(crate) fn is_global(pattern: &SparsityPattern, budget: &Budget) -> bool {
    !says_each(budget) && !matches!(pattern, SparsityPattern::NM { .. })
}

/// Whether a budget says how many weights each layer keeps.
fn says_each(budget: &Budget) -> bool {
    matches!(budget, Budget::PerLayer(_) | Budget::PerLayerTargets(_))
}

/// Refuses what has no meaning layer by layer.
pub(crate) fn check(
    pattern: &SparsityPattern,
    budget: &Budget,
    shares: Shares,
) -> Result<(), PruneError> {
    let expected =
        "`Auto` or `Magnitude` with a budget that says how many weights each layer keeps";
    let fits = shares != Shares::Lamp || !says_each(budget);
    checks::accept(fits, "shares", format!("{shares:?}"), expected)?;
    let what = match (pattern, budget) {
        (SparsityPattern::Groups(_), _) => format!("the pattern {pattern}"),
        (_, Budget::Flops { .. }) => "a budget of operations".into(),
        (_, Budget::All) => "a budget of all weights".into(),
        (SparsityPattern::NM { n, m }, budget) if *budget != Budget::Pattern => {
            format!("another budget than `Budget::Pattern` with {n}:{m}")
        }
        _ => return Ok(()),
    };
    Err(PruneError::NotLayerwise { what })
}
