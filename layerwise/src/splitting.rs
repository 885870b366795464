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
//! every ρ: some 10 d³ operations, d³ for each ρ, which stays for a few iterations, and 2 d² for each row in each
//! iteration, where optimal brain surgeon takes d³/3 for each row. The decomposition is in F64; iterations,
//! which only look for a support, in F32: W is at most 1/ρ times the right side, whatever the condition of H.

use faer::linalg::matmul::matmul;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::{Accum, Mat, MatMut, MatRef, Side, get_global_parallelism};
use rayon::prelude::*;

use crate::{Keep, LayerProblem, Support};

/// ρ to begin with; the mean of H's eigenvalues is 1. ALPS begins with ten times as much.
const FIRST_RHO: f32 = 0.01;
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
    fn growth(self, changed: f64) -> Option<f32> {
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
    drop(scaled);
    let basis = Mat::from_fn(d, d, |i, j| eigen.U()[(i, j)] as f32);
    let values = (0..d).map(|at| eigen.S()[at] as f32).collect::<Vec<f32>>();
    drop(eigen);
    let optimum = problem.optimum();
    // Rows of more importance are longer, the longest weight has the length 1: F32 holds them all.
    let mut length: Vec<f64> = (0..o).map(|row| problem.importance(row).sqrt()).collect();
    let sizes = optimum.iter().enumerate();
    let sizes = sizes.map(|(at, w)| (length[at / d] * w * scale[at % d]).abs());
    let longest = sizes.fold(0.0, f64::max);
    if longest > 0.0 {
        length.iter_mut().for_each(|length| *length /= longest);
    }
    let linear = (0..o).flat_map(|row| {
        let length = length[row];
        let pairs = problem.linear(row).iter().zip(&scale);
        pairs.map(move |(g, scale)| (length * g / scale) as f32)
    });
    let weights = optimum.iter().enumerate();
    let weights = weights.map(|(at, w)| (length[at / d] * w * scale[at % d]) as f32);
    let mut split = Split {
        basis,
        values,
        linear: linear.collect(),
        weights: weights.collect(),
        right: vec![0.0; o * d],
        kept: vec![0.0; o * d],
        dual: vec![0.0; o * d],
        sizes: vec![0.0; o * d],
        support: Support::full(o, d),
        rho: FIRST_RHO,
        inverse: Mat::zeros(d, d),
    };
    split.invert();
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
            split.invert();
            before = split.support.clone();
        }
    }
    let weights = split.kept.iter().enumerate();
    let weights = weights.map(|(at, w)| f64::from(*w) / (length[at / d] * scale[at % d]));
    Some((weights.collect(), split.support))
}

/// An iteration's numbers; matrices are `[o, d]` row by row.
struct Split {
    /// Q.
    basis: Mat<f32>,
    /// Λ.
    values: Vec<f32>,
    /// G.
    linear: Vec<f32>,
    /// G − V + ρD.
    right: Vec<f32>,
    /// W.
    weights: Vec<f32>,
    /// D.
    kept: Vec<f32>,
    /// V.
    dual: Vec<f32>,
    /// What the projection compares.
    sizes: Vec<f64>,
    support: Support,
    rho: f32,
    /// (H + ρI)⁻¹.
    inverse: Mat<f32>,
}

impl Split {
    /// (H + ρI)⁻¹ = S Sᵀ with S = Q (Λ + ρI)^−½.
    fn invert(&mut self) {
        let d = self.values.len();
        let root = |at: usize| 1.0 / (self.values[at] + self.rho).sqrt();
        let roots: Vec<f32> = (0..d).map(root).collect();
        let scaled = Mat::from_fn(d, d, |i, j| self.basis[(i, j)] * roots[j]);
        let lower = BlockStructure::TriangularLower;
        let whole = BlockStructure::Rectangular;
        triangular::matmul(
            self.inverse.as_mut(),
            lower,
            Accum::Replace,
            scaled.as_ref(),
            whole,
            scaled.transpose(),
            whole,
            1.0,
            get_global_parallelism(),
        );
        for j in 1..d {
            for i in 0..j {
                self.inverse[(i, j)] = self.inverse[(j, i)];
            }
        }
    }

    /// W ← (H + ρI)⁻¹ (G − V + ρD).
    fn solve(&mut self) {
        let (d, rho) = (self.values.len(), self.rho);
        self.right
            .par_iter_mut()
            .zip(&self.linear)
            .zip(&self.dual)
            .zip(&self.kept)
            .for_each(|(((right, g), v), kept)| *right = g - v + rho * kept);
        let o = self.right.len() / d.max(1);
        let right = MatRef::from_column_major_slice(&self.right, d, o);
        let weights = MatMut::from_column_major_slice_mut(&mut self.weights, d, o);
        let (inverse, parallel) = (self.inverse.as_ref(), get_global_parallelism());
        matmul(weights, Accum::Replace, inverse, right, 1.0, parallel);
    }

    /// D ← P(W + V/ρ).
    fn project(&mut self, keep: &Keep) {
        let rho = self.rho;
        let pairs = self.weights.par_iter().zip(&self.dual);
        pairs
            .zip(self.kept.par_iter_mut().zip(&mut self.sizes))
            .for_each(|((w, v), (kept, size))| {
                *kept = w + v / rho;
                *size = f64::from(kept.abs());
            });
        self.support = keep.select(&self.sizes, self.values.len());
        let pairs = self.kept.par_iter_mut().zip(self.support.kept());
        pairs
            .filter(|(_, kept)| !**kept)
            .for_each(|(one, _)| *one = 0.0);
    }

    /// V ← V + ρ (W − D).
    fn climb(&mut self) {
        let rho = self.rho;
        let pairs = self.dual.par_iter_mut().zip(&self.weights).zip(&self.kept);
        pairs.for_each(|((v, w), kept)| *v += rho * (w - kept));
    }
}
