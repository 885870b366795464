//! How many weights each layer keeps.

use burn::module::Module;
use burn_lean_graph::Tensors;
use burn_lean_layerwise::Keep;
use serde::{Deserialize, Serialize};

use crate::layerwise::Candidate;
use crate::layerwise::calibration::Extent;
use crate::layerwise::contest::Contest;
use crate::layerwise::divergences::Divergences;
use crate::layerwise::given::Given;
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

/// How many weights each layer keeps: as many as of these.
pub(crate) struct Shared {
    /// Never [`Shares::Auto`].
    pub(crate) shares: Shares,
    /// By magnitude, in the order of the layout.
    pub(crate) kept: Vec<bool>,
    /// How magnitude does on a few batches, where that was seen.
    pub(crate) screened: Option<Divergences>,
}

impl<M: Module, I: Tensors, O: Tensors> Contest<'_, M, I, O> {
    /// As the pruner is configured; `magnitude` is what the whole network keeps by magnitude.
    pub(crate) fn shared(
        &self,
        first: Candidate,
        weights: &[f32],
        magnitude: Vec<bool>,
    ) -> Result<Shared, PruneError> {
        let (pattern, budget) = (&self.pruner.pattern, &self.pruner.budget);
        let is_global = first == Candidate::Configured && is_global(pattern, budget);
        let keep = magnitude.iter().filter(|kept| **kept).count();
        let lamp = || lamp(weights, keep, self.selection.layout());
        let unseen = |shares, kept| Shared {
            shares,
            kept,
            screened: None,
        };
        match self.pruner.shares {
            Shares::Lamp if is_global => Ok(unseen(Shares::Lamp, lamp())),
            Shares::Auto if is_global => self.less_divergent(magnitude, lamp()),
            _ => Ok(unseen(Shares::Magnitude, magnitude)),
        }
    }

    /// The one by which the network diverges less on a few batches.
    fn less_divergent(&self, magnitude: Vec<bool>, lamp: Vec<bool>) -> Result<Shared, PruneError> {
        let few = self.calibration.few();
        // Behind a layer without a weight everything is constant, which diverges less than what only
        // needs other values: those are fitted before it is compared.
        let how = match empties_any(&magnitude, self.selection.layout()) {
            true => Candidate::Configured,
            false => Candidate::Magnitude,
        };
        // What is wrong with the inputs, the walk through all of them says of its layer or batch.
        if lamp != magnitude
            && let Ok(whole) = self.attempt(&magnitude, &few, how, None)
            && let Ok(by_layer) = self.attempt(&lamp, &few, how, Some(&whole.dense))
        {
            let constant = self.of_one_answer(&whole.dense, &few)?;
            let least = f64::min(whole.divergences.mean(), by_layer.divergences.mean());
            // Two that are hardly better than a network that says one thing of everything: which of them is
            // less lost says nothing of what fitted values make of it.
            let are_lost = !(least < 0.5 * constant);
            let fitted = match how == Candidate::Magnitude && self.pruner.refit && are_lost {
                true => self.lamp_fits_better(&magnitude, &lamp, &few, &whole.dense, constant),
                false => None,
            };
            let is_below = || by_layer.divergences.are_below(&whole.divergences);
            let (shares, kept, least) = match fitted.unwrap_or_else(is_below) {
                true => (Shares::Lamp, lamp, by_layer.divergences),
                false => (Shares::Magnitude, magnitude, whole.divergences),
            };
            return Ok(Shared {
                shares,
                kept,
                screened: (how == Candidate::Magnitude).then_some(least),
            });
        }
        Ok(Shared {
            shares: Shares::Magnitude,
            kept: magnitude,
            screened: None,
        })
    }

    /// Whether fitted values diverge less with layer-adaptive magnitude; `None` where they cannot be fitted.
    fn lamp_fits_better(
        &self,
        magnitude: &[bool],
        lamp: &[bool],
        few: &Extent,
        outputs: &[Given],
        constant: f64,
    ) -> Option<bool> {
        let fitted = |kept: &[bool]| {
            let attempt = self.attempt(kept, few, Candidate::MagnitudeFitted, Some(outputs));
            Some(attempt.ok()?.divergences)
        };
        let (whole, by_layer) = (fitted(magnitude)?, fitted(lamp)?);
        let least = f64::min(whole.mean(), by_layer.mean());
        // Of two that are no better than that network the one that leaves no layer next to nothing:
        // training can mend it.
        Some(!(least < constant) || by_layer.are_below(&whole))
    }
}

/// Whether a layer keeps nothing.
fn empties_any(kept: &[bool], layout: &Layout) -> bool {
    let mut layers = layout.layers().iter();
    layers.any(|layer| !kept[layer.range()].contains(&true))
}

/// By layer-adaptive magnitude, so many in all.
fn lamp(weights: &[f32], keep: usize, layout: &Layout) -> Vec<bool> {
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
fn is_global(pattern: &SparsityPattern, budget: &Budget) -> bool {
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
