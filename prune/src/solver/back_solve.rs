//! The exact minimum on a given support.
//!
//! With P the pruned set, d = w_S − w₀_S minimises ½‖t − G_S d‖² + λ‖d‖² for t = G_P w₀_P − a·1,
//! so that
//!
//! ```text
//! n < |S|:  d = G_Sᵀ u,  (2λ I + G_S G_Sᵀ) u = t       n x n, the dual form (Woodbury)
//! n ≥ |S|:  (2λ I + G_Sᵀ G_S) d = G_Sᵀ t               |S| x |S|, the normal equations
//! ```
//!
//! Both are right at any ridge. The textbook form b/2λ − G_Sᵀ(…)/4λ² for w_S itself subtracts two
//! nearly equal vectors, and F32 loses it where λ is small.

use crate::error::PruneError;
use crate::gradient_matrix::{column, read};
use crate::problem::{Problem, narrow};
use crate::solver::factor::Symmetric;
use crate::solver::operator::Operator;
use crate::solver::working_set::{Solved, WorkingSet};

/// Part of the objective that [`refine`] may leave above its minimum.
const REFINED: f64 = 1e-6;
/// Residual of the dual system, relative to its right side, that F32 products do not tell from 0.
const ROUNDING: f64 = 1e-6;
/// Conjugate gradient steps before [`refine`] gives up.
const DUAL_ITERATIONS: usize = 20;

/// The weights `[p]` that minimise the objective among those with this support (ascending).
pub(crate) fn back_solve(problem: &Problem, support: &[usize]) -> Result<Vec<f32>, PruneError> {
    let gradients = problem.gradients();
    let target = target(problem, support, |kept| {
        gradients.multiply_at(support, kept)
    })?;
    let change = match problem.samples() < support.len() {
        true => dual(problem, support, &target)?,
        false => normal(problem, support, &target)?,
    };
    Ok(scatter(problem, support, &change))
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

fn dual(problem: &Problem, support: &[usize], target: &[f64]) -> Result<Vec<f32>, PruneError> {
    let gradients = problem.gradients();
    let mut system = Symmetric::ridge(target.len(), problem.lambda())?;
    for (_, columns) in gradients.chunks(support) {
        system.add_gram(1.0, &columns)?;
    }
    let dual = system.factor(problem.l2())?.solve(target);
    let dual = column(&narrow(&dual), &problem.device()).transpose();
    let mut change = Vec::with_capacity(support.len());
    for (_, columns) in gradients.chunks(support) {
        change.extend(read(dual.clone().matmul(columns))?);
    }
    Ok(change)
}

fn normal(problem: &Problem, support: &[usize], target: &[f64]) -> Result<Vec<f32>, PruneError> {
    let columns = problem.gradients().columns(support);
    let transposed = columns.clone().transpose();
    let target = column(&narrow(target), &problem.device());
    let right = read(transposed.clone().matmul(target))?;
    let right: Vec<f64> = right.into_iter().map(f64::from).collect();
    let mut system = Symmetric::ridge(support.len(), problem.lambda())?;
    system.add_gram(1.0, &transposed)?;
    Ok(narrow(&system.factor(problem.l2())?.solve(&right)))
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
    let support = set.support();
    let operator = Operator::new(problem, support);
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
            return Ok((weights, objective));
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
    // Rounding in F32 can keep the residual above the bound; the exact system has no such limit.
    let weights = back_solve(problem, support)?;
    let objective = problem.objective_at(&weights)?.total();
    Ok((weights, objective))
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
