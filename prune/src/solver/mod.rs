//! Chooses the weights to keep and finds their values.

pub(crate) mod grid;
pub(crate) mod method;
pub(crate) mod ridge;

mod back_solve;
mod blockwise;
mod chita;
mod clock;
mod dead;
mod exact;
mod factor;
mod filling;
mod operator;
mod resident;
mod scores;
mod splicing;
mod tableau;
mod whole;
mod working_set;

pub use grid::config::{FirstCodes, GridConfig, LayerGrid};
pub use method::{ChitaConfig, Method};
pub use ridge::{JudgedRidge, Ridge, RidgeChoice, RidgeSweep, solve_with_ridge};

use burn::config::Config;

use crate::error::PruneError;
use crate::model::checks::accept;
use crate::problem::Problem;
use crate::problem::budget::Budget;
use crate::problem::feasible::Feasible;
use crate::problem::solution::{Solution, Step};
use crate::problem::sparsity::SparsityPattern;
use back_solve::{back_solve, scatter};
use blockwise::{Shrinking, blockwise};
use clock::Clock;
use dead::Dead;
use serde::{Deserialize, Serialize};
pub(crate) use working_set::Shared;

/// What to solve for, and how.
#[derive(Config, Debug, PartialEq)]
pub struct SolverConfig {
    /// How many weights, or operations, remain.
    pub budget: Budget,
    /// The shape of the zeros. Default: unstructured.
    #[config(default = "SparsityPattern::Unstructured")]
    pub pattern: SparsityPattern,
    /// How the support is chosen. Default: CHITA.
    #[config(default = "Method::Chita(ChitaConfig::new())")]
    pub method: Method,
    /// What happens to weights that no gradient depends on. Default: what the problem says, they are
    /// priced; in a [`PrunerConfig`](crate::PrunerConfig), whose purpose is the network, they are
    /// pruned first.
    #[config(default = "None")]
    pub dead_columns: Option<DeadColumns>,
    /// Consecutive weights in a block of a block-diagonal Fisher; `None`, the default, for the whole
    /// one.
    #[config(default = "None")]
    pub block_size: Option<usize>,
    /// Seed of the methods that use chance. Default 0.
    #[config(default = 0)]
    pub seed: u64,
    /// The grid that the kept weights are rounded to, with the same objective: for a model that is
    /// quantized, too. Default: none, they are real numbers.
    #[config(default = "None")]
    pub grid: Option<GridConfig>,
}

/// What happens to weights whose column of the gradient matrix is zero.
///
/// They are often large: no gradient has moved them since initialization. The loss does not depend
/// on them, so that pruning them is free; the objective charges λw₀² all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeadColumns {
    /// They go before any other weight.
    PrunedFirst,
    /// They compete at the price that the ridge gives them, as the objective says. It is lower, the
    /// network usually worse.
    Priced,
}

/// Solves a problem.
///
/// Systems are factored on the host, in F64: those of CHITA have as many unknowns as there are
/// samples, those of the exact values on a known support as many as samples or kept weights,
/// whichever are fewer. From twice as many samples as weights on, CHITA searches the same problem
/// over p + 1 rows, which are found with some n·p² operations, once for all ridges; not above 15,893
/// weights, where that would take more than 16 GiB.
///
/// # Errors
///
/// [`PruneError`] where budget and pattern do not fit the problem, where a system is singular to
/// working precision or does not fit, and where the device fails.
pub fn solve(problem: &Problem, config: &SolverConfig) -> Result<Solution, PruneError> {
    let feasible = Feasible::new(&config.pattern, &config.budget, problem.layout())?;
    solve_within(problem, config, &feasible, &mut Shared::No)
}

/// [`solve`] over supports that need not be those of the config's budget and pattern.
pub(crate) fn solve_within(
    problem: &Problem,
    config: &SolverConfig,
    feasible: &Feasible,
    shared: &mut Shared,
) -> Result<Solution, PruneError> {
    let mut clock = Clock::start();
    check(config)?;
    let dead = Dead::new(problem, config.dead_columns.unwrap_or(DeadColumns::Priced));
    let by_score = |scores: Vec<f64>| {
        let all: Vec<usize> = (0..problem.parameters()).collect();
        feasible.select(&all, &dead.demote(&all, scores), 1.0)
    };
    let mut in_blocks = |shrinking| {
        let (weights, support) = blockwise(problem, feasible, shrinking, &dead, &mut clock)?;
        Ok::<_, PruneError>((weights, support, Step::BackSolve))
    };
    let (weights, support, step) = match &config.method {
        Method::Random => dense(problem, by_score(scores::random(problem, config.seed))?),
        Method::Magnitude => dense(problem, by_score(scores::magnitude(problem))?),
        Method::DiagonalFisher => dense(problem, by_score(scores::diagonal_fisher(problem)?)?),
        Method::WoodFisher { block_size } => in_blocks(Shrinking {
            block_size: *block_size,
            expansion: f64::INFINITY,
            stages: 1,
            splices: 0,
        })?,
        Method::BackSolve => match config.block_size {
            Some(block_size) => in_blocks(Shrinking {
                block_size,
                expansion: 1.0,
                stages: 0,
                splices: 0,
            })?,
            None => {
                let support = by_score(scores::magnitude(problem))?;
                let weights = back_solve(problem, &support)?;
                (weights, support, Step::BackSolve)
            }
        },
        Method::Chita(chita) => match config.block_size {
            Some(block_size) => in_blocks(Shrinking {
                block_size,
                expansion: chita.expansion,
                stages: chita.stages,
                splices: chita.max_splices,
            })?,
            None => {
                let few = problem.over_few_rows()?;
                let (weights, support) =
                    chita::chita(&few, feasible, chita, &dead, shared, &mut clock)?;
                (weights, support, Step::BackSolve)
            }
        },
    };
    let Some(grid) = &config.grid else {
        return clock.finish(problem, weights, support, step);
    };
    let start = (weights, support);
    let on_grid = grid::on_grid(problem, grid, start, &mut clock)?;
    let (weights, support) = (on_grid.weights, on_grid.support);
    let solution = clock.finish(problem, weights, support, Step::CodeDescent)?;
    let objective = on_grid.terms.total();
    let mut trace = solution.trace;
    if let Some(last) = trace.last_mut() {
        // In F64, as the points before.
        last.objective = objective;
    }
    Ok(Solution {
        objective,
        terms: on_grid.terms,
        rounded: Some(on_grid.rounded),
        trace,
        ..solution
    })
}

/// The dense weights on `support`.
fn dense(problem: &Problem, support: Vec<usize>) -> (Vec<f32>, Vec<usize>, Step) {
    let unchanged = vec![0.0; support.len()];
    let weights = scatter(problem, &support, &unchanged);
    (weights, support, Step::Start)
}

/// Refuses numbers outside of their range, and what a method would ignore.
pub(crate) fn check(config: &SolverConfig) -> Result<(), PruneError> {
    let at_least_one = |size: usize| accept(size > 0, "block_size", size, "at least 1");
    match &config.method {
        Method::Chita(chita) => {
            // NaN is below everything.
            let expansion = chita.expansion;
            accept(expansion >= 1.0, "expansion", expansion, "at least 1")?;
        }
        Method::WoodFisher { block_size } => at_least_one(*block_size)?,
        _ => {}
    }
    let is_refused = config.grid.is_none() && config.budget == Budget::All;
    let expected = "another one where there is no grid: nothing would be pruned";
    accept(!is_refused, "budget", "All", expected)?;
    let blocks = config.block_size.unwrap_or_default();
    let expected = "none with a grid, which has one Fisher for all weights";
    let is_whole = config.grid.is_none() || config.block_size.is_none();
    accept(is_whole, "block_size", blocks, expected)?;
    match (&config.method, config.block_size) {
        (_, None) => Ok(()),
        (Method::BackSolve | Method::Chita(_), Some(size)) => at_least_one(size),
        (_, Some(size)) => {
            let expected = "none, unless the method is BackSolve or Chita";
            accept(false, "block_size", size, expected)
        }
    }
}
