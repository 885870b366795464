//! A stage whose gradient matrix does not fit into memory: a block-diagonal Fisher.

use std::ops::Range;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::Tensor;

use crate::feasible::Feasible;
use crate::pruner::Solved;
use crate::{
    Batch, Budget, FisherReport, LayerKind, Layout, Objective, Problem, PruneError, PrunerConfig,
    Ridge, Selection, Solution, SolverConfig, SparsityPattern, Termination, solve,
};

/// Solves the problem block by block of [`FisherConfig::blocks`](crate::FisherConfig::blocks).
///
/// How many weights each block keeps is decided by magnitude over all of them, under the budget
/// and the pattern. The objective is the sum over the blocks.
#[allow(clippy::too_many_arguments)] // What a stage consists of; there is one caller.
pub(crate) fn solve_blocks<M: Module, B: Batch>(
    config: &PrunerConfig,
    solver: &SolverConfig,
    l2: f64,
    first_order: f64,
    selection: &Selection,
    model: &M,
    loss: &dyn Fn(&M, &B) -> Tensor<1>,
    batches: &[B],
    free: Option<Tensor<1>>,
) -> Result<Solved, PruneError> {
    let dense = selection.flatten(model)?;
    let kept = kept_by_magnitude(solver, selection, &dense)?;
    let blocks = config.fisher.blocks(selection)?;
    let mut whole = Whole::default();
    for columns in blocks {
        let layout = part_of(selection.layout(), &columns, &solver.pattern)?;
        let (fisher, _) = config.fisher.collect_free(
            model,
            selection,
            loss,
            batches.iter().cloned(),
            columns.clone(),
            free.clone(),
        )?;
        let weights = dense.clone().slice([columns.clone()]);
        let before = kept.partition_point(|index| *index < columns.start);
        let k = kept.partition_point(|index| *index < columns.end) - before;
        let start = Instant::now();
        let solution = match k {
            0 => Err(weights.zeros_like()),
            k if k == columns.len() => Err(weights),
            k => {
                let problem = Problem::new(fisher.gradients, weights, layout)?
                    .with_l2(l2)?
                    .with_first_order(first_order)?;
                let budget = match &solver.budget {
                    Budget::Pattern => Budget::Pattern,
                    _ => Budget::Keep(k),
                };
                Ok(solve(
                    &problem,
                    &SolverConfig {
                        budget,
                        ..solver.clone()
                    },
                )?)
            }
        };
        whole.seconds += start.elapsed().as_secs_f64();
        let all = k == columns.len();
        whole.add(columns, solution, all);
        whole.report(fisher.report);
    }
    whole.finish(l2)
}

/// The weights that magnitude alone would keep, ascending.
fn kept_by_magnitude(
    solver: &SolverConfig,
    selection: &Selection,
    dense: &Tensor<1>,
) -> Result<Vec<usize>, PruneError> {
    let feasible = Feasible::new(&solver.pattern, &solver.budget, selection.layout())?;
    let dense = crate::gradient_matrix::read(dense.clone())?;
    let scores: Vec<f64> = dense.iter().map(|weight| f64::from(weight.abs())).collect();
    let all: Vec<usize> = (0..dense.len()).collect();
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
    /// A solution, or the weights of a block in which nothing was to be chosen.
    fn add(&mut self, columns: Range<usize>, solved: Result<Solution, Tensor<1>>, all: bool) {
        let solution = match solved {
            Ok(solution) => solution,
            Err(weights) => {
                self.support.extend(columns.filter(|_| all));
                self.weights.push(weights);
                return;
            }
        };
        self.support
            .extend(solution.support.iter().map(|index| columns.start + index));
        self.weights.push(solution.weights);
        self.terms.fit += solution.terms.fit;
        self.terms.ridge += solution.terms.ridge;
        self.terms.linear += solution.terms.linear;
        self.relative_gap = self.relative_gap.max(solution.relative_gap);
        self.iterations += solution.iterations;
        self.termination = Some(solution.termination);
    }

    fn report(&mut self, block: FisherReport) {
        match &mut self.report {
            None => self.report = Some(block),
            Some(report) => {
                // What is held at a time, and the time of all.
                report.bytes = report.bytes.max(block.bytes);
                report.seconds += block.seconds;
                report.unreached.extend(block.unreached);
                report.zero_columns.extend(block.zero_columns);
            }
        }
    }

    fn finish(self, l2: f64) -> Result<Solved, PruneError> {
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
            },
            gradients: report,
            ridge: Ridge {
                l2,
                first_order: None,
                tempering: None,
            },
            ridges: Vec::new(),
            seconds: self.seconds,
        })
    }
}
