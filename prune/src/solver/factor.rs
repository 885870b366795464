//! Cholesky factors of small symmetric matrices, in F64 on the host.

use burn::tensor::Tensor;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::linalg::solvers::{Llt, Solve};
use faer::linalg::triangular_solve::{
    solve_lower_triangular_in_place, solve_upper_triangular_in_place,
};
use faer::{Accum, Mat, MatRef, Side, get_global_parallelism};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::PruneError;
use crate::host::{HOST_BYTES, in_host_memory, read};

/// Products of matrices with fewer rows are not split.
const SPLIT_ROWS: usize = 256;
/// Probes of a sketched leverage: its relative error is about √(2/64) = 18 %.
const PROBES: usize = 64;

/// A symmetric matrix on the host, of which the lower triangle counts; sums of device products in F32 are added up in F64.
#[derive(Debug, Clone)]
pub(crate) struct Symmetric(Mat<f64>);

impl Symmetric {
    /// `value` times the identity.
    fn diagonal(size: usize, value: f64) -> Self {
        Self(Mat::from_fn(size, size, |row, column| {
            if row == column { value } else { 0.0 }
        }))
    }

    /// Whether the system of so many unknowns may be made.
    pub(crate) fn fits(size: usize) -> bool {
        Self::needed(size) <= HOST_BYTES
    }

    fn needed(size: usize) -> usize {
        size.saturating_mul(size)
            .saturating_mul(2 * size_of::<f64>() + size_of::<f32>())
    }

    /// The system of `size` unknowns without any sample or weight, 2λ I.
    ///
    /// # Errors
    ///
    /// [`PruneError::SystemSize`] where it would not fit.
    pub(crate) fn ridge(size: usize, lambda: f64) -> Result<Self, PruneError> {
        match Self::fits(size) {
            true => Ok(Self::diagonal(size, 2.0 * lambda)),
            false => Err(PruneError::SystemSize {
                unknowns: size,
                needed: Self::needed(size),
                bound: HOST_BYTES,
            }),
        }
    }

    /// Rows.
    pub(crate) fn size(&self) -> usize {
        self.0.nrows()
    }

    /// Adds these rows and columns (ascending) of another one, all for `None`; of both only what is
    /// on and below the diagonal counts.
    pub(crate) fn add_rows(&mut self, other: &Self, rows: Option<&[usize]>) {
        let size = self.size();
        for column in 0..size {
            let sums = &mut self.0.col_as_slice_mut(column)[column..];
            match rows {
                Some(rows) => {
                    let values = other.0.col_as_slice(rows[column]);
                    let pairs = sums.iter_mut().zip(&rows[column..]);
                    pairs.for_each(|(sum, row)| *sum += values[*row]);
                }
                None => {
                    let pairs = sums.iter_mut().zip(&other.0.col_as_slice(column)[column..]);
                    pairs.for_each(|(sum, value)| *sum += value);
                }
            }
        }
    }

    /// Adds `factor` times A Aᵀ for `columns` = A `[size, c]`.
    ///
    /// Only what is on and below the diagonal is computed: by faer where the columns lie in the
    /// host's memory, else in blocks on the device.
    pub(crate) fn add_gram(&mut self, factor: f64, columns: &Tensor<2>) -> Result<(), PruneError> {
        match in_host_memory(&columns.device()) {
            true => self.add_gram_on_host(factor, columns),
            false => self.add_gram_at(factor, 0, columns.clone()),
        }
    }

    fn add_gram_on_host(&mut self, factor: f64, columns: &Tensor<2>) -> Result<(), PruneError> {
        let [size, width] = columns.dims();
        let values = read(columns.clone())?;
        let rows = MatRef::from_row_major_slice(&values, size, width);
        let mut product = Mat::<f32>::zeros(size, size);
        triangular::matmul(
            product.as_mut(),
            BlockStructure::TriangularLower,
            Accum::Replace,
            rows,
            BlockStructure::Rectangular,
            rows.transpose(),
            BlockStructure::Rectangular,
            1.0,
            get_global_parallelism(),
        );
        for column in 0..size {
            let values = &product.col_as_slice(column)[column..];
            let sums = &mut self.0.col_as_slice_mut(column)[column..];
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += factor * f64::from(*value);
            }
        }
        Ok(())
    }

    /// Adds `factor` times A Aᵀ for A `[size, c]`, all of it in F64.
    pub(crate) fn add_exact_gram(&mut self, factor: f64, rows: MatRef<'_, f64>) {
        triangular::matmul(
            self.0.as_mut(),
            BlockStructure::TriangularLower,
            Accum::Add,
            rows,
            BlockStructure::Rectangular,
            rows.transpose(),
            BlockStructure::Rectangular,
            factor,
            get_global_parallelism(),
        );
    }

    /// The square on the diagonal that begins at `first`: split until it is small.
    fn add_gram_at(
        &mut self,
        factor: f64,
        first: usize,
        rows: Tensor<2>,
    ) -> Result<(), PruneError> {
        let [size, width] = rows.dims();
        if size < SPLIT_ROWS {
            let transposed = rows.clone().transpose();
            return self.add_block(factor, first, first, rows.matmul(transposed));
        }
        let half = size / 2;
        let upper = rows.clone().slice([0..half, 0..width]);
        let lower = rows.slice([half..size, 0..width]);
        let between = lower.clone().matmul(upper.clone().transpose());
        self.add_block(factor, first + half, first, between)?;
        self.add_gram_at(factor, first, upper)?;
        self.add_gram_at(factor, first + half, lower)
    }

    /// Adds `factor` times a block at (row, column) of the lower triangle.
    fn add_block(
        &mut self,
        factor: f64,
        row: usize,
        column: usize,
        block: Tensor<2>,
    ) -> Result<(), PruneError> {
        let [_, width] = block.dims();
        // Transposed on the device, the values arrive column by column, as they lie here.
        let height = block.dims()[0];
        let values = read(block.transpose())?;
        for (offset, values) in values.chunks_exact(height).enumerate().take(width) {
            let sums = &mut self.0.col_as_slice_mut(column + offset)[row..row + height];
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += factor * f64::from(*value);
            }
        }
        Ok(())
    }

    /// Its Cholesky factor.
    pub(crate) fn factor(&self, ridge: f64) -> Result<Factor, PruneError> {
        match self.0.llt(Side::Lower) {
            Ok(llt) => Ok(Factor(llt)),
            Err(faer::linalg::cholesky::llt::factor::LltError::NonPositivePivot { index }) => {
                Err(PruneError::NotPositiveDefinite {
                    size: self.size(),
                    pivot: index,
                    ridge,
                })
            }
        }
    }
}

/// A Cholesky factor L Lᵀ.
#[derive(Debug, Clone)]
pub(crate) struct Factor(Llt<f64>);

impl Factor {
    /// Rows.
    pub(crate) fn size(&self) -> usize {
        self.0.L().nrows()
    }

    /// L.
    pub(crate) fn lower(&self) -> MatRef<'_, f64> {
        self.0.L()
    }

    /// A matrix W `[probes, size]`, row-major, with ‖W a‖² ≈ aᵀ (L Lᵀ)⁻¹ a: exact up to
    /// `PROBES` rows, else of random signs
    /// ([Spielman & Srivastava, 2011](https://arxiv.org/abs/0803.0929)). The signs are always the
    /// same.
    pub(crate) fn sketch(&self) -> Vec<f32> {
        let size = self.size();
        let mut probes = match size <= PROBES {
            true => Mat::<f64>::identity(size, size),
            false => {
                let mut random = StdRng::seed_from_u64(0);
                let sign = 1.0 / (PROBES as f64).sqrt();
                Mat::from_fn(size, PROBES, |_, _| match random.random::<bool>() {
                    true => sign,
                    false => -sign,
                })
            }
        };
        // W = Ω L⁻¹, so that Wᵀ = L⁻ᵀ Ωᵀ.
        solve_upper_triangular_in_place(
            self.0.L().transpose(),
            probes.as_mut(),
            get_global_parallelism(),
        );
        let columns = (0..probes.ncols()).flat_map(|probe| probes.col_as_slice(probe));
        columns.map(|value| *value as f32).collect()
    }

    /// The diagonal of (L Lᵀ)⁻¹.
    pub(crate) fn inverse_diagonal(&self) -> Vec<f64> {
        let size = self.size();
        let mut inverse = Mat::<f64>::identity(size, size);
        solve_lower_triangular_in_place(self.0.L(), inverse.as_mut(), get_global_parallelism());
        let norm = |column: &[f64]| column.iter().map(|value| value * value).sum();
        (0..size)
            .map(|column| norm(inverse.col_as_slice(column)))
            .collect()
    }

    /// Solves L X = right side, so that the squared norm of a column of X is aᵀ (L Lᵀ)⁻¹ a.
    pub(crate) fn half_solve(&self, right: &Mat<f64>) -> Mat<f64> {
        let mut solved = right.clone();
        solve_lower_triangular_in_place(self.0.L(), solved.as_mut(), get_global_parallelism());
        solved
    }

    /// Solves L Lᵀ x = right side.
    pub(crate) fn solve(&self, right: &[f64]) -> Vec<f64> {
        let right = Mat::from_fn(right.len(), 1, |row, _| right[row]);
        self.0.solve(&right).col_as_slice(0).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing of that size is made before it is refused.
    #[test]
    fn a_system_that_does_not_fit_is_refused() {
        let error = PruneError::SystemSize {
            unknowns: 40_000,
            needed: 40_000 * 40_000 * 20,
            bound: HOST_BYTES,
        };
        assert_eq!(Symmetric::ridge(40_000, 1.0).err(), Some(error));
        assert!(Symmetric::fits(29_308) && !Symmetric::fits(29_309));
    }
}
