//! Budgets: how many weights, or operations, remain.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::PruneError;
use crate::model::checks::accept;
use crate::model::layout::Layout;

/// How much may remain.
///
/// A sparsity s of p weights keeps k = ⌊(1 − s)·p⌋, computed in F64 as the published code does:
/// at 0.9 of 32,360 weights that is 3,235, since 1 − 0.9 is a little below 0.1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Budget {
    /// This sparsity over all prunable weights together.
    Sparsity(f64),
    /// This many weights over all.
    Keep(usize),
    /// This sparsity in each parameter.
    PerLayer(f64),
    /// A sparsity for each parameter by its path; what is not named stays dense.
    PerLayerTargets(BTreeMap<String, f64>),
    /// At most this fraction of the dense floating-point operations. What is left of them
    /// is not enough for any pruned weight (or group) that is worth anything, unless the sparsity or the
    /// pattern has no room for it.
    Flops {
        /// Fraction of the operations that remain, in (0, 1).
        kept: f64,
        /// At least this sparsity as well.
        sparsity: Option<f64>,
    },
    /// As many as the N:M pattern leaves.
    Pattern,
    /// All of them: for weights that are only put on a [grid](crate::SolverConfig::grid).
    All,
}

/// Weights that a pool of them may keep.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pool {
    pub(crate) range: std::ops::Range<usize>,
    pub(crate) k: usize,
}

impl Budget {
    /// k of a sparsity, as the published code counts it.
    ///
    /// ```
    /// use burn_lean_prune::Budget;
    ///
    /// assert_eq!(Budget::kept_count(0.9, 32_360)?, 3_235);
    /// assert!(Budget::kept_count(90.0, 32_360).is_err());
    /// # Ok::<(), burn_lean_prune::PruneError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PruneError::Sparsity`] outside of [0, 1).
    pub fn kept_count(sparsity: f64, parameters: usize) -> Result<usize, PruneError> {
        match (0.0..1.0).contains(&sparsity) {
            true => Ok(((1.0 - sparsity) * parameters as f64) as usize),
            false => Err(PruneError::Sparsity { sparsity }),
        }
    }

    /// The pools of weights with a count each; they partition the flat vector.
    pub(crate) fn pools(&self, layout: &Layout) -> Result<Vec<Pool>, PruneError> {
        let p = layout.len();
        let all = |k: usize| vec![Pool { range: 0..p, k }];
        let pools = match self {
            Self::Sparsity(sparsity) => all(Self::kept_count(*sparsity, p)?),
            Self::Keep(k) => all(*k),
            Self::PerLayer(sparsity) => each(layout, |_| Some(*sparsity))?,
            Self::PerLayerTargets(targets) => {
                if let Some(path) = targets.keys().find(|path| layout.layer(path).is_none()) {
                    let known: Vec<_> = layout.layers().iter().map(|l| l.path.as_str()).collect();
                    return Err(PruneError::UnknownLayer {
                        path: path.clone(),
                        known: known.join(", "),
                    });
                }
                each(layout, |path| targets.get(path).copied())?
            }
            Self::Flops { sparsity, .. } => match sparsity {
                Some(sparsity) => all(Self::kept_count(*sparsity, p)?),
                None => return Ok(all(p)),
            },
            Self::Pattern | Self::All => return Ok(all(p)),
        };
        let kept: usize = pools.iter().map(|pool| pool.k).sum();
        if kept == 0 || kept >= p {
            return Err(PruneError::KeptCount {
                k: kept,
                parameters: p,
                path: None,
            });
        }
        Ok(pools)
    }

    /// The operations that may remain, where they are bounded.
    pub(crate) fn flops(&self, layout: &Layout) -> Result<Option<f64>, PruneError> {
        let Self::Flops { kept, .. } = self else {
            return Ok(None);
        };
        let fits = *kept > 0.0 && *kept < 1.0;
        accept(fits, "flops.kept", kept, "a fraction in (0, 1)")?;
        match layout.flops() {
            0.0 => Err(PruneError::Infeasible {
                reason: "it bounds operations, but no prunable weight costs any".into(),
            }),
            dense => Ok(Some(kept * dense)),
        }
    }
}

/// One pool for each parameter.
fn each(layout: &Layout, sparsity: impl Fn(&str) -> Option<f64>) -> Result<Vec<Pool>, PruneError> {
    let pool = |layer: &crate::model::layout::Layer| {
        let k = match sparsity(&layer.path) {
            Some(sparsity) => Budget::kept_count(sparsity, layer.len())?,
            None => layer.len(),
        };
        match k {
            0 if !layer.is_empty() => Err(PruneError::KeptCount {
                k,
                parameters: layer.len(),
                path: Some(layer.path.clone()),
            }),
            _ => Ok(Pool {
                range: layer.range(),
                k,
            }),
        }
    };
    layout.layers().iter().map(pool).collect()
}
