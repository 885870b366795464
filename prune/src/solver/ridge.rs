//! The choice of the ridge by what the pruned model does on held-out batches.
//!
//! The ridge decides how far the kept weights may move away from the dense ones. Too small a ridge
//! trusts n samples about p weights, too large a ridge leaves the damage of pruning as it is; which
//! is which depends on the network, the samples and the sparsity. No formula is known to get it
//! right, trying does: the gradients are the same for every ridge, and they are what is expensive.

use serde::{Deserialize, Serialize};

use crate::error::PruneError;
use crate::model::checks;
use crate::problem::Problem;
use crate::problem::feasible::Feasible;
use crate::problem::solution::Solution;
use crate::solver::{Shared, SolverConfig, solve, solve_within};

/// How the ridge and the first-order term of a problem are chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RidgeChoice {
    /// This ridge on the normalised Fisher.
    Fixed(f64),
    /// The one of these whose solution is judged best. The earlier one wins a tie.
    Sweep(Vec<Ridge>),
}

/// One candidate of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ridge {
    /// Ridge on the normalised Fisher, above 0.
    pub value: f64,
    /// Factor of the first-order term; `None` for that of the problem.
    pub first_order: Option<f64>,
    /// Exponent of [`Problem::with_tempering`]; `None` for that of the problem.
    pub tempering: Option<f64>,
}

/// A candidate of a sweep, judged.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct JudgedRidge {
    /// The candidate.
    pub ridge: Ridge,
    /// What the judge said of its solution, for example the loss on held-out batches; smaller is
    /// better. NaN loses against every number, and stands for a ridge that is too small for a
    /// solution: [`PruneError::NotPositiveDefinite`].
    #[serde(with = "burn_lean_reparam::json::float")]
    pub loss: f64,
    /// The objective of its solution, NaN without one; not comparable between ridges.
    #[serde(with = "burn_lean_reparam::json::float")]
    pub objective: f64,
}

impl RidgeChoice {
    /// A sweep over 10⁻⁵, 10⁻⁴, ..., 1, with the first-order term of the problem.
    pub fn sweep() -> Self {
        Self::over([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    }

    /// Refuses a sweep over nothing, and numbers out of their range.
    pub(crate) fn check(&self) -> Result<(), PruneError> {
        let candidates = match self {
            Self::Fixed(value) => return checks::ridge(*value),
            Self::Sweep(candidates) => candidates,
        };
        let expected = "at least one candidate";
        checks::accept(!candidates.is_empty(), "ridge", "an empty sweep", expected)?;
        candidates.iter().try_for_each(|ridge| {
            checks::ridge(ridge.value)?;
            ridge.first_order.map_or(Ok(()), checks::first_order)?;
            ridge.tempering.map_or(Ok(()), checks::tempering)
        })
    }

    /// A sweep over these ridges, with the first-order term of the problem.
    pub fn over(candidates: impl IntoIterator<Item = f64>) -> Self {
        let candidates = candidates.into_iter().map(|value| Ridge {
            value,
            first_order: None,
            tempering: None,
        });
        Self::Sweep(candidates.collect())
    }
}

impl Default for RidgeChoice {
    fn default() -> Self {
        Self::sweep()
    }
}

/// The best solution of a sweep.
#[derive(Debug, Clone)]
pub struct RidgeSweep {
    /// The solution that was judged best.
    pub solution: Solution,
    /// Its ridge.
    pub chosen: Ridge,
    /// All candidates in their order; empty where the ridge is fixed.
    pub candidates: Vec<JudgedRidge>,
}

/// Solves the problem at each ridge and keeps the solution that `judge` likes best.
///
/// `judge` gets a solution and returns a loss: that of the model with these weights, on batches
/// that gave no gradients. It is not called for a fixed ridge.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{
///     Budget, GradientMatrix, Layout, Problem, RidgeChoice, SolverConfig, solve_with_ridge,
/// };
///
/// let device = Device::flex();
/// let gradients = Tensor::from_floats([[1., 1.]], &device);
/// let dense = Tensor::from_floats([1., 2.], &device);
/// let problem = Problem::new(
///     GradientMatrix::from_tensor(gradients)?,
///     dense,
///     Layout::anonymous(2),
/// )?;
/// let config = SolverConfig::new(Budget::Keep(1));
/// let choice = RidgeChoice::over([10.0, 0.001]);
/// // The kept weight takes over from the pruned one the more freely, the smaller the ridge is.
/// let sweep = solve_with_ridge(&problem, &config, &choice, &mut |solution| {
///     Ok((solution.weights.clone().sum().into_scalar::<f32>() as f64 - 3.0).abs())
/// })?;
/// assert_eq!(sweep.chosen.value, 0.001);
/// assert_eq!(sweep.candidates.len(), 2);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
///
/// # Errors
///
/// Those of [`solve`] and of `judge`; [`PruneError::InvalidConfig`] for a sweep over nothing.
/// [`PruneError::NotPositiveDefinite`] only where no ridge of a sweep is large enough,
/// [`PruneError::NaNLosses`] where every loss is NaN.
pub fn solve_with_ridge(
    problem: &Problem,
    config: &SolverConfig,
    choice: &RidgeChoice,
    judge: &mut dyn FnMut(&Solution) -> Result<f64, PruneError>,
) -> Result<RidgeSweep, PruneError> {
    choice.check()?;
    let candidates = match choice {
        RidgeChoice::Fixed(value) => {
            let chosen = Ridge {
                value: *value,
                first_order: None,
                tempering: None,
            };
            return Ok(RidgeSweep {
                solution: solve(&with_ridge(problem, chosen)?, config)?,
                chosen,
                candidates: Vec::new(),
            });
        }
        RidgeChoice::Sweep(candidates) => candidates,
    };
    let mut best: Option<(f64, Ridge, Solution)> = None;
    let mut judged = Vec::with_capacity(candidates.len());
    let mut singular = None;
    let feasible = Feasible::new(&config.pattern, &config.budget, problem.layout())?;
    // What depends on the gradients alone is made once for each exponent.
    let mut tempered: Vec<(Problem, Shared)> = Vec::new();
    for ridge in candidates {
        let exponent = ridge.tempering.unwrap_or(problem.tempering());
        let made = tempered
            .iter()
            .position(|(problem, _)| problem.tempering() == exponent);
        let made = match made {
            Some(made) => made,
            None => {
                let problem = problem.clone().with_tempering(exponent)?;
                tempered.push((problem, Shared::Yes(None)));
                tempered.len() - 1
            }
        };
        let (problem, shared) = &mut tempered[made];
        let problem = with_ridge(problem, *ridge)?;
        let solution = match solve_within(&problem, config, &feasible, shared) {
            Ok(solution) => solution,
            Err(error @ PruneError::NotPositiveDefinite { .. }) => {
                tracing::debug!(ridge = ridge.value, %error, "ridge");
                judged.push(JudgedRidge {
                    ridge: *ridge,
                    loss: f64::NAN,
                    objective: f64::NAN,
                });
                singular = Some(error);
                continue;
            }
            Err(error) => return Err(error),
        };
        let loss = judge(&solution)?;
        tracing::debug!(ridge = ridge.value, loss, "ridge");
        judged.push(JudgedRidge {
            ridge: *ridge,
            loss,
            objective: solution.objective,
        });
        // A NaN is neither below nor above.
        let wins = best
            .as_ref()
            .is_none_or(|(least, ..)| loss < *least || (least.is_nan() && !loss.is_nan()));
        if wins {
            best = Some((loss, *ridge, solution));
        }
    }
    match best {
        Some((loss, ..)) if loss.is_nan() => Err(PruneError::NaNLosses {
            candidates: judged.len(),
        }),
        Some((_, chosen, solution)) => Ok(RidgeSweep {
            solution,
            chosen,
            candidates: judged,
        }),
        // The sweep is not empty: none of its candidates had a solution.
        None => Err(singular.unwrap_or(PruneError::NoPrunableParameter)),
    }
}

/// The problem with another ridge and first-order term; the gradients are shared.
fn with_ridge(problem: &Problem, ridge: Ridge) -> Result<Problem, PruneError> {
    let problem = problem.clone().with_ridge(ridge.value)?;
    match ridge.first_order {
        Some(a) => problem.with_first_order(a),
        None => Ok(problem),
    }
}
