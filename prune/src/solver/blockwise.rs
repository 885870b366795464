//! A block-diagonal Fisher: each block of consecutive weights of one parameter is a regression of
//! its own; only the budget joins them.
//!
//! What each block keeps is re-solved in the smaller of two systems, as many unknowns as samples or as
//! kept weights ([`exact`](super::exact)).
//!
//! One block is in memory at a time, so that p may be as large as the gradient matrix allows.

use crate::error::PruneError;
use crate::fisher::gradient_matrix::add_product;
use crate::model::layout::Layout;
use crate::problem::feasible::Feasible;
use crate::problem::solution::Step;
use crate::problem::{Problem, narrow};
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;
use crate::solver::exact::Exact;
use crate::solver::scores::magnitude;

/// How a blockwise search shrinks its support.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shrinking {
    pub(crate) block_size: usize,
    /// The first support, as a multiple of k; 1 where there are no stages.
    pub(crate) expansion: f64,
    pub(crate) stages: usize,
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
    let mut support = feasible.select(&all, &scores, expansion)?;
    let mut solved = solve(problem, &blocks, &support)?;
    clock.note(Step::Start, solved.objective, support.len());
    for stage in 1..=shrinking.stages {
        let costs = dead.demote(&support, solved.costs);
        let left = expansion.powf(1.0 - stage as f64 / shrinking.stages as f64);
        support = feasible.select(&support, &costs, left)?;
        solved = solve(problem, &blocks, &support)?;
        clock.note(Step::Shrink, solved.objective, support.len());
    }
    Ok((solved.weights, support))
}

/// All blocks, solved.
struct Solved {
    /// `[p]`
    weights: Vec<f32>,
    /// What removing each weight of the support costs, in its order.
    costs: Vec<f64>,
    /// Objective of the block-diagonal problem.
    objective: f64,
}

fn solve(
    problem: &Problem,
    blocks: &[std::ops::Range<usize>],
    support: &[usize],
) -> Result<Solved, PruneError> {
    let mut solved = Solved {
        weights: vec![0.0; problem.parameters()],
        costs: Vec::with_capacity(support.len()),
        // αᵀw₀; what each block adds is measured from there.
        objective: problem.linear_of_dense(),
    };
    let mut first = 0;
    for block in blocks {
        let last = first + support[first..].partition_point(|index| *index < block.end);
        solve_block(problem, block.clone(), &support[first..last], &mut solved)?;
        first = last;
    }
    Ok(solved)
}

/// Adds the solution of one block whose kept weights are `kept`.
fn solve_block(
    problem: &Problem,
    block: std::ops::Range<usize>,
    kept: &[usize],
    solved: &mut Solved,
) -> Result<(), PruneError> {
    let mut pruned = problem.dense()[block.clone()].to_vec();
    kept.iter()
        .for_each(|index| pruned[index - block.start] = 0.0);
    let mut target: Vec<f64> = problem.shift().map(|a| -a).collect();
    let columns = problem.gradients().range(block);
    add_product(&mut target, 1.0, &columns, &pruned)?;
    let square = |value: &f32| f64::from(*value).powi(2);
    solved.objective += problem.lambda() * pruned.iter().map(square).sum::<f64>();
    solved.objective += match kept.is_empty() {
        true => 0.5 * target.iter().map(|value| value * value).sum::<f64>(),
        false => {
            let exact = Exact::solve(problem, kept, &target)?;
            for (index, change) in kept.iter().zip(narrow(&exact.change)) {
                solved.weights[*index] = problem.dense()[*index] + change;
            }
            let weights: Vec<f64> = kept
                .iter()
                .map(|index| f64::from(solved.weights[*index]))
                .collect();
            let costs = exact.removal_costs(problem, kept, &weights)?;
            solved.costs.extend(costs);
            exact.value
        }
    };
    // −½a²n undoes what completing the square with the first-order term adds.
    solved.objective -= 0.5 * problem.squared_first_order();
    Ok(())
}

/// Consecutive weights of one parameter, `block_size` each; the last one of a parameter may have
/// fewer.
fn blocks(layout: &Layout, block_size: usize) -> Result<Vec<std::ops::Range<usize>>, PruneError> {
    if block_size == 0 {
        return Err(PruneError::InvalidConfig {
            field: "block_size",
            value: "0".into(),
            expected: "at least 1",
        });
    }
    let of_layer = |range: std::ops::Range<usize>| {
        let end = range.end;
        range
            .step_by(block_size)
            .map(move |start| start..end.min(start.saturating_add(block_size)))
    };
    let layers = layout.layers().iter();
    Ok(layers.flat_map(|layer| of_layer(layer.range())).collect())
}
