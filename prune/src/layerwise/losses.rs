//! Shares of a budget by what removals cost in the dense network.

use std::collections::{HashMap, HashSet};

use burn_lean_graph::{Pass, Tensors, Walk};
use burn_lean_layerwise::{Elimination, LayerProblem, ProblemConfig, share_budget};

use crate::host::read;
use crate::layerwise::attempt::is_centered;
use crate::layerwise::rows::Sampling;
use crate::layerwise::stops::{Stop, stops};
use crate::layerwise::{failed, rows, shares};
use crate::{PruneError, Pruner, Selection};

/// Weights to keep, by path; what takes part in no product keeps what magnitude says.
pub(crate) fn shares<O: Tensors>(
    pruner: &Pruner,
    mut walk: Walk<O>,
    selection: &Selection,
    magnitude: &[bool],
    sampling: Sampling,
    folded: &HashSet<String>,
) -> Result<HashMap<String, usize>, PruneError> {
    let mut counts = shares::counts(magnitude, selection.layout());
    let stops = stops(&walk, selection, folded);
    let mut measured = Vec::new();
    while let Some(mut step) = walk
        .advance(|node| matches!(stops.get(&node.index()), Some(Stop::Product(_))))
        .map_err(failed)?
    {
        let Some(Stop::Product(site)) = stops.get(&step.node().index()) else {
            continue;
        };
        if !site.is_fitted() || site.product.groups > 1 {
            continue;
        }
        let path = selection.layout().layers()[site.layer].path.clone();
        let original = step.weight(&site.product, Pass::Original).map_err(failed)?;
        let gram = rows::sum(&mut step, site, 0, &original, false, None, sampling)?;
        let config = ProblemConfig {
            damping: pruner.damping,
            centered: is_centered(pruner, site),
            ..ProblemConfig::new()
        };
        let located = |source| PruneError::LayerSystem {
            path: path.clone(),
            source,
        };
        let problem = LayerProblem::new(&gram, &read(original)?, &config).map_err(located)?;
        let elimination = Elimination::new(&problem);
        measured.push((path, problem.scale(), elimination));
    }
    let keep = measured.iter().map(|(path, _, _)| counts[path]).sum();
    let layers: Vec<&Elimination> = measured.iter().map(|(_, _, layer)| layer).collect();
    let scales = measured
        .iter()
        .map(|(_, scale, _)| 1.0 / scale.max(f64::MIN_POSITIVE));
    let scales: Vec<f64> = scales.collect();
    let shared =
        share_budget(&layers, &scales, keep).map_err(|source| PruneError::LayerSystem {
            path: measured
                .first()
                .map(|(path, _, _)| path.clone())
                .unwrap_or_default(),
            source,
        })?;
    for ((path, _, _), count) in measured.iter().zip(shared) {
        counts.insert(path.clone(), count);
    }
    Ok(counts)
}
