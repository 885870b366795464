//! How many weights each layer keeps.

use std::collections::HashMap;

use burn_lean_layerwise::Keep;

use crate::{Budget, Layout, PruneError, SparsityPattern};

/// How a budget over all layers is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shares {
    /// As many as pruning by magnitude over all layers together leaves in each.
    Magnitude,
    /// The same fraction in each.
    Uniform,
    /// As what removals cost says: the errors of all layers' outputs by optimal brain surgeon on the
    /// dense network's inputs, each relative to what the outputs vary by.
    Losses,
}

/// Weights to keep, by path.
pub(crate) fn counts(kept: &[bool], layout: &Layout) -> HashMap<String, usize> {
    let layers = layout.layers().iter();
    layers
        .map(|layer| {
            let kept = kept[layer.range()].iter().filter(|kept| **kept).count();
            (layer.path.clone(), kept)
        })
        .collect()
}

/// The same fraction of each layer, as many in all.
pub(crate) fn uniform(layout: &Layout, keep: usize) -> HashMap<String, usize> {
    let mut before = 0;
    let mut layers = layout.layers().iter();
    let counted = layers.by_ref().map(|layer| {
        let end = layer.range().end as u128 * keep as u128 / layout.len() as u128;
        let kept = end as usize - before;
        before = end as usize;
        (layer.path.clone(), kept)
    });
    counted.collect()
}

/// What one layer's solver is told.
pub(crate) fn keep(pattern: &SparsityPattern, count: usize) -> Keep {
    match pattern {
        SparsityPattern::NM { n, m } => Keep::NOfM { n: *n, m: *m },
        _ => Keep::Weights(count),
    }
}

/// Refuses what has no meaning layer by layer.
pub(crate) fn check(pattern: &SparsityPattern, budget: &Budget) -> Result<(), PruneError> {
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
