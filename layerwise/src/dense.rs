//! Cholesky factors of small dense systems in F64.

use faer::linalg::cholesky::llt::factor::LltError;
use faer::linalg::solvers::{DenseSolveCore, Llt, Solve};
use faer::{Mat, MatRef, Side};

use crate::error::LayerwiseError;

/// H = L Lᵀ.
#[derive(Debug, Clone)]
pub(crate) struct Factor(Llt<f64>);

impl Factor {
    /// `ridge` is for the error only.
    pub(crate) fn new(matrix: MatRef<'_, f64>, ridge: f64) -> Result<Self, LayerwiseError> {
        match Llt::new(matrix, Side::Lower) {
            Ok(factor) => Ok(Self(factor)),
            Err(LltError::NonPositivePivot { index }) => Err(LayerwiseError::NotPositiveDefinite {
                feature: index,
                ridge,
            }),
        }
    }

    /// Of rows and columns of a matrix; an error names the feature by its place in the whole one.
    pub(crate) fn of_part(
        matrix: MatRef<'_, f64>,
        places: &[usize],
        ridge: f64,
    ) -> Result<Self, LayerwiseError> {
        let factor = Self::new(principal(matrix, places).as_ref(), ridge);
        factor.map_err(|error| error.at_places(places))
    }

    /// L.
    pub(crate) fn lower(&self) -> MatRef<'_, f64> {
        self.0.L()
    }

    /// A column of L, of which numbers above the diagonal say nothing.
    pub(crate) fn lower_column(&self, at: usize) -> &[f64] {
        let column = self.lower().col(at).try_as_col_major();
        column.expect("columns are contiguous").as_slice()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_without_a_factor_names_the_feature_of_the_whole() {
        let diagonal = [1.0, 2.0, 3.0, -1.0];
        let matrix = Mat::from_fn(4, 4, |i, j| if i == j { diagonal[i] } else { 0.0 });
        let refused = Factor::of_part(matrix.as_ref(), &[1, 3], 0.25).map(|_| ());
        let expected = LayerwiseError::NotPositiveDefinite {
            feature: 3,
            ridge: 0.25,
        };
        assert_eq!(refused, Err(expected));
        assert!(Factor::of_part(matrix.as_ref(), &[0, 2], 0.25).is_ok());
    }
}
