//! Supports of large layers: the objective and the constraint, split.
//!
//! With features scaled to a diagonal of ones, H = QΛQᵀ, and P the projection onto what may be kept
//! (the largest weights), the alternating direction method of multipliers repeats
//!
//! ```text
//! W ← (H + ρI)⁻¹ (G − V + ρD)     D ← P(W + V/ρ)     V ← V + ρ (W − D)
//! ```
//!
//! with a ρ that grows the slower, the less the support changes, until it no longer does
//! ([ALPS, Meng et al., 2024](https://arxiv.org/abs/2406.07831)). One decomposition serves all rows and
//! iterations: some 10 d³ operations, and 4 d² for each row in each iteration, where optimal brain
//! surgeon takes d³/3 for each row.

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatRef, Side, get_global_parallelism};
use rayon::prelude::*;

use crate::{Keep, LayerProblem, Support};

/// ρ to begin with; the mean of H's eigenvalues is 1. ALPS begins with ten times as much.
const FIRST_RHO: f64 = 0.01;
/// Iterations between two looks at the support.
const LOOK_EVERY: usize = 3;
/// Iterations at most; some 150 are usual, 50 where ρ grows fast.
const MOST_ITERATIONS: usize = 500;

/// How fast ρ grows: fast as in ALPS, or a third as fast, for objectives that are lower by some percent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    Slow,
    Fast,
}

impl Pace {
    /// The factor of ρ after this share of the support has changed; `None` where none has.
    fn growth(self, changed: f64) -> Option<f64> {
        let [much, some, little] = match self {
            Self::Slow => [1.1, 1.07, 1.03],
            Self::Fast => [1.3, 1.2, 1.1],
        };
        match changed {
            0.0 => None,
            0.1.. => Some(much),
            0.005.. => Some(some),
            _ => Some(little),
        }
    }
}

/// Weights `[o, d]` and support that splitting ends at; `None` where H has no decomposition in F64.
pub(crate) fn splitting(
    problem: &LayerProblem,
    keep: &Keep,
    pace: Pace,
) -> Option<(Vec<f64>, Support)> {
    let (o, d) = (problem.outputs(), problem.features());
    let scale: Vec<f64> = (0..d).map(|j| problem.hessian_row(j)[j].sqrt()).collect();
    let h = problem.matrix();
    let scaled = Mat::from_fn(d, d, |i, j| h[(i, j)] / (scale[i] * scale[j]));
    let eigen = scaled.self_adjoint_eigen(Side::Lower).ok()?;
    let basis = eigen.U();
    let values: Vec<f64> = (0..d).map(|at| eigen.S()[at]).collect();
    // Rows of more importance are longer: the largest of all rows are kept.
    let rescaled = |mut rows: Vec<f64>, by: &dyn Fn(f64, f64) -> f64| {
        for (row, values) in rows.chunks_exact_mut(d).enumerate() {
            let weight = problem.importance(row).sqrt();
            let pairs = values.iter_mut().zip(&scale);
            pairs.for_each(|(value, scale)| *value *= by(weight, *scale));
        }
        rows
    };
    let linear = (0..o)
        .flat_map(|row| problem.linear(row).to_vec())
        .collect();
    let linear = rescaled(linear, &|weight, scale| weight / scale);
    let weights = rescaled(problem.optimum(), &|weight, scale| weight * scale);
    let mut split = Split {
        basis,
        values,
        linear,
        weights,
        kept: Vec::new(),
        dual: vec![0.0; o * d],
        support: Support::full(o, d),
        rho: FIRST_RHO,
        turned: Mat::zeros(d, o),
    };
    split.project(keep);
    let mut before = split.support.clone();
    for iteration in 1..=MOST_ITERATIONS {
        split.solve();
        split.project(keep);
        split.climb();
        if iteration % LOOK_EVERY == 0 {
            let pairs = before.kept().iter().zip(split.support.kept());
            let changed = pairs.filter(|(a, b)| a != b).count() as f64;
            let share = changed / split.support.count().max(1) as f64;
            let Some(growth) = pace.growth(share) else {
                break;
            };
            split.rho *= growth;
            before = split.support.clone();
        }
    }
    let weights = rescaled(split.kept, &|weight, scale| 1.0 / (weight * scale));
    Some((weights, split.support))
}

/// An iteration's numbers; matrices are `[o, d]` row by row.
struct Split<'a> {
    /// Q.
    basis: MatRef<'a, f64>,
    /// Λ.
    values: Vec<f64>,
    /// G.
    linear: Vec<f64>,
    /// W.
    weights: Vec<f64>,
    /// D.
    kept: Vec<f64>,
    /// V.
    dual: Vec<f64>,
    support: Support,
    rho: f64,
    /// Qᵀ times what W is solved from, `[d, o]`.
    turned: Mat<f64>,
}

impl Split<'_> {
    /// W ← (H + ρI)⁻¹ (G − V + ρD).
    fn solve(&mut self) {
        let (d, rho) = (self.values.len(), self.rho);
        let o = self.turned.ncols();
        self.weights
            .par_iter_mut()
            .zip(&self.linear)
            .zip(&self.dual)
            .zip(&self.kept)
            .for_each(|(((right, g), v), kept)| *right = g - v + rho * kept);
        let right = MatRef::from_column_major_slice(&self.weights, d, o);
        let parallel = get_global_parallelism();
        let turned = self.turned.as_mut();
        let basis = self.basis;
        matmul(
            turned,
            Accum::Replace,
            basis.transpose(),
            right,
            1.0,
            parallel,
        );
        for column in 0..o {
            let column = self.turned.col_as_slice_mut(column).iter_mut();
            column
                .zip(&self.values)
                .for_each(|(turned, value)| *turned /= value + rho);
        }
        let weights = faer::MatMut::from_column_major_slice_mut(&mut self.weights, d, o);
        matmul(
            weights,
            Accum::Replace,
            basis,
            self.turned.as_ref(),
            1.0,
            parallel,
        );
    }

    /// D ← P(W + V/ρ).
    fn project(&mut self, keep: &Keep) {
        let rho = self.rho;
        let pairs = self.weights.par_iter().zip(&self.dual);
        self.kept = pairs.map(|(w, v)| w + v / rho).collect();
        let sizes: Vec<f64> = self.kept.par_iter().map(|one| one.abs()).collect();
        self.support = keep.select(&sizes, self.values.len());
        let pairs = self.kept.par_iter_mut().zip(self.support.kept());
        pairs.for_each(|(one, kept)| {
            if !kept {
                *one = 0.0;
            }
        });
    }

    /// V ← V + ρ (W − D).
    fn climb(&mut self) {
        let rho = self.rho;
        let pairs = self.dual.par_iter_mut().zip(&self.weights).zip(&self.kept);
        pairs.for_each(|((v, w), kept)| *v += rho * (w - kept));
    }
}
