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

/// The weights `[p]` that minimise the objective among those with this support (ascending).
pub(crate) fn back_solve(problem: &Problem, support: &[usize]) -> Result<Vec<f32>, PruneError> {
    let target = target(problem, support)?;
    let change = match problem.samples() < support.len() {
        true => dual(problem, support, &target)?,
        false => normal(problem, support, &target)?,
    };
    let mut weights = vec![0.0; problem.parameters()];
    for (index, change) in support.iter().zip(change) {
        weights[*index] = problem.dense()[*index] + change;
    }
    Ok(weights)
}

/// t = G_P w₀_P − a·1.
pub(crate) fn target(problem: &Problem, support: &[usize]) -> Result<Vec<f64>, PruneError> {
    let mut pruned = problem.dense().to_vec();
    support.iter().for_each(|index| pruned[*index] = 0.0);
    let mut target = problem.gradients().multiply(&pruned)?;
    let a = problem.first_order();
    target.iter_mut().for_each(|value| *value -= a);
    Ok(target)
}

fn dual(problem: &Problem, support: &[usize], target: &[f64]) -> Result<Vec<f32>, PruneError> {
    let gradients = problem.gradients();
    let mut system = Symmetric::diagonal(target.len(), 2.0 * problem.lambda());
    for (_, columns) in gradients.chunks(support) {
        system.add(1.0, columns.clone().matmul(columns.transpose()))?;
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
    let mut system = Symmetric::diagonal(support.len(), 2.0 * problem.lambda());
    system.add(1.0, transposed.matmul(columns))?;
    Ok(narrow(&system.factor(problem.l2())?.solve(&right)))
}
