//! A block-diagonal Fisher: each block of consecutive weights of one parameter is a regression of
//! its own; only the budget joins them.
//!
//! What each block keeps is re-solved in the smaller of two systems, as many unknowns as samples or as
//! kept weights ([`exact`](super::exact)).
//!
//! One block is in memory at a time, so that p may be as large as the gradient matrix allows.

use std::ops::Range;
use std::sync::Arc;

use crate::error::PruneError;
use crate::fisher::gradient_matrix::{add_product, column};
use crate::host::read;
use crate::model::checks::accept;
use crate::model::layout::Layout;
use crate::problem::feasible::Feasible;
use crate::problem::solution::Step;
use crate::problem::{Problem, narrow};
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;
use crate::solver::exact::Exact;
use crate::solver::scores::magnitude;
use crate::solver::splicing::{Appraisal, Rounds, Spliceable, splice};

/// How a blockwise search shrinks its support.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shrinking {
    pub(crate) block_size: usize,
    /// The first support, as a multiple of k; 1 where there are no stages.
    pub(crate) expansion: f64,
    pub(crate) stages: usize,
    /// Rounds of splicing after them.
    pub(crate) splices: usize,
}

/// The weights `[p]` and their support.
pub(crate) fn blockwise(
    problem: &Problem,
    feasible: &Feasible,
    shrinking: Shrinking,
    dead: &Dead,
    clock: &mut Clock,
) -> Result<(Vec<f32>, Vec<usize>), PruneError> {
    let blocks = blocks(problem.layout(), shrinking.block_size)?;
    let all: Vec<usize> = (0..problem.parameters()).collect();
    let scores = dead.demote(&all, magnitude(problem));
    // Without a stage nothing shrinks: the first support is the last.
    let expansion = match shrinking.stages {
        0 => 1.0,
        _ => shrinking.expansion.min(feasible.share()).max(1.0),
    };
    let support = feasible.select(&all, &scores, expansion)?;
    let mut solved = Blocks::solve(problem, &blocks, support)?;
    clock.note(Step::Start, solved.objective(), solved.support.len());
    for stage in 1..=shrinking.stages {
        let costs = dead.demote(&solved.support, solved.removal_costs()?);
        let left = expansion.powf(1.0 - stage as f64 / shrinking.stages as f64);
        let kept = feasible.select(&solved.support, &costs, left)?;
        solved = solved.narrowed(kept)?;
        clock.note(Step::Shrink, solved.objective(), solved.support.len());
    }
    let rounds = Rounds {
        most: shrinking.splices,
        zero: problem.linear_of_dense() - 0.5 * blocks.len() as f64 * problem.squared_first_order(),
    };
    let solved = solved.filled(feasible, dead)?;
    let solved = splice(solved, feasible, &rounds, dead, clock)?;
    let solved = solved.filled(feasible, dead)?;
    let weights = solved.weights();
    Ok((weights, solved.support))
}

/// All blocks, solved on a support.
struct Blocks<'a> {
    problem: &'a Problem,
    ranges: &'a [Range<usize>],
    /// Ascending.
    support: Vec<usize>,
    /// One for each range.
    blocks: Vec<Arc<Block>>,
}

/// One block, solved.
struct Block {
    /// The kept weights, in the order of the support.
    weights: Vec<f32>,
    /// What removing each of them costs.
    costs: Vec<f64>,
    /// What the block adds to the objective.
    value: f64,
}

impl<'a> Blocks<'a> {
    fn solve(
        problem: &'a Problem,
        ranges: &'a [Range<usize>],
        support: Vec<usize>,
    ) -> Result<Self, PruneError> {
        let parts = parts(ranges, &support);
        let blocks = ranges.iter().zip(parts);
        let blocks = blocks.map(|(range, kept)| {
            let block = Block::solve(problem, range.clone(), &support[kept])?;
            Ok(Arc::new(block))
        });
        Ok(Self {
            problem,
            ranges,
            blocks: blocks.collect::<Result<_, PruneError>>()?,
            support,
        })
    }

    /// With the pruned weights that the budget has room for, as [`filled`](super::filling::filled) has them.
    fn filled(self, feasible: &Feasible, dead: &Dead) -> Result<Self, PruneError> {
        if feasible
            .fitting(&self.support)
            .iter()
            .all(|index| dead.contains(*index))
        {
            return Ok(self);
        }
        let Appraisal {
            candidates, gains, ..
        } = self.appraise()?.without(dead);
        let entering = feasible.fill(&self.support, &candidates, &gains);
        match entering.is_empty() {
            true => Ok(self),
            false => self.widened(&entering),
        }
    }

    /// On another support; blocks that keep the same weights as before are not solved again.
    fn moved(&self, support: Vec<usize>) -> Result<Self, PruneError> {
        let before = parts(self.ranges, &self.support);
        let parts = parts(self.ranges, &support).into_iter().zip(before);
        let blocks = self.ranges.iter().zip(&self.blocks).zip(parts);
        let blocks = blocks.map(|((range, block), (after, before))| {
            match support[after.clone()] == self.support[before] {
                true => Ok(block.clone()),
                false => Block::solve(self.problem, range.clone(), &support[after]).map(Arc::new),
            }
        });
        Ok(Self {
            problem: self.problem,
            ranges: self.ranges,
            blocks: blocks.collect::<Result<_, PruneError>>()?,
            support,
        })
    }

    /// The weights `[p]`.
    fn weights(&self) -> Vec<f32> {
        let mut weights = vec![0.0; self.problem.parameters()];
        let kept = self.blocks.iter().flat_map(|block| &block.weights);
        let pairs = self.support.iter().zip(kept);
        pairs.for_each(|(index, weight)| weights[*index] = *weight);
        weights
    }
}

impl Spliceable for Blocks<'_> {
    fn support(&self) -> &[usize] {
        &self.support
    }

    /// That of the block-diagonal problem.
    fn objective(&self) -> f64 {
        // αᵀw₀; what each block adds is measured from there.
        let values = self.blocks.iter().map(|block| block.value);
        self.problem.linear_of_dense() + values.sum::<f64>()
    }

    fn appraise(&self) -> Result<Appraisal, PruneError> {
        let mut appraisal = Appraisal {
            costs: self.removal_costs()?,
            candidates: Vec::with_capacity(self.problem.parameters() - self.support.len()),
            gains: Vec::with_capacity(self.problem.parameters() - self.support.len()),
        };
        let parts = parts(self.ranges, &self.support);
        for ((range, block), kept) in self.ranges.iter().zip(&self.blocks).zip(parts) {
            let kept = &self.support[kept];
            let gains = block.gains(self.problem, range.clone(), kept)?;
            for (index, gain) in range.clone().zip(gains) {
                if kept.binary_search(&index).is_err() {
                    appraisal.candidates.push(index);
                    appraisal.gains.push(gain);
                }
            }
        }
        Ok(appraisal)
    }

    fn widened(&self, entering: &[usize]) -> Result<Self, PruneError> {
        let mut support = self.support.clone();
        support.extend(entering);
        support.sort_unstable();
        self.moved(support)
    }

    fn removal_costs(&self) -> Result<Vec<f64>, PruneError> {
        let costs = self.blocks.iter().flat_map(|block| &block.costs);
        Ok(costs.copied().collect())
    }

    fn narrowed(self, kept: Vec<usize>) -> Result<Self, PruneError> {
        self.moved(kept)
    }
}

impl Block {
    /// The minimum where `kept` (ascending) remain.
    fn solve(problem: &Problem, range: Range<usize>, kept: &[usize]) -> Result<Self, PruneError> {
        let mut pruned = problem.dense()[range.clone()].to_vec();
        kept.iter()
            .for_each(|index| pruned[index - range.start] = 0.0);
        let mut target: Vec<f64> = problem.shift().map(|a| -a).collect();
        let columns = problem.gradients().range(range)?;
        add_product(&mut target, 1.0, &columns, &pruned)?;
        let square = |value: &f32| f64::from(*value).powi(2);
        let ridge = problem.lambda() * pruned.iter().map(square).sum::<f64>();
        // −½a²n undoes what completing the square with the first-order term adds.
        let value = ridge - 0.5 * problem.squared_first_order();
        if kept.is_empty() {
            return Ok(Self {
                weights: Vec::new(),
                costs: Vec::new(),
                value: value + 0.5 * target.iter().map(|value| value * value).sum::<f64>(),
            });
        }
        let exact = Exact::solve(problem, kept, &target)?;
        let pairs = kept.iter().zip(narrow(&exact.change));
        let weights: Vec<f32> = pairs
            .map(|(index, change)| problem.dense()[*index] + change)
            .collect();
        let wide: Vec<f64> = weights.iter().map(|weight| f64::from(*weight)).collect();
        Ok(Self {
            costs: exact.removal_costs(problem, kept, &wide)?,
            value: value + exact.value,
            weights,
        })
    }

    /// What each weight of the block gains, if it were the only one to move from here:
    /// g² / 2(‖a‖² + 2λ), a bound from below of what it gains with the others solved for again.
    fn gains(
        &self,
        problem: &Problem,
        range: Range<usize>,
        kept: &[usize],
    ) -> Result<Vec<f64>, PruneError> {
        let mut change: Vec<f32> = problem.dense()[range.clone()].iter().map(|w| -w).collect();
        let first = range.start;
        for (index, weight) in kept.iter().zip(&self.weights) {
            change[index - first] += weight;
        }
        let columns = problem.gradients().range(range)?;
        let mut residual: Vec<f64> = problem.shift().collect();
        add_product(&mut residual, 1.0, &columns, &change)?;
        let row = column(&narrow(&residual), &columns.device()).transpose();
        let products = read(row.matmul(columns.clone()))?;
        let norms = read((columns.clone() * columns).sum_dim(0))?;
        let pull = 2.0 * problem.lambda();
        let all = products.into_iter().zip(norms).zip(change);
        let gain = |((product, norm), change): ((f32, f32), f32)| {
            let gradient = f64::from(product) + pull * f64::from(change);
            gradient.powi(2) / (2.0 * (f64::from(norm) + pull))
        };
        Ok(all.map(gain).collect())
    }
}

/// Which part of a support (ascending) lies in each range.
fn parts(ranges: &[Range<usize>], support: &[usize]) -> Vec<Range<usize>> {
    let mut first = 0;
    let part = |range: &Range<usize>| {
        let last = first + support[first..].partition_point(|index| *index < range.end);
        std::mem::replace(&mut first, last)..last
    };
    ranges.iter().map(part).collect()
}

/// Consecutive weights of one parameter, `block_size` each; the last one of a parameter may have
/// fewer.
fn blocks(layout: &Layout, block_size: usize) -> Result<Vec<Range<usize>>, PruneError> {
    accept(block_size > 0, "block_size", 0, "at least 1")?;
    let of_layer = |range: Range<usize>| {
        let end = range.end;
        range
            .step_by(block_size)
            .map(move |start| start..end.min(start.saturating_add(block_size)))
    };
    let layers = layout.layers().iter();
    Ok(layers.flat_map(|layer| of_layer(layer.range())).collect())
}
