//! A block-diagonal Fisher: each block of consecutive weights of one parameter is a regression of
//! its own; only the budget joins them.
//!
//! From the Gram matrix N = G_bᵀG_b of a block, with H = N_SS + 2λ I on its kept weights:
//!
//! ```text
//! H d = N_SP w₀_P − a·G_Sᵀ1         removing j costs w_j² / 2[H⁻¹]_jj
//! ```
//!
//! One block is in memory at a time, so that p may be as large as the gradient matrix allows.

use crate::error::PruneError;
use crate::feasible::Feasible;
use crate::gradient_matrix::{column, read};
use crate::layout::Layout;
use crate::problem::{Problem, narrow};
use crate::solution::Step;
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;
use crate::solver::factor::Symmetric;
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
    let lambda = problem.lambda();
    let indices: Vec<usize> = block.clone().collect();
    let columns = problem.gradients().columns(&indices);
    let size = indices.len();
    let transposed = columns.clone().transpose();
    let gram = read(transposed.clone().matmul(columns))?;
    let gram = |row: usize, column: usize| f64::from(gram[row * size + column]);
    // a·G_bᵀ1
    let shifts = match problem.first_order() {
        0.0 => vec![0.0; size],
        _ => {
            let shift: Vec<f64> = problem.shift().collect();
            read(transposed.matmul(column(&narrow(&shift), &problem.device())))?
        }
    };
    let dense = |local: usize| f64::from(problem.dense()[block.start + local]);
    let mut pruned: Vec<usize> = (0..size).collect();
    pruned.retain(|local| kept.binary_search(&(block.start + local)).is_err());
    // The parts of λ(tᵀu + ‖w₀_P‖²): ½‖t‖² − ½ rightᵀd + λ‖w₀_P‖², for t = G_P w₀_P − a·1.
    let mut fit = problem.squared_first_order();
    for row in &pruned {
        solved.objective += lambda * dense(*row).powi(2);
        fit -= 2.0 * dense(*row) * f64::from(shifts[*row]);
        let product: f64 = pruned
            .iter()
            .map(|column| gram(*row, *column) * dense(*column))
            .sum();
        fit += dense(*row) * product;
    }
    if !kept.is_empty() {
        let local: Vec<usize> = kept.iter().map(|index| index - block.start).collect();
        let right = local.iter().map(|row| {
            let product: f64 = pruned
                .iter()
                .map(|column| gram(*row, *column) * dense(*column))
                .sum();
            product - f64::from(shifts[*row])
        });
        let right: Vec<f64> = right.collect();
        let system = Symmetric::from_fn(local.len(), |row, column| {
            let ridge = if row == column { 2.0 * lambda } else { 0.0 };
            gram(local[row], local[column]) + ridge
        });
        let factor = system.factor(problem.l2())?;
        let change = factor.solve(&right);
        let pairs = right.iter().zip(&change);
        fit -= pairs.map(|(right, change)| right * change).sum::<f64>();
        let inverse = factor.inverse_diagonal();
        for ((index, change), inverse) in kept.iter().zip(narrow(&change)).zip(inverse) {
            let weight = problem.dense()[*index] + change;
            solved.weights[*index] = weight;
            solved
                .costs
                .push(f64::from(weight).powi(2) / (2.0 * inverse));
        }
    }
    // −½a²n undoes what completing the square with the first-order term adds.
    solved.objective += 0.5 * (fit - problem.squared_first_order());
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
            .map(move |start| start..end.min(start + block_size))
    };
    let layers = layout.layers().iter();
    Ok(layers.flat_map(|layer| of_layer(layer.range())).collect())
}
