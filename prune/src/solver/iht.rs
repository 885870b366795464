//! Iterative hard thresholding over an active set.
//!
//! ```text
//! w ← the k largest dense weights;  A ← the 1.5 k largest
//! repeat:
//!     repeat: w ← P_k(w − t ∇f(w)) over A, t from the line search, until f stalls
//!     one such step over all weights; stop unless it brings in a weight from outside of A
//!     A ← A and the new weights
//! ```
//!
//! References: [Blumensath & Davies, 2009](https://arxiv.org/abs/0805.0510); line search and active
//! set as in [Benbaki et al., 2023](https://arxiv.org/abs/2302.14623), sections 3.1 and 3.2.

use crate::error::PruneError;
use crate::problem::Problem;
use crate::problem::feasible::Feasible;
use crate::problem::solution::{Step, Termination};
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;
use crate::solver::line_search::{change_step, optimal_step};
use crate::solver::method::IhtConfig;
use crate::solver::operator::Operator;
use crate::solver::scores::magnitude;

/// Doublings of the step beyond the first change of the support.
const DOUBLINGS: usize = 5;
/// Halvings of the step where the end of the first piece is not known.
const HALVINGS: usize = 10;

/// A point of the iteration.
#[derive(Debug, Clone)]
struct Point {
    /// `[p]`
    weights: Vec<f32>,
    /// Ascending.
    support: Vec<usize>,
    /// y − G w
    residual: Vec<f64>,
    objective: f64,
}

/// The weights `[p]`, their support, and why the search ended.
pub(crate) fn iht(
    problem: &Problem,
    feasible: &Feasible,
    config: &IhtConfig,
    dead: &Dead,
    clock: &mut Clock,
) -> Result<(Vec<f32>, Vec<usize>, Termination), PruneError> {
    let all: Vec<usize> = (0..problem.parameters()).collect();
    let scores = dead.demote(&all, magnitude(problem));
    let first = feasible.select(&all, &scores, 1.0)?;
    let mut active = feasible.select(&all, &scores, config.active_set)?;
    let mut point = at_dense(problem, first)?;
    clock.note(Step::Start, point.objective, point.support.len());
    let mut left = config.max_iterations;
    loop {
        let operator = Operator::new(problem, &active)?;
        loop {
            if left == 0 {
                return Ok((point.weights, point.support, Termination::MaxIterations));
            }
            left -= 1;
            let old = point.objective;
            let Some(next) = step(problem, feasible, &operator, &active, &point, dead)? else {
                break;
            };
            point = next;
            clock.note(Step::HardThreshold, point.objective, point.support.len());
            // Of the sum of squares: the linear term is of any size.
            if old - point.objective <= config.tolerance * (old - problem.completed_square()) {
                break;
            }
        }
        let operator = Operator::new(problem, &all)?;
        let Some(next) = step(problem, feasible, &operator, &all, &point, dead)? else {
            return Ok((point.weights, point.support, Termination::Converged));
        };
        let is_new = |index: &usize| active.binary_search(index).is_err();
        let entering: Vec<usize> = next.support.iter().copied().filter(is_new).collect();
        point = next;
        clock.note(Step::HardThreshold, point.objective, point.support.len());
        if entering.is_empty() {
            return Ok((point.weights, point.support, Termination::Converged));
        }
        active.extend(entering);
        active.sort_unstable();
    }
}

/// The dense weights on `support`.
fn at_dense(problem: &Problem, support: Vec<usize>) -> Result<Point, PruneError> {
    let mut weights = vec![0.0; problem.parameters()];
    support
        .iter()
        .for_each(|index| weights[*index] = problem.dense()[*index]);
    let change = problem.change(&weights);
    let residual = problem.residual_at(&change)?;
    let objective = problem.objective_from(&change, &residual).total();
    Ok(Point {
        weights,
        support,
        residual,
        objective,
    })
}

/// One projected gradient step over the weights `active`; `None` where no step length improves.
fn step(
    problem: &Problem,
    feasible: &Feasible,
    operator: &Operator<'_>,
    active: &[usize],
    point: &Point,
    dead: &Dead,
) -> Result<Option<Point>, PruneError> {
    let change = problem.change(&point.weights);
    let mut gradient = operator.transpose_multiply(&problem.shifted(&point.residual))?;
    let pull = 2.0 * problem.lambda() as f32;
    for (gradient, index) in gradient.iter_mut().zip(active) {
        *gradient += pull * change[*index];
    }
    let kept: Vec<bool> = active
        .iter()
        .map(|index| point.support.binary_search(index).is_ok())
        .collect();

    // The exact minimum on the present support.
    let on_support: Vec<f32> = gradient
        .iter()
        .zip(&kept)
        .map(|(gradient, kept)| if *kept { *gradient } else { 0.0 })
        .collect();
    let product = operator.multiply(&on_support)?;
    let curvature = product.iter().map(|value| value * value).sum();
    let optimal = optimal_step(&on_support, curvature, problem.lambda());

    let candidate = |length: f64| -> Result<Point, PruneError> {
        let moved: Vec<f32> = active
            .iter()
            .zip(&gradient)
            .map(|(index, gradient)| point.weights[*index] - length as f32 * gradient)
            .collect();
        let scores = moved
            .iter()
            .map(|weight| f64::from(*weight).powi(2))
            .collect();
        let support = feasible.select(active, &dead.demote(active, scores), 1.0)?;
        project(problem, operator, active, point, &moved, support)
    };
    let mut best: Option<Point> = None;
    let mut better = |next: Point| {
        let improves = next.objective < best.as_ref().map_or(point.objective, |b| b.objective);
        if improves {
            best = Some(next);
        }
        improves
    };
    let current: Vec<f32> = active.iter().map(|index| point.weights[*index]).collect();
    let change_at = match feasible.is_plain() {
        true => change_step(&current, &gradient, &kept),
        false => 0.0,
    };
    match optimal {
        Some(optimal) if optimal < change_at => {
            better(candidate(optimal)?);
        }
        _ if change_at > 0.0 && change_at.is_finite() => {
            let mut length = change_at / (1.0 + 1e-4);
            better(candidate(length)?);
            for _ in 0..DOUBLINGS {
                length *= 2.0;
                if !better(candidate(length)?) {
                    break;
                }
            }
        }
        _ => {
            // The first piece has no known end, or no length: go down from a step that is long.
            let mut length = 2.0 * optimal.unwrap_or(1.0 / (2.0 * problem.lambda()));
            for _ in 0..HALVINGS {
                if better(candidate(length)?) {
                    break;
                }
                length *= 0.5;
            }
        }
    }
    Ok(best)
}

/// The point with the values `moved` on `support` and zeros elsewhere.
fn project(
    problem: &Problem,
    operator: &Operator<'_>,
    active: &[usize],
    point: &Point,
    moved: &[f32],
    support: Vec<usize>,
) -> Result<Point, PruneError> {
    let mut weights = vec![0.0; problem.parameters()];
    let mut difference = vec![0.0; active.len()];
    for (position, index) in active.iter().enumerate() {
        if support.binary_search(index).is_ok() {
            weights[*index] = moved[position];
        }
        difference[position] = weights[*index] - point.weights[*index];
    }
    let product = operator.multiply(&difference)?;
    let residual: Vec<f64> = point
        .residual
        .iter()
        .zip(product)
        .map(|(r, g)| r - g)
        .collect();
    let change = problem.change(&weights);
    let objective = problem.objective_from(&change, &residual).total();
    Ok(Point {
        weights,
        support,
        residual,
        objective,
    })
}
