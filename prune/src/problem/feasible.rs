//! Which supports the pattern and the budget allow, and the projection onto them: hard
//! thresholding.
//!
//! Blocks of an N:M pattern lie inside parameters, parameters inside the whole: taking the best of
//! each block, then of each pool, is the exact projection. Bounds on operations and groups of
//! different sizes make it a [`knapsack`].

mod cost_classes;
mod knapsack;
mod room;

use crate::error::PruneError;
use crate::model::checks::accept;
use crate::model::layout::Layout;
use crate::problem::budget::{Budget, Pool};
use crate::problem::sparsity::SparsityPattern;
use knapsack::{Unit, better, take, within_operations};

/// The supports that a pattern and a budget allow.
#[derive(Debug, Clone)]
pub(crate) struct Feasible {
    parameters: usize,
    pools: Vec<Pool>,
    shape: Shape,
    operations: Option<Operations>,
}

#[derive(Debug, Clone)]
enum Shape {
    Unstructured,
    /// Block of each weight, and how many of its m weights may be kept.
    Blocks {
        of: Vec<u32>,
        n: usize,
        m: usize,
    },
    /// Group of each weight, and the groups.
    Groups {
        of: Vec<u32>,
        groups: Vec<Vec<usize>>,
    },
}

/// A bound on floating-point operations.
#[derive(Debug, Clone)]
struct Operations {
    /// Cost of each weight.
    cost: Vec<f32>,
    bound: f64,
    dense: f64,
}

impl Feasible {
    /// Combines a pattern and a budget over the weights of `layout`.
    pub(crate) fn new(
        pattern: &SparsityPattern,
        budget: &Budget,
        layout: &Layout,
    ) -> Result<Self, PruneError> {
        let fits = *budget != Budget::Pattern || matches!(pattern, SparsityPattern::NM { .. });
        let expected = "a sparsity or a count, unless the pattern is N:M";
        accept(fits, "budget", "Pattern", expected)?;
        let parameters = layout.len();
        let pools = budget.pools(layout)?;
        let blocks = pattern.blocks(layout)?;
        let groups = pattern.groups(layout)?;
        let shape = match pattern {
            SparsityPattern::Unstructured => Shape::Unstructured,
            SparsityPattern::NM { n, m } => Shape::Blocks {
                of: membership(&blocks, parameters),
                n: *n,
                m: *m,
            },
            SparsityPattern::Groups(_) => Shape::Groups {
                of: membership(&groups, parameters),
                groups,
            },
        };
        let operations = budget.flops(layout)?.map(|bound| Operations {
            cost: layout
                .layers()
                .iter()
                .flat_map(|layer| std::iter::repeat_n(layer.flops_per_weight as f32, layer.len()))
                .collect(),
            bound,
            dense: layout.flops(),
        });
        let feasible = Self {
            parameters,
            pools,
            shape,
            operations,
        };
        feasible.hold_groups(layout)?;
        Ok(feasible)
    }

    /// Refuses a budget that leaves a layer less than its smallest group: nothing of it would be kept.
    fn hold_groups(&self, layout: &Layout) -> Result<(), PruneError> {
        let Shape::Groups { groups, .. } = &self.shape else {
            return Ok(());
        };
        // Of each pool its smallest group.
        let mut smallest: Vec<Option<usize>> = vec![None; self.pools.len()];
        for group in groups {
            let Some(first) = group.first() else { continue };
            let least = smallest[self.pool_of(*first)].get_or_insert(group.len());
            *least = (*least).min(group.len());
        }
        for (pool, least) in self.pools.iter().zip(smallest) {
            let beyond = least.filter(|least| pool.k < *least);
            let layer = layout.layers().iter().find(|l| l.range() == pool.range);
            if let (Some(least), Some(layer)) = (beyond, layer) {
                return Err(PruneError::Infeasible {
                    reason: format!(
                        "it keeps {} weights of `{}`, whose smallest group has {least}",
                        pool.k, layer.path
                    ),
                });
            }
        }
        Ok(())
    }

    /// The largest number of weights that may be kept.
    pub(crate) fn k(&self) -> usize {
        let pools: usize = self.pools.iter().map(|pool| pool.k).sum();
        match &self.shape {
            Shape::Blocks { n, m, .. } => pools.min(self.parameters / m * n),
            _ => pools,
        }
    }

    /// How many times its budget a pool is, at most: p/k of it, or the dense operations over their bound.
    pub(crate) fn share(&self) -> f64 {
        let kept = self.pools.iter().map(|pool| match &self.shape {
            Shape::Blocks { n, m, .. } => pool.k.min(pool.range.len() / m * n),
            _ => pool.k,
        });
        let pools = self.pools.iter().zip(kept).filter(|(_, kept)| *kept > 0);
        let shares = pools.map(|(pool, kept)| pool.range.len() as f64 / kept as f64);
        shares.fold(self.operations_share(), f64::max)
    }

    /// The weights of the pools that lose some, and how many times their budget these are together: what
    /// stays dense has nothing to be searched.
    pub(crate) fn contested(&self) -> (usize, f64) {
        let untouched = self.untouched();
        let weights = self.parameters - untouched;
        let kept = (self.k() - untouched).max(1);
        let share = weights as f64 / kept as f64;
        (weights, share.max(self.operations_share()))
    }

    /// The weights of the pools that keep all of theirs.
    pub(crate) fn untouched(&self) -> usize {
        let pools = self.pools.iter().filter(|pool| !self.is_contested(pool));
        pools.map(|pool| pool.range.len()).sum()
    }

    /// Whether weights of a pool may have to go.
    fn is_contested(&self, pool: &Pool) -> bool {
        let is_blocked = match &self.shape {
            Shape::Blocks { n, m, .. } => n < m,
            _ => false,
        };
        is_blocked || self.operations.is_some() || pool.k < pool.range.len()
    }

    /// The dense operations over their bound, 1 without one.
    fn operations_share(&self) -> f64 {
        let operations = self.operations.as_ref();
        operations.map_or(1.0, |operations| operations.dense / operations.bound)
    }

    /// The allowed support with the largest total score among `candidates`; ascending. Ties go to
    /// the smaller index.
    ///
    /// `expansion` of 1 is the budget itself; larger ones allow about that many times as much, and
    /// hold what 1 selects: as much as the budget allows can be selected from them again.
    ///
    /// # Errors
    ///
    /// [`PruneError::Infeasible`] where nothing fits.
    pub(crate) fn select(
        &self,
        candidates: &[usize],
        scores: &[f64],
        expansion: f64,
    ) -> Result<Vec<usize>, PruneError> {
        let mut chosen = self.best(candidates, scores, expansion);
        // Single weights that only counts bound are among the best of more of them anyway.
        let nested = matches!(self.shape, Shape::Unstructured) && self.operations.is_none();
        if expansion > 1.0 && !nested {
            // With more room in each block, group by group or per operation, the best may be
            // crowded where the budget itself allows few of them.
            chosen.extend(self.best(candidates, scores, 1.0));
            chosen.sort_unstable();
            chosen.dedup();
        }
        if chosen.is_empty() {
            return Err(PruneError::Infeasible {
                reason: "it is smaller than the smallest group of weights".into(),
            });
        }
        Ok(self.members(&chosen))
    }

    /// What [`select`](Self::select) selects of all weights by their absolute values, in a sixth of the memory;
    /// `None` where more than counts bound single weights, and where nothing fits.
    pub(crate) fn largest(&self, weights: &[f32]) -> Option<Vec<usize>> {
        if !matches!(self.shape, Shape::Unstructured) || self.operations.is_some() {
            return None;
        }
        let mut chosen = Vec::new();
        for pool in &self.pools {
            let mut members: Vec<usize> = pool.range.clone().collect();
            if pool.k < members.len() {
                members.select_nth_unstable_by(pool.k, |a, b| {
                    let sizes = weights[*b].abs().total_cmp(&weights[*a].abs());
                    sizes.then(a.cmp(b))
                });
                members.truncate(pool.k);
            }
            chosen.extend(members);
        }
        chosen.sort_unstable();
        (!chosen.is_empty()).then_some(chosen)
    }

    /// About `count` weights of `candidates` that are worth most beside those of `support`, each pool
    /// according to its budget; ascending. At least one weight or group, if there are candidates.
    ///
    /// `gains` of the candidates and `costs` of the support are not negative. A weight that enters a
    /// full block of an N:M pattern is worth its gain without the cheapest weight there, and one for
    /// each block enters.
    pub(crate) fn admit(
        &self,
        support: &[usize],
        costs: &[f64],
        candidates: &[usize],
        gains: &[f64],
        count: usize,
    ) -> Vec<usize> {
        let mut units = match &self.shape {
            Shape::Blocks { of, n, .. } => {
                let mut room = vec![(0, f64::INFINITY); self.blocks()];
                for (index, cost) in support.iter().zip(costs) {
                    let (kept, least) = &mut room[of[*index] as usize];
                    *kept += 1;
                    *least = cost.min(*least);
                }
                let worth = |(index, gain): (&usize, &f64)| match room[of[*index] as usize] {
                    (kept, _) if kept < *n => *gain,
                    (_, least) => gain - least,
                };
                let worth: Vec<f64> = candidates.iter().zip(gains).map(worth).collect();
                self.units_within(candidates, &worth, |_| 1)
            }
            _ => self.units_within(candidates, gains, |_| 1),
        };
        if self.operations.is_some() {
            let free = |unit: &&mut Unit| unit.cost > 0.0;
            let priced = units.iter_mut().filter(free);
            priced.for_each(|unit| unit.score /= unit.cost);
        }
        let mut chosen = take(&units, &self.shares(count), 0.0);
        if chosen.is_empty() {
            // Groups of more weights than that.
            units.sort_unstable_by(|a, b| better(a, b, 0.0));
            chosen.extend(units.first());
        }
        self.members(&ids(&chosen))
    }

    /// About `count` single weights with the largest scores, each pool according to its budget;
    /// ascending.
    pub(crate) fn best_of_pools(
        &self,
        weights: &[usize],
        scores: &[f64],
        count: usize,
    ) -> Vec<usize> {
        let single = |(index, score): (&usize, &f64)| Unit {
            id: *index as u32,
            pool: self.pool_of(*index) as u32,
            weights: 1,
            score: *score,
            cost: 0.0,
        };
        let units: Vec<Unit> = weights.iter().zip(scores).map(single).collect();
        let chosen = take(&units, &self.shares(count), 0.0);
        let mut chosen: Vec<usize> = chosen.iter().map(|unit| unit.id as usize).collect();
        chosen.sort_unstable();
        chosen
    }

    /// Of an N:M pattern the `count` blocks in which the largest of the `pruned` weights exceeds the
    /// smallest of the `kept` ones most: both of these weights. Nothing for other patterns.
    pub(crate) fn best_pairs(
        &self,
        kept: &[(usize, f64)],
        pruned: &[(usize, f64)],
        count: usize,
    ) -> Vec<usize> {
        let Shape::Blocks { of, .. } = &self.shape else {
            return Vec::new();
        };
        let mut least: Vec<Option<(usize, f64)>> = vec![None; self.blocks()];
        let mut most = least.clone();
        for (index, size) in kept {
            let least = &mut least[of[*index] as usize];
            if least.is_none_or(|(_, other)| *size < other) {
                *least = Some((*index, *size));
            }
        }
        for (index, size) in pruned {
            let most = &mut most[of[*index] as usize];
            if most.is_none_or(|(_, other)| *size > other) {
                *most = Some((*index, *size));
            }
        }
        let pairs = least.into_iter().zip(most);
        let mut pairs: Vec<(f64, usize, usize)> = pairs
            .filter_map(|(least, most)| {
                let ((leaves, small), (enters, large)) = (least?, most?);
                Some((large - small, leaves, enters))
            })
            .collect();
        pairs.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        pairs.truncate(count);
        pairs
            .into_iter()
            .flat_map(|(_, leaves, enters)| [leaves, enters])
            .collect()
    }

    /// `count` weights, divided among the pools that lose some as the budget is.
    fn shares(&self, count: usize) -> Vec<usize> {
        let kept = self.pools.iter().map(|pool| match self.is_contested(pool) {
            true => pool.k as u128,
            false => 0,
        });
        let kept: Vec<u128> = kept.collect();
        let all = kept.iter().sum::<u128>().max(1);
        let share = |kept: &u128| (count as u128 * kept).div_ceil(all) as usize;
        kept.iter().map(share).collect()
    }

    /// The weights of units, ascending.
    fn members(&self, units: &[u32]) -> Vec<usize> {
        let mut members: Vec<usize> = match &self.shape {
            Shape::Groups { groups, .. } => {
                let members = |unit: &u32| groups[*unit as usize].iter().copied();
                units.iter().flat_map(members).collect()
            }
            _ => units.iter().map(|index| *index as usize).collect(),
        };
        members.sort_unstable();
        members
    }

    /// Blocks of an N:M pattern.
    fn blocks(&self) -> usize {
        match &self.shape {
            Shape::Blocks { m, .. } => self.parameters / m,
            _ => 0,
        }
    }

    /// Whether weights can be exchanged one against one: not where groups stay together.
    pub(crate) fn exchanges_single_weights(&self) -> bool {
        !matches!(self.shape, Shape::Groups { .. })
    }

    /// The units that [`select`](Self::select) takes at an expansion of their counts.
    fn best(&self, candidates: &[usize], scores: &[f64], expansion: f64) -> Vec<u32> {
        let cap = match &self.shape {
            Shape::Blocks { n, m, .. } => expand(*n, expansion, *m),
            _ => 1,
        };
        let units = self.units_within(candidates, scores, |_| cap);
        let caps: Vec<usize> = self
            .pools
            .iter()
            .map(|pool| expand(pool.k, expansion, pool.range.len()))
            .collect();
        let chosen = match &self.operations {
            None => take(&units, &caps, 0.0),
            Some(operations) => {
                let bound = (operations.bound * expansion).min(operations.dense);
                within_operations(&units, &caps, bound)
            }
        };
        ids(&chosen)
    }

    /// What competes: single weights (the best of each block, `cap` of them), or groups with the
    /// scores of their members added up.
    fn units_within(
        &self,
        candidates: &[usize],
        scores: &[f64],
        cap: impl Fn(usize) -> usize,
    ) -> Vec<Unit> {
        let single = |(index, score): (&usize, &f64)| self.single(*index, *score);
        let pairs = candidates.iter().zip(scores);
        match &self.shape {
            Shape::Unstructured => pairs.map(single).collect(),
            Shape::Blocks { of, .. } => {
                let mut units: Vec<Unit> = pairs.map(single).collect();
                units.sort_unstable_by(|a, b| {
                    let block = |unit: &Unit| of[unit.id as usize];
                    block(a).cmp(&block(b)).then(better(a, b, 0.0))
                });
                let mut block = u32::MAX;
                let mut rank = 0;
                units.retain(|unit| {
                    let own = of[unit.id as usize];
                    rank = if own == block { rank + 1 } else { 0 };
                    block = own;
                    rank < cap(own as usize)
                });
                units
            }
            Shape::Groups { of, groups } => {
                // A negative score puts a weight behind all others; it says nothing about those of
                // its group, and counts only where all of them have one.
                let mut worth = vec![None; groups.len()];
                let mut behind = vec![None; groups.len()];
                for (index, score) in pairs {
                    let totals = if *score < 0.0 {
                        &mut behind
                    } else {
                        &mut worth
                    };
                    *totals[of[*index] as usize].get_or_insert(0.0) += *score;
                }
                let totals = worth.into_iter().zip(behind);
                let unit = |(id, (worth, behind)): (usize, (Option<f64>, Option<f64>))| {
                    let score = worth.or(behind)?;
                    Some(self.group(id, &groups[id], score))
                };
                totals.enumerate().filter_map(unit).collect()
            }
        }
    }

    fn single(&self, index: usize, score: f64) -> Unit {
        Unit {
            id: index as u32,
            pool: self.pool_of(index) as u32,
            weights: 1,
            score,
            cost: self.cost(index),
        }
    }

    /// The group with these members, one at least.
    fn group(&self, id: usize, members: &[usize], score: f64) -> Unit {
        Unit {
            id: id as u32,
            pool: self.pool_of(members[0]) as u32,
            weights: members.len() as u32,
            score,
            cost: members.iter().map(|index| self.cost(*index)).sum(),
        }
    }

    fn pool_of(&self, index: usize) -> usize {
        match self.pools.len() {
            1 => 0,
            _ => self.pools.partition_point(|pool| pool.range.end <= index),
        }
    }

    fn cost(&self, index: usize) -> f64 {
        let cost = |operations: &Operations| f64::from(operations.cost[index]);
        self.operations.as_ref().map_or(0.0, cost)
    }
}

/// `count` times `expansion`, but not above `limit`.
fn expand(count: usize, expansion: f64, limit: usize) -> usize {
    ((count as f64 * expansion).round() as usize).min(limit)
}

/// Which units these are.
fn ids(units: &[Unit]) -> Vec<u32> {
    units.iter().map(|unit| unit.id).collect()
}

/// Index of the set that holds each of `parameters` weights.
fn membership(sets: &[Vec<usize>], parameters: usize) -> Vec<u32> {
    let mut of = vec![0; parameters];
    for (id, set) in sets.iter().enumerate() {
        set.iter().for_each(|index| of[*index] = id as u32);
    }
    of
}
