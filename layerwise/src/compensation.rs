//! One feature after the other set to another value, those still to come making up for it.
//!
//! With U the upper Cholesky factor of H⁻¹, a feature j that is off by δ leaves an error e = δ/U_jj,
//! which the features after it make good, w ← w − e U_j,>j. Rounding so is
//! [GPTQ, Frantar et al., 2023](https://arxiv.org/abs/2210.17323), removing so SparseGPT.

use std::ops::Range;

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatMut, MatRef, get_global_parallelism};
use rayon::prelude::*;

use crate::dense::Factor;
use crate::error::LayerwiseError;

/// Features that make up for each other one by one, before all after them do at once.
const BLOCK: usize = 128;

/// An order of features, and U for it.
///
/// ```
/// use burn_lean_layerwise::Compensation;
///
/// // Two features that are nearly always equal.
/// let hessian = |i: usize, j: usize| if i == j { 1.0 } else { 0.99 };
/// let compensation = Compensation::new(vec![0, 1], 0.0, hessian)?;
/// let mut codes = vec![Vec::new(); 2];
/// let weights = vec![0.4, 0.4, 1.4, 0.0];
/// compensation.pass(weights, 2, &mut codes, |codes, _, left| {
///     codes.push(left[0].round());
///     left[0].round()
/// });
/// // 0.4 became 0, so that the other one was 0.4 + 0.99 · 0.4 by then; 1.4 became 1.
/// assert_eq!(codes, [[0.0, 1.0], [1.0, 0.0]]);
/// # Ok::<(), burn_lean_layerwise::LayerwiseError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Compensation {
    order: Vec<usize>,
    /// Of H⁻¹ = L Lᵀ = Uᵀ U.
    factor: Factor,
}

impl Compensation {
    /// For features in this order, with H_ij from `hessian`. `ridge` is for the error only.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::NotPositiveDefinite`].
    pub fn new(
        order: Vec<usize>,
        ridge: f64,
        hessian: impl Fn(usize, usize) -> f64,
    ) -> Result<Self, LayerwiseError> {
        let size = order.len();
        // Of a large layer each of these matrices takes gigabytes: none outlives its use.
        let factor = {
            let matrix = Mat::from_fn(size, size, |i, j| hessian(order[i], order[j]));
            Factor::new(matrix.as_ref(), ridge).map_err(|error| error.at_places(&order))?
        };
        let inverse = factor.inverse();
        drop(factor);
        Self::of_inverse(inverse, order, ridge)
    }

    /// From H⁻¹, its rows and columns in this order.
    pub(crate) fn of_inverse(
        inverse: Mat<f64>,
        order: Vec<usize>,
        ridge: f64,
    ) -> Result<Self, LayerwiseError> {
        let factor =
            Factor::new(inverse.as_ref(), ridge).map_err(|error| error.at_places(&order))?;
        drop(inverse);
        Ok(Self { order, factor })
    }

    /// The features in their order.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Goes over rows of weights `[rows, features]`, whose features are in the order, each row with a
    /// state of its own. `choose` is told how many features came before, and the values of the
    /// others by then; it says which value the first of them takes.
    ///
    /// Features are made up for by those of their block at once, by later ones when the block ends, which is
    /// faster: what `choose` sees of later blocks is from when its block began. A block is the most
    /// multiples of `group` below 128 features, or the largest divisor of a larger one: where a
    /// group begins, all its values are those of now.
    ///
    /// # Panics
    ///
    /// Where there are not as many states as whole rows of weights.
    pub fn pass<S: Send>(
        &self,
        mut weights: Vec<f64>,
        group: usize,
        states: &mut [S],
        choose: impl Fn(&mut S, usize, &[f64]) -> f64 + Sync,
    ) {
        let n = self.order.len();
        assert_eq!(weights.len(), n * states.len(), "a state for each row");
        let block = match group {
            ..=BLOCK => BLOCK / group.max(1) * group.max(1),
            _ => {
                let mut divisors = (16..=BLOCK)
                    .rev()
                    .filter(|size| group.is_multiple_of(*size));
                divisors.next().unwrap_or(group)
            }
        };
        for first in (0..n).step_by(block) {
            self.pass_block(first..n.min(first + block), &mut weights, states, &choose);
        }
    }

    /// As [`pass`](Self::pass) in one block: `choose` always sees the values of now.
    ///
    /// # Panics
    ///
    /// Where there are not as many states as whole rows of weights.
    pub fn pass_whole<S: Send>(
        &self,
        mut weights: Vec<f64>,
        states: &mut [S],
        choose: impl Fn(&mut S, usize, &[f64]) -> f64 + Sync,
    ) {
        let n = self.order.len();
        assert_eq!(weights.len(), n * states.len(), "a state for each row");
        self.pass_block(0..n, &mut weights, states, choose);
    }

    /// One block of [`pass`](Self::pass); weights end with what was chosen.
    pub(crate) fn pass_block<S: Send>(
        &self,
        block: Range<usize>,
        weights: &mut [f64],
        states: &mut [S],
        choose: impl Fn(&mut S, usize, &[f64]) -> f64 + Sync,
    ) {
        let (n, rows, width) = (self.order.len(), states.len(), block.len());
        if width == 0 {
            return;
        }
        let mut errors = vec![0.0; rows * width];
        weights
            .par_chunks_exact_mut(n)
            .zip(errors.par_chunks_exact_mut(width))
            .zip(states)
            .for_each(|((row, errors), state)| {
                for (step, error) in block.clone().zip(errors) {
                    let value = choose(state, step, &row[step..]);
                    let upper = self.upper(step);
                    *error = (row[step] - value) / upper[0];
                    row[step] = value;
                    if *error != 0.0 {
                        let pairs = row[step + 1..block.end].iter_mut().zip(&upper[1..]);
                        pairs.for_each(|(value, by)| *value -= *error * by);
                    }
                }
            });
        if block.end < n {
            let left = n - block.end;
            let weights = MatMut::from_column_major_slice_mut(weights, n, rows);
            let weights = weights.submatrix_mut(block.end, 0, left, rows);
            let lower = self.factor.lower();
            let lower = lower.submatrix(block.end, block.start, left, width);
            let errors = MatRef::from_column_major_slice(&errors, width, rows);
            let parallel = get_global_parallelism();
            matmul(weights, Accum::Add, lower, errors, -1.0, parallel);
        }
    }

    /// U_jj of the feature of this step, and what is right of it.
    pub(crate) fn upper(&self, step: usize) -> &[f64] {
        &self.factor.lower_column(step)[step..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_one_block_what_is_seen_of_all_later_features_is_of_now() {
        let (n, zeros) = (200, 150);
        let hessian = |i: usize, j: usize| match i == j {
            true => 2.0,
            false => 1.0 / (1.0 + i.abs_diff(j) as f64),
        };
        let order: Vec<usize> = (0..n).collect();
        let compensation = Compensation::new(order, 0.0, hessian).unwrap();
        let weights: Vec<f64> = (0..n).map(|at| (at as f64 * 0.37).sin()).collect();
        // The first ones become 0, the others stay as they are by then.
        let mut kept = [Vec::new()];
        compensation.pass(weights.clone(), 1, &mut kept, |kept, step, left| {
            if step < zeros {
                return 0.0;
            }
            kept.push(left[0]);
            left[0]
        });
        let mut seen = [Vec::new()];
        compensation.pass_whole(weights, &mut seen, |seen, step, left| {
            if step < zeros {
                return 0.0;
            }
            if seen.is_empty() {
                seen.extend_from_slice(left);
            }
            left[0]
        });
        assert_eq!(seen[0].len(), n - zeros);
        for (seen, kept) in seen[0].iter().zip(&kept[0]) {
            assert!((seen - kept).abs() < 1e-12, "{seen} {kept}");
        }
    }
}
