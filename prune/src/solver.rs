//! Chooses the weights to keep and finds their values.

mod back_solve;
mod chita;
mod clock;
mod dead;
mod factor;
mod working_set;

use burn::config::Config;

use crate::budget::Budget;
use crate::error::PruneError;
use crate::feasible::Feasible;
use crate::method::{ChitaConfig, Method};
use crate::problem::Problem;
use crate::solution::{Solution, Step, Termination};
use crate::sparsity::SparsityPattern;
use clock::Clock;
use dead::Dead;
use serde::{Deserialize, Serialize};

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
    /// What happens to weights that no gradient depends on. Default: pruned first.
    #[config(default = "DeadColumns::PrunedFirst")]
    pub dead_columns: DeadColumns,
    /// Consecutive weights in a block of a block-diagonal Fisher; `None` for the whole one.
    #[config(default = "None")]
    pub block_size: Option<usize>,
    /// Seed of the methods that use chance. Default 0.
    #[config(default = 0)]
    pub seed: u64,
}

/// What happens to weights whose column of the gradient matrix is zero.
///
/// They are often large: no gradient has moved them since initialization. The loss does not depend
/// on them, so that pruning them is free; the objective charges λw₀² all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeadColumns {
    /// They go before any other weight.
    PrunedFirst,
    /// They compete at the price that the ridge gives them. The objective is lower, the network
    /// usually worse.
    Priced,
}

/// Solves a problem.
///
/// # Errors
///
/// [`PruneError`] where budget and pattern do not fit the problem, where a system is singular to
/// working precision, and where the device fails.
pub fn solve(problem: &Problem, config: &SolverConfig) -> Result<Solution, PruneError> {
    let mut clock = Clock::start();
    let feasible = Feasible::new(&config.pattern, &config.budget, problem.layout())?;
    let dead = Dead::new(problem, config.dead_columns);
    match &config.method {
        Method::Chita(chita) => {
            let (weights, support, termination) =
                chita::chita(problem, &feasible, chita, &dead, &mut clock)?;
            clock.finish(problem, weights, support, Step::BackSolve, termination)
        }
        _ => {
            let scores: Vec<f64> = problem.dense().iter().map(|w| f64::from(w.abs())).collect();
            let all: Vec<usize> = (0..problem.parameters()).collect();
            let support = feasible.select(&all, &dead.demote(&all, scores), 1.0)?;
            let weights = back_solve::back_solve(problem, &support)?;
            clock.finish(
                problem,
                weights,
                support,
                Step::BackSolve,
                Termination::Completed,
            )
        }
    }
}
