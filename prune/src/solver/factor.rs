//! Cholesky factors of small symmetric matrices, in F64 on the host.

use burn::tensor::Tensor;
use faer::linalg::solvers::{Llt, Solve};
use faer::{Mat, Side};

use crate::error::PruneError;
use crate::gradient_matrix::read;

/// A symmetric matrix on the host; sums of device products in F32 are added up in F64.
#[derive(Debug, Clone)]
pub(crate) struct Symmetric(Mat<f64>);

impl Symmetric {
    /// `value` times the identity.
    pub(crate) fn diagonal(size: usize, value: f64) -> Self {
        Self(Mat::from_fn(size, size, |row, column| {
            if row == column { value } else { 0.0 }
        }))
    }

    /// Rows.
    pub(crate) fn size(&self) -> usize {
        self.0.nrows()
    }

    /// Adds `factor` times a symmetric tensor of the same size.
    pub(crate) fn add(&mut self, factor: f64, product: Tensor<2>) -> Result<(), PruneError> {
        let size = self.size();
        let product = read(product)?;
        for (column, values) in product.chunks_exact(size).enumerate() {
            let sums = self.0.col_as_slice_mut(column);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += factor * f64::from(*value);
            }
        }
        Ok(())
    }

    /// Its Cholesky factor.
    pub(crate) fn factor(&self, l2: f64) -> Result<Factor, PruneError> {
        match self.0.llt(Side::Lower) {
            Ok(llt) => Ok(Factor(llt)),
            Err(faer::linalg::cholesky::llt::factor::LltError::NonPositivePivot { index }) => {
                Err(PruneError::NotPositiveDefinite {
                    size: self.size(),
                    pivot: index,
                    l2,
                })
            }
        }
    }
}

/// A Cholesky factor L Lᵀ.
#[derive(Debug, Clone)]
pub(crate) struct Factor(Llt<f64>);

impl Factor {
    /// Solves L Lᵀ x = right side.
    pub(crate) fn solve(&self, right: &[f64]) -> Vec<f64> {
        let right = Mat::from_fn(right.len(), 1, |row, _| right[row]);
        self.0.solve(&right).col_as_slice(0).to_vec()
    }
}
