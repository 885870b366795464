//! What each stage of a run may keep.

use crate::model::checks::accept;
use crate::model::layout::Layer;
use crate::{Budget, Layout, PruneError, SparsityPattern, SparsitySchedule};

/// Target and budget of each of `stages` stages, whose last has this budget and pattern over these
/// parameters. A target is a sparsity over all of them; of a bound on operations, the part of these that goes.
pub(crate) fn stage_budgets(
    budget: &Budget,
    pattern: &SparsityPattern,
    (schedule, stages): (&SparsitySchedule, usize),
    layout: &Layout,
) -> Result<Vec<(f64, Budget)>, PruneError> {
    accept(stages > 0, "stages", stages, "at least 1")?;
    let last_budget = budget;
    let targets = |sparsity| schedule.targets(sparsity, stages);
    // The last stage has the budget as it was given.
    let staged = |targets: Vec<f64>, budget: &dyn Fn(f64) -> Budget| -> Vec<(f64, Budget)> {
        let last = targets.len() - 1;
        let stages = targets.into_iter().enumerate();
        stages
            .map(|(stage, target)| match stage == last {
                true => (target, last_budget.clone()),
                false => (target, budget(target)),
            })
            .collect()
    };
    Ok(match last_budget {
        Budget::Sparsity(sparsity) => staged(targets(*sparsity)?, &Budget::Sparsity),
        Budget::PerLayer(sparsity) => staged(targets(*sparsity)?, &Budget::PerLayer),
        Budget::Keep(k) => {
            let (k, parameters) = (*k, layout.len());
            if k == 0 || k >= parameters {
                return Err(PruneError::KeptCount {
                    k,
                    parameters,
                    path: None,
                });
            }
            let mut counts = Vec::new();
            for target in targets(1.0 - k as f64 / parameters as f64)? {
                // Rounding must not leave fewer before the last stage than after it.
                let count = Budget::kept_count(target, parameters)?.max(k);
                counts.push((target, Budget::Keep(count)));
            }
            counts
        }
        Budget::Flops { kept, sparsity } => {
            // The schedule runs over the operations that go.
            let (kept, sparsity) = (*kept, *sparsity);
            staged(targets(1.0 - kept)?, &move |target| Budget::Flops {
                kept: 1.0 - target,
                sparsity: sparsity.map(|sparsity| sparsity * target / (1.0 - kept)),
            })
        }
        Budget::PerLayerTargets(layers) => {
            let highest = layers.values().copied().fold(0.0, f64::max);
            let pruned = layers.iter().map(|(path, sparsity)| {
                let weights = layout.layer(path).map_or(0, Layer::len);
                sparsity * weights as f64
            });
            let overall = pruned.sum::<f64>() / layout.len() as f64;
            let stages = staged(targets(highest)?, &|target| {
                let share = target / highest;
                let layers = layers.iter();
                Budget::PerLayerTargets(
                    layers
                        .map(|(path, sparsity)| (path.clone(), sparsity * share))
                        .collect(),
                )
            });
            let stages = stages.into_iter();
            stages
                .map(|(target, budget)| (overall * (target / highest), budget))
                .collect()
        }
        // A pattern is there or not: every stage has it whole.
        other => {
            let sparsity = match pattern {
                SparsityPattern::NM { n, m } => 1.0 - *n as f64 / *m as f64,
                _ => 0.0,
            };
            vec![(sparsity, other.clone()); stages]
        }
    })
}
