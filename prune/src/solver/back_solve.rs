//! The exact minimum on a given support, and how it is reached from what a search has.

use crate::error::PruneError;
use crate::problem::{Problem, narrow};
use crate::solver::exact::Exact;
use crate::solver::operator::Operator;
use crate::solver::working_set::{Shared, Solved, WorkingSet};

/// Part of the objective that [`refine`] may leave above its minimum.
const REFINED: f64 = 1e-6;
/// Residual of the dual system, relative to its right side, that F32 products do not tell from 0.
const ROUNDING: f64 = 1e-6;
/// Conjugate gradient steps before [`refine`] gives up.
const DUAL_ITERATIONS: usize = 20;

/// The weights `[p]` that minimise the objective among those with this support (ascending).
///
/// Of fewer samples than kept weights, by a system of F32 products that is refined, and in F64 where
/// that does not reach the minimum; of more, in F64.
pub(crate) fn back_solve(problem: &Problem, support: &[usize]) -> Result<Vec<f32>, PruneError> {
    // Nothing is pruned that was not 0 already: the dense weights are the minimum.
    let unchanged = scatter(problem, support, &vec![0.0; support.len()]);
    if problem.first_order() == 0.0 && unchanged == problem.dense() {
        return Ok(unchanged);
    }
    if problem.samples() < support.len()
        && let Some((weights, _)) = refined_anew(problem, support)?
    {
        return Ok(weights);
    }
    exact(problem, support)
}

fn refined_anew(
    problem: &Problem,
    support: &[usize],
) -> Result<Option<(Vec<f32>, f64)>, PruneError> {
    let set = WorkingSet::new(problem, support.to_vec(), 0.0, &mut Shared::No)?;
    match set.solve() {
        Ok(solved) => refined(problem, &set, &solved),
        // Of products in F32; in F64 it may well be.
        Err(PruneError::NotPositiveDefinite { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The minimum, in F64.
fn exact(problem: &Problem, support: &[usize]) -> Result<Vec<f32>, PruneError> {
    let gradients = problem.gradients();
    let target = target(problem, support, |kept| {
        gradients.multiply_at(support, kept)
    })?;
    let change = Exact::solve(problem, support, &target)?.change;
    Ok(scatter(problem, support, &narrow(&change)))
}

/// Whether t is better computed from the kept weights, y − G_S w₀_S − a·1, than from the pruned ones.
pub(crate) fn keeps_few(problem: &Problem, support: &[usize]) -> bool {
    2 * support.len() < problem.parameters()
}

/// t = G_P w₀_P − a·1 = y − G_S w₀_S − a·1, whichever reads less of G. `multiply` is the product
/// with G_S.
pub(crate) fn target(
    problem: &Problem,
    support: &[usize],
    multiply: impl FnOnce(&[f32]) -> Result<Vec<f64>, PruneError>,
) -> Result<Vec<f64>, PruneError> {
    if keeps_few(problem, support) {
        let dense = problem.dense();
        let kept: Vec<f32> = support.iter().map(|index| dense[*index]).collect();
        let product = multiply(&kept)?;
        let rows = problem.target().iter().zip(product).zip(problem.shift());
        return Ok(rows.map(|((y, kept), a)| y - kept - a).collect());
    }
    let product = product_of_pruned(problem, support)?.into_iter();
    Ok(product.zip(problem.shift()).map(|(t, a)| t - a).collect())
}

/// G_P w₀_P
pub(crate) fn product_of_pruned(
    problem: &Problem,
    support: &[usize],
) -> Result<Vec<f64>, PruneError> {
    let mut pruned = problem.dense().to_vec();
    support.iter().for_each(|index| pruned[*index] = 0.0);
    problem.gradients().multiply(&pruned)
}

/// The same minimum, by conjugate gradients on the dual system over all samples, from the factor of
/// a [`WorkingSet`] that has this support and leaves out samples; and the objective there.
///
/// The factor preconditions the rows that it has, 2λ the others, so that a few steps suffice; each
/// costs two products with G_S, the exact system n·|S| of them.
pub(crate) fn refine(
    problem: &Problem,
    set: &WorkingSet<'_>,
    solved: &Solved,
) -> Result<(Vec<f32>, f64), PruneError> {
    if let Some(found) = refined(problem, set, solved)? {
        return Ok(found);
    }
    // Rounding in F32 can keep the residual above the bound; the exact system has no such limit.
    let weights = exact(problem, set.support())?;
    let objective = problem.objective_at(&weights)?.total();
    Ok((weights, objective))
}

/// [`refine`] as far as F32 products can; `None` where they cannot.
fn refined(
    problem: &Problem,
    set: &WorkingSet<'_>,
    solved: &Solved,
) -> Result<Option<(Vec<f32>, f64)>, PruneError> {
    let support = set.support();
    let operator = Operator::new(problem, support)?;
    let target = target(problem, support, |kept| operator.multiply(kept))?;
    let ridge = 2.0 * problem.lambda();
    let precondition = |residual: &[f64]| match set.rows() {
        None => solved.factor.solve(residual),
        Some(rows) => {
            let kept: Vec<f64> = rows.iter().map(|row| residual[*row]).collect();
            let mut all: Vec<f64> = residual.iter().map(|value| value / ridge).collect();
            let solved = solved.factor.solve(&kept);
            rows.iter()
                .zip(solved)
                .for_each(|(row, value)| all[*row] = value);
            all
        }
    };
    let mut dual = precondition(&target);
    let mut change = operator.transpose_multiply(&dual)?;
    let product = operator.multiply(&change)?;
    let mut residual: Vec<f64> = (0..target.len())
        .map(|row| target[row] - ridge * dual[row] - product[row])
        .collect();
    // With e the error of u and r = K e, the objective is ½ eᵀ(K − 2λ)K e ≤ ½‖r‖² above its minimum.
    let objective = solved.objective - problem.completed_square();
    let bound = (2.0 * REFINED * objective).max(ROUNDING * ROUNDING * dot(&target, &target));
    let mut preconditioned = precondition(&residual);
    let mut direction = preconditioned.clone();
    let mut energy = dot(&residual, &preconditioned);
    for _ in 0..DUAL_ITERATIONS {
        if dot(&residual, &residual) <= bound {
            // t − G_S d = r + 2λ u
            let fit = residual.iter().zip(&dual).map(|(r, u)| r + ridge * u);
            let fit: f64 = fit.map(|value| 0.5 * value * value).sum();
            let weights = scatter(problem, support, &change);
            let square = |change: &f32| f64::from(*change).powi(2);
            let moved: f64 = problem.change(&weights).iter().map(square).sum();
            let objective = fit + problem.lambda() * moved + problem.completed_square();
            return Ok(Some((weights, objective)));
        }
        let step_change = operator.transpose_multiply(&direction)?;
        let product = operator.multiply(&step_change)?;
        let curvature = ridge * dot(&direction, &direction) + dot(&direction, &product);
        let length = energy / curvature;
        for row in 0..dual.len() {
            dual[row] += length * direction[row];
            residual[row] -= length * (ridge * direction[row] + product[row]);
        }
        for (change, step) in change.iter_mut().zip(step_change) {
            *change += length as f32 * step;
        }
        preconditioned = precondition(&residual);
        let next = dot(&residual, &preconditioned);
        let factor = next / energy;
        energy = next;
        for (direction, value) in direction.iter_mut().zip(&preconditioned) {
            *direction = value + factor * *direction;
        }
    }
    Ok(None)
}

/// The weights `[p]` of a change on the support.
pub(crate) fn scatter(problem: &Problem, support: &[usize], change: &[f32]) -> Vec<f32> {
    let mut weights = vec![0.0; problem.parameters()];
    for (index, change) in support.iter().zip(change) {
        weights[*index] = problem.dense()[*index] + change;
    }
    weights
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
