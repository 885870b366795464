//! The same regression over fewer rows, for more samples than weights.
//!
//! With the orthogonal Q of
//!
//! ```text
//! [G 1] = Q [R c]          R [p + 1, p], c [p + 1]
//! ```
//!
//! ‖G d + a·1‖ = ‖R d + a·c‖ for every d and a, so that R and c take the places of G and 1 and the
//! objective is the same one, constants included. What the solver costs grows with p then, not with
//! n; R itself takes n·p² once.
//!
//! R is found by Householder QR of some rows at a time, on top of the R of those before
//! ([Golub & Van Loan, Matrix Computations, 4th edition, sections 5.2 and 6.5]), in F64. GᵀG, whose
//! condition is that of G squared, is not formed.

use burn::tensor::{DType, Tensor, TensorData};
use faer::Mat;

use crate::error::PruneError;
use crate::fisher::gradient_matrix::GradientMatrix;
use crate::host::HOST_BYTES;
use crate::problem::narrow;

/// Rows that one factorization takes in, as a multiple of those of R: more of them are more memory,
/// fewer are more work.
const ROWS_AT_ONCE: usize = 2;

/// R and c.
#[derive(Debug, Clone)]
pub(crate) struct Reduced {
    /// R `[p + 1, p]`, in F32 as the gradients.
    pub(crate) gradients: GradientMatrix,
    /// c `[p + 1]`
    pub(crate) ones: Vec<f64>,
}

impl Reduced {
    /// Whether it has half the rows or fewer, and fits.
    pub(crate) fn is_better(samples: usize, parameters: usize) -> bool {
        let rows = parameters.saturating_add(1);
        samples / 2 >= rows && Self::needed(rows) <= HOST_BYTES
    }

    /// R in F64 and F32, and twice the rows with it: themselves and factored.
    fn needed(rows: usize) -> usize {
        let element = size_of::<f64>() * (2 + 2 * (1 + ROWS_AT_ONCE)) + size_of::<f32>();
        rows.saturating_mul(rows).saturating_mul(element)
    }

    /// Of a matrix with more samples than weights, and what the first-order term adds them up with.
    pub(crate) fn of(gradients: &GradientMatrix, ones: &[f64]) -> Result<Self, PruneError> {
        let (samples, parameters) = (gradients.samples(), gradients.parameters());
        let rows = parameters + 1;
        let mut reduced = Mat::<f64>::zeros(rows, rows);
        for first in (0..samples).step_by(ROWS_AT_ONCE * rows) {
            let last = samples.min(first + ROWS_AT_ONCE * rows);
            let mut stacked = Mat::<f64>::zeros(rows + last - first, rows);
            stacked.as_mut().subrows_mut(0, rows).copy_from(&reduced);
            gradients.each_of_rows(first..last, |row, column, value| {
                stacked[(rows + row, column)] = f64::from(value);
            })?;
            let pairs = (rows..).zip(&ones[first..last]);
            pairs.for_each(|(row, one)| stacked[(row, parameters)] = *one);
            reduced.copy_from(stacked.qr().thin_R());
        }
        let elements = (0..rows).flat_map(|row| (0..parameters).map(move |column| (row, column)));
        let values: Vec<f64> = elements.map(|at| reduced[at]).collect();
        let values = TensorData::new(narrow(&values), [rows, parameters]);
        let values = Tensor::from_data(values, (&gradients.device(), DType::F32));
        Ok(Self {
            gradients: GradientMatrix::from_tensor(values)?,
            ones: reduced.col_as_slice(parameters).to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_weights_that_fit_are_reduced_to() {
        assert!(Reduced::is_better(200, 99) && !Reduced::is_better(199, 99));
        assert!(Reduced::is_better(40_000, 15_893) && !Reduced::is_better(40_000, 15_894));
    }
}
