//! Coordinate descent on a fixed support.
//!
//! ```text
//! w_j ← (a_jᵀ(r − a·1) + ‖a_j‖² w_j + 2λ w₀_j) / (‖a_j‖² + 2λ),    r ← r − (w_j' − w_j) a_j
//! ```
//!
//! from the residual r of the *sparse* weights, in F64. It is sequential: the columns come to the
//! host, a chunk at a time.

use burn::tensor::Tensor;

use crate::error::PruneError;
use crate::host::read;
use crate::problem::Problem;
use crate::problem::solution::Step;
use crate::solver::clock::Clock;

/// Improves `weights` `[p]` on `support` (ascending) by this many sweeps over it.
pub(crate) fn coordinate_descent(
    problem: &Problem,
    support: &[usize],
    weights: &mut [f32],
    sweeps: usize,
    clock: &mut Clock,
) -> Result<(), PruneError> {
    let mut residual = problem.residual_at(&problem.change(weights))?;
    for _ in 0..sweeps {
        for chunk in problem.gradients().chunks(support) {
            let (first, columns) = chunk?;
            let indices = &support[first..first + columns.dims()[1]];
            sweep(problem, indices, columns, weights, &mut residual)?;
        }
        let objective = problem.objective_from(&problem.change(weights), &residual);
        clock.note(Step::CoordinateDescent, objective.total(), support.len());
    }
    Ok(())
}

/// One update of each weight of `indices`, whose columns are `columns`.
fn sweep(
    problem: &Problem,
    indices: &[usize],
    columns: Tensor<2>,
    weights: &mut [f32],
    residual: &mut [f64],
) -> Result<(), PruneError> {
    let ridge = 2.0 * problem.lambda();
    let columns = read(columns.transpose())?;
    let shift: Vec<f64> = problem.shift().collect();
    for (index, column) in indices.iter().zip(columns.chunks_exact(residual.len())) {
        let norm: f64 = column.iter().map(|value| f64::from(*value).powi(2)).sum();
        let rows = column.iter().zip(residual.iter().zip(&shift));
        let slope: f64 = rows
            .map(|(value, (residual, shift))| f64::from(*value) * (residual - shift))
            .sum();
        let old = f64::from(weights[*index]);
        let dense = f64::from(problem.dense()[*index]);
        // Rounded first, so that the residual belongs to the weight that is stored.
        let new = ((slope + norm * old + ridge * dense) / (norm + ridge)) as f32;
        weights[*index] = new;
        let step = f64::from(new) - old;
        for (residual, value) in residual.iter_mut().zip(column) {
            *residual -= step * f64::from(*value);
        }
    }
    Ok(())
}
