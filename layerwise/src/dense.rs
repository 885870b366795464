//! Cholesky factors of small dense systems in F64.

use faer::linalg::cholesky::llt::factor::LltError;
use faer::linalg::solvers::{DenseSolveCore, Llt, Solve};
use faer::{Mat, MatRef, Side};

use crate::error::LayerwiseError;

/// H = L Lᵀ.
#[derive(Debug, Clone)]
pub(crate) struct Factor(Llt<f64>);

impl Factor {
    /// `damping` is for the error only.
    pub(crate) fn new(matrix: MatRef<'_, f64>, damping: f64) -> Result<Self, LayerwiseError> {
        match Llt::new(matrix, Side::Lower) {
            Ok(factor) => Ok(Self(factor)),
            Err(LltError::NonPositivePivot { index }) => Err(LayerwiseError::NotPositiveDefinite {
                feature: index,
                damping,
            }),
        }
    }

    /// L.
    pub(crate) fn lower(&self) -> MatRef<'_, f64> {
        self.0.L()
    }

    /// H⁻¹.
    pub(crate) fn inverse(&self) -> Mat<f64> {
        self.0.inverse()
    }

    /// H⁻¹ b for every column.
    pub(crate) fn solve(&self, right: &Mat<f64>) -> Mat<f64> {
        self.0.solve(right)
    }
}

/// Rows and columns of a symmetric matrix `[d, d]`.
pub(crate) fn principal(matrix: MatRef<'_, f64>, places: &[usize]) -> Mat<f64> {
    let size = places.len();
    Mat::from_fn(size, size, |i, j| matrix[(places[i], places[j])])
}
