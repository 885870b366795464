//! Values on a support, of all rows at once, by conjugate gradients.
//!
//! For a row with the support S the minimum solves H_SS w_S = g_S. Preconditioned by the diagonal of H,
//! an iteration is one product of H with all rows, whatever their supports
//! ([ALPS, Meng et al., 2024](https://arxiv.org/abs/2406.07831)); every one lowers the objective.

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatRef, get_global_parallelism};
use rayon::prelude::*;

use crate::{LayerProblem, Support};

/// Iterations at most.
const MOST_ITERATIONS: usize = 100;
/// The iterations end where one lowers the objective by this part of it.
const TOLERANCE: f64 = 1e-6;

/// Weights `[o, d]` on the support, from those given, which are 0 elsewhere.
pub(crate) fn conjugate(problem: &LayerProblem, support: &Support, start: Vec<f64>) -> Vec<f64> {
    let (o, d) = (problem.outputs(), problem.features());
    let diagonal: Vec<f64> = (0..d).map(|j| problem.hessian_row(j)[j]).collect();
    let mut weights = start;
    let mut product = Mat::<f64>::zeros(d, o);
    let times = |weights: &[f64], product: &mut Mat<f64>| {
        let weights = MatRef::from_column_major_slice(weights, d, o);
        let parallel = get_global_parallelism();
        let h = problem.matrix();
        matmul(product.as_mut(), Accum::Replace, h, weights, 1.0, parallel);
    };
    times(&weights, &mut product);
    // The residual g − Hw on the support.
    let mut residual: Vec<f64> = (0..o)
        .into_par_iter()
        .flat_map_iter(|row| {
            let product = product.col_as_slice(row).iter().zip(problem.linear(row));
            let pairs = product.zip(support.row(row));
            pairs.map(|((hw, g), kept)| if *kept { g - hw } else { 0.0 })
        })
        .collect();
    let over_diagonal = |residual: &[f64]| -> f64 {
        let pairs = residual.iter().zip(&diagonal);
        pairs.map(|(r, h)| r * r / h).sum()
    };
    let mut direction: Vec<f64> = residual
        .par_iter()
        .enumerate()
        .map(|(at, r)| r / diagonal[at % d])
        .collect();
    let mut energy: Vec<f64> = residual.par_chunks_exact(d).map(over_diagonal).collect();
    let mut objective = problem.value(&weights);
    for _ in 0..MOST_ITERATIONS {
        times(&direction, &mut product);
        let lowered: f64 = weights
            .par_chunks_exact_mut(d)
            .zip(residual.par_chunks_exact_mut(d))
            .zip(direction.par_chunks_exact_mut(d))
            .zip(energy.par_iter_mut())
            .enumerate()
            .map(|(row, (((weights, residual), direction), energy))| {
                let product = product.col_as_slice(row);
                let curvature: f64 = direction.iter().zip(product).map(|(p, hp)| p * hp).sum();
                if *energy <= 0.0 || curvature <= 0.0 {
                    return 0.0;
                }
                let step = *energy / curvature;
                let kept = support.row(row);
                for at in 0..d {
                    weights[at] += step * direction[at];
                    if kept[at] {
                        residual[at] -= step * product[at];
                    }
                }
                let lowered = 0.5 * step * *energy * problem.importance(row);
                let next = over_diagonal(residual);
                let turn = next / *energy;
                *energy = next;
                for at in 0..d {
                    direction[at] = residual[at] / diagonal[at] + turn * direction[at];
                }
                lowered
            })
            .sum();
        objective -= lowered;
        if lowered <= TOLERANCE * objective {
            break;
        }
    }
    weights
}
