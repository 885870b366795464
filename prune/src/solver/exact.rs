//! The best values on a support in F64, in the smaller of two forms.
//!
//! For its columns A `[n, s]`, t = G_P w₀_P − a·1 of the pruned set P, and the change d of the kept
//! weights:
//!
//! ```text
//! minimise ½‖t − A d‖² + λ‖d‖²
//! n < s:  d = Aᵀ u,  (2λ I + A Aᵀ) u = t       n x n, the dual form (Woodbury)
//! n ≥ s:  (2λ I + AᵀA) d = Aᵀ t                s x s, the normal equations
//! ```
//!
//! Removing the weight w_j from the support, the others re-solved, costs
//!
//! ```text
//! n < s:  λ w_j² / (1 − a_jᵀ (2λ I + A Aᵀ)⁻¹ a_j)
//! n ≥ s:  w_j² / 2[(2λ I + AᵀA)⁻¹]_jj
//! ```
//!
//! Both forms are right at any ridge that F64 tells from 0. The textbook form b/2λ − Aᵀ(…)/4λ² for the
//! weights themselves subtracts two nearly equal vectors; sums in F32 lose a ridge that is below 10⁻⁷
//! of the longest column.

use burn::tensor::Tensor;
use faer::Mat;

use crate::error::PruneError;
use crate::host::read;
use crate::problem::Problem;
use crate::solver::back_solve::dot;
use crate::solver::factor::{Factor, Symmetric};

/// Elements of rows that come to the host at once.
const ROW_ELEMENTS: usize = 1 << 20;
/// Elements of columns that stay on the host.
const RESIDENT_ELEMENTS: usize = 1 << 22;

/// The best values on a support.
pub(crate) struct Exact {
    /// d, in the order of the support.
    pub(crate) change: Vec<f64>,
    /// ½‖t − A d‖² + λ‖d‖²
    pub(crate) value: f64,
    factor: Factor,
    /// In the dual form: A, where it is small.
    columns: Option<Vec<Mat<f64>>>,
    is_dual: bool,
}

impl Exact {
    /// Solves for the columns at `support` (ascending, at least one).
    ///
    /// # Errors
    ///
    /// [`PruneError::SystemSize`], [`PruneError::NotPositiveDefinite`], [`PruneError::Device`].
    pub(crate) fn solve(
        problem: &Problem,
        support: &[usize],
        target: &[f64],
    ) -> Result<Self, PruneError> {
        match target.len() < support.len() {
            true => Self::dual(problem, support, target),
            false => Self::normal(problem, support, target),
        }
    }

    fn dual(problem: &Problem, support: &[usize], target: &[f64]) -> Result<Self, PruneError> {
        let mut system = Symmetric::ridge(target.len(), problem.lambda())?;
        let is_small = target.len() * support.len() <= RESIDENT_ELEMENTS;
        let mut kept = is_small.then(Vec::new);
        for chunk in problem.gradients().chunks(support) {
            let (_, columns) = chunk?;
            let columns = host(columns)?;
            system.add_exact_gram(1.0, columns.as_ref());
            if let Some(kept) = &mut kept {
                kept.push(columns);
            }
        }
        let factor = system.factor(problem.ridge())?;
        let dual = factor.solve(target);
        let mut exact = Self {
            change: Vec::with_capacity(support.len()),
            value: problem.lambda() * dot(target, &dual),
            factor,
            columns: kept,
            is_dual: true,
        };
        let mut change = Vec::with_capacity(support.len());
        exact.each_part(problem, support, |columns| {
            let products = (0..columns.ncols()).map(|at| dot(columns.col_as_slice(at), &dual));
            change.extend(products);
        })?;
        exact.change = change;
        Ok(exact)
    }

    /// Shows A, a part at a time.
    fn each_part(
        &self,
        problem: &Problem,
        support: &[usize],
        mut see: impl FnMut(&Mat<f64>),
    ) -> Result<(), PruneError> {
        match &self.columns {
            Some(parts) => parts.iter().for_each(see),
            None => {
                for chunk in problem.gradients().chunks(support) {
                    see(&host(chunk?.1)?);
                }
            }
        }
        Ok(())
    }

    fn normal(problem: &Problem, support: &[usize], target: &[f64]) -> Result<Self, PruneError> {
        let columns = problem.gradients().columns(support)?;
        let [samples, size] = columns.dims();
        let mut system = Symmetric::ridge(size, problem.lambda())?;
        let mut right = vec![0.0; size];
        let step = (ROW_ELEMENTS / size).max(1);
        for first in (0..samples).step_by(step) {
            let last = samples.min(first + step);
            let rows = host(columns.clone().slice([first..last, 0..size]))?;
            system.add_exact_gram(1.0, rows.transpose());
            for (at, sum) in right.iter_mut().enumerate() {
                *sum += dot(rows.col_as_slice(at), &target[first..last]);
            }
        }
        let factor = system.factor(problem.ridge())?;
        let change = factor.solve(&right);
        Ok(Self {
            value: 0.5 * (dot(target, target) - dot(&right, &change)),
            change,
            factor,
            columns: None,
            is_dual: false,
        })
    }

    /// What removing each of the `weights` on the support alone costs, the others re-solved.
    pub(crate) fn removal_costs(
        &self,
        problem: &Problem,
        support: &[usize],
        weights: &[f64],
    ) -> Result<Vec<f64>, PruneError> {
        if !self.is_dual {
            let inverse = self.factor.inverse_diagonal().into_iter();
            let pairs = inverse.zip(weights);
            return Ok(pairs.map(|(h, w)| w * w / (2.0 * h)).collect());
        }
        let mut leverage = Vec::with_capacity(support.len());
        self.each_part(problem, support, |columns| {
            let lifted = self.factor.half_solve(columns);
            let columns = (0..lifted.ncols()).map(|at| lifted.col_as_slice(at));
            leverage.extend(columns.map(|column| dot(column, column)));
        })?;
        let cost = |(q, w): (f64, &f64)| {
            // Leverages are below 1; rounding may lift them above.
            problem.lambda() * w * w / (1.0 - q).max(f64::EPSILON)
        };
        Ok(leverage.into_iter().zip(weights).map(cost).collect())
    }
}

/// A matrix on the host, in F64.
pub(super) fn host(columns: Tensor<2>) -> Result<Mat<f64>, PruneError> {
    let [rows, width] = columns.dims();
    let values = read(columns)?;
    Ok(Mat::from_fn(rows, width, |row, column| {
        f64::from(values[row * width + column])
    }))
}
