//! A stage whose gradient matrix does not fit into memory: a block-diagonal Fisher.

use std::ops::Range;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::Tensor;

use crate::fisher::plain_rows::unreached;
use crate::problem::budget::Pool;
use crate::problem::feasible::Feasible;
use crate::run::stage::Solved;
use crate::solver::{Dead, Shared, solve_within};
use crate::{
    Batch, Budget, DeadColumns, Groups, LayerKind, Layout, Problem, PruneError, PrunerConfig,
    Ridge, Selection, Solution, SolverConfig, SparsityPattern,
    fisher::FisherReport,
    problem::{Objective, Termination},
};

/// Solves the problem block by block of [`FisherConfig::blocks`](crate::FisherConfig::blocks).
///
/// How many weights each block keeps is decided by magnitude over all of them, under the budget
/// and the pattern; where the budget counts by layer or by operations, how many each layer of each
/// block keeps. Parameters that the loss does not depend on are pruned before all others. The
/// objective is the sum over the blocks.
#[allow(clippy::too_many_arguments)] // What a stage consists of; there is one caller.
pub(crate) fn solve_blocks<M: Module, B: Batch>(
    config: &PrunerConfig,
    solver: &SolverConfig,
    ridge: f64,
    first_order: f64,
    selection: &Selection,
    model: &M,
    loss: &dyn Fn(&M, &B) -> Tensor<1>,
    batches: &[B],
    free: Option<Tensor<1>>,
) -> Result<Solved, PruneError> {
    let dense = selection.flatten(model)?;
    let weights = selection.finite_weights(model)?;
    let unreached = match solver.dead_columns {
        Some(DeadColumns::PrunedFirst) => {
            unreached(model, selection, config.fisher.batch_size, loss, batches)?
        }
        _ => Vec::new(),
    };
    let kept = kept_by_magnitude(solver, selection.layout(), &weights, &unreached)?;
    let blocks = config.fisher.blocks(selection)?;
    let mut whole = Whole::default();
    for columns in blocks {
        let layout = part_of(selection.layout(), &columns, &solver.pattern)?;
        let solver = part_of_solver(solver, &columns)?;
        let (fisher, _) = config.fisher.collect_free(
            model,
            selection,
            loss,
            batches.iter().cloned(),
            columns.clone(),
            free.clone(),
        )?;
        let weights = dense.clone().slice([columns.clone()]);
        let pools = pools(&solver.budget, &layout, columns.start, &kept);
        let start = Instant::now();
        let problem = Problem::new(fisher.gradients, weights.clone(), layout)?
            .with_ridge(ridge)?
            .with_first_order(first_order)?;
        let solution = match pools.iter().map(|pool| pool.k).sum() {
            0 => unsolved(&problem, weights.zeros_like(), Vec::new())?,
            // Without the gradient of the loss, the dense weights are the minimum.
            k if k == columns.len() && first_order == 0.0 => {
                unsolved(&problem, weights, (0..k).collect())?
            }
            _ => {
                let feasible = Feasible::with_pools(&solver.pattern, pools, problem.layout())?;
                solve_within(&problem, &solver, &feasible, &mut Shared::No)?
            }
        };
        whole.seconds += start.elapsed().as_secs_f64();
        whole.add(columns.start, solution);
        whole.report(fisher.report);
    }
    whole.finish(ridge)
}

/// How many weights of a block are kept, of `kept` over all: in total, or in each of its layers
/// where the budget is about layers or operations.
fn pools(budget: &Budget, layout: &Layout, start: usize, kept: &[usize]) -> Vec<Pool> {
    let pool = |range: Range<usize>| {
        let before = |end: usize| kept.partition_point(|index| *index < start + end);
        Pool {
            k: before(range.end) - before(range.start),
            range,
        }
    };
    match budget {
        Budget::Sparsity(_) | Budget::Keep(_) | Budget::Pattern | Budget::All => {
            vec![pool(0..layout.len())]
        }
        _ => {
            let layers = layout.layers().iter();
            layers.map(|layer| pool(layer.range())).collect()
        }
    }
}

/// A block in which nothing is to be chosen.
fn unsolved(
    problem: &Problem,
    weights: Tensor<1>,
    support: Vec<usize>,
) -> Result<Solution, PruneError> {
    let terms = problem.objective(weights.clone())?;
    Ok(Solution {
        weights,
        support,
        objective: terms.total(),
        terms,
        relative_gap: 0.0,
        iterations: 0,
        termination: Termination::Completed,
        trace: Vec::new(),
        rounded: None,
    })
}

/// Refuses a pattern that the blocks cut apart.
pub(crate) fn check_blocks(
    solver: &SolverConfig,
    layout: &Layout,
    blocks: &[Range<usize>],
) -> Result<(), PruneError> {
    for columns in blocks {
        part_of(layout, columns, &solver.pattern)?;
        part_of_solver(solver, columns)?;
    }
    Ok(())
}

/// The config of the solver for some columns: what it says of single weights is about those.
fn part_of_solver(
    solver: &SolverConfig,
    columns: &Range<usize>,
) -> Result<SolverConfig, PruneError> {
    let mut part = solver.clone();
    if let SparsityPattern::Groups(Groups::Custom(groups)) = &mut part.pattern {
        groups.retain(|group| group.iter().any(|index| columns.contains(index)));
        for index in groups.iter_mut().flatten() {
            if !columns.contains(index) {
                return Err(PruneError::Infeasible {
                    reason: format!(
                        "weight {index} is in a group with weights of another block of the \
                         gradient matrix; a larger memory bound makes larger blocks"
                    ),
                });
            }
            *index -= columns.start;
        }
    }
    Ok(part)
}

/// The weights that magnitude alone would keep, ascending; unreached parameters go first.
fn kept_by_magnitude(
    solver: &SolverConfig,
    layout: &Layout,
    weights: &[f32],
    unreached: &[String],
) -> Result<Vec<usize>, PruneError> {
    let feasible = Feasible::new(&solver.pattern, &solver.budget, layout)?;
    let mut dead = vec![false; weights.len()];
    for layer in layout.layers() {
        dead[layer.range()].fill(unreached.contains(&layer.path));
    }
    // What is zero already goes before those.
    let zeros = dead.iter_mut().zip(weights);
    zeros.for_each(|(dead, weight)| *dead |= *weight == 0.0);
    let all: Vec<usize> = (0..weights.len()).collect();
    let magnitudes = weights.iter().map(|weight| f64::from(weight.abs()));
    let scores = Dead::first(dead).demote(&all, magnitudes.collect());
    feasible.select(&all, &scores, 1.0)
}

/// The layout of some columns; a parameter that is cut apart loses its shape.
fn part_of(
    layout: &Layout,
    columns: &Range<usize>,
    pattern: &SparsityPattern,
) -> Result<Layout, PruneError> {
    let mut part = Layout::new();
    for layer in layout.layers() {
        let range = layer.range();
        let (start, end) = (range.start.max(columns.start), range.end.min(columns.end));
        if start >= end {
            continue;
        }
        if end - start == layer.len() {
            part.push(
                layer.path.clone(),
                layer.shape.clone(),
                layer.kind,
                layer.flops_per_weight,
            );
        } else if *pattern == SparsityPattern::Unstructured {
            part.push(
                layer.path.clone(),
                [end - start],
                LayerKind::Other,
                layer.flops_per_weight,
            );
        } else {
            return Err(PruneError::Infeasible {
                reason: format!(
                    "the pattern needs `{}` in one block, which exceeds the memory bound of the \
                     gradient matrix",
                    layer.path
                ),
            });
        }
    }
    Ok(part)
}

/// The blocks put together.
#[derive(Default)]
struct Whole {
    weights: Vec<Tensor<1>>,
    support: Vec<usize>,
    terms: Objective,
    relative_gap: f64,
    iterations: usize,
    termination: Option<Termination>,
    report: Option<FisherReport>,
    seconds: f64,
}

impl Whole {
    fn add(&mut self, start: usize, solution: Solution) {
        let support = solution.support.iter().map(|index| start + index);
        self.support.extend(support);
        self.weights.push(solution.weights);
        self.terms.fit += solution.terms.fit;
        self.terms.ridge += solution.terms.ridge;
        self.terms.linear += solution.terms.linear;
        self.relative_gap = self.relative_gap.max(solution.relative_gap);
        self.iterations += solution.iterations;
        // What is true of one block need not be true of all; a block without a choice has no end.
        let ended = solution.termination;
        self.termination = match self.termination {
            _ if solution.iterations == 0 => self.termination,
            Some(before) if before != ended => Some(Termination::Completed),
            _ => Some(ended),
        };
    }

    fn report(&mut self, block: FisherReport) {
        match &mut self.report {
            None => self.report = Some(block),
            Some(report) => {
                // What is held at a time, and the time of all.
                report.bytes = report.bytes.max(block.bytes);
                report.seconds += block.seconds;
                for path in block.unreached {
                    // A parameter may lie in several blocks, one after the other.
                    if report.unreached.last() != Some(&path) {
                        report.unreached.push(path);
                    }
                }
                for (path, count) in block.zero_columns {
                    match report.zero_columns.last_mut() {
                        Some((last, sum)) if *last == path => *sum += count,
                        _ => report.zero_columns.push((path, count)),
                    }
                }
            }
        }
    }

    fn finish(self, ridge: f64) -> Result<Solved, PruneError> {
        let report = self.report.ok_or(PruneError::NoPrunableParameter)?;
        Ok(Solved {
            solution: Solution {
                weights: Tensor::cat(self.weights, 0),
                support: self.support,
                objective: self.terms.total(),
                terms: self.terms,
                relative_gap: self.relative_gap,
                iterations: self.iterations,
                termination: self.termination.unwrap_or(Termination::Completed),
                trace: Vec::new(),
                rounded: None,
            },
            gradients: report,
            ridge: Ridge {
                value: ridge,
                first_order: None,
                tempering: None,
            },
            ridges: Vec::new(),
            seconds: self.seconds,
        })
    }
}
