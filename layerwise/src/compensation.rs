//! One feature after the other set to another value, those still to come making up for it.
//!
//! With U the upper Cholesky factor of H⁻¹, a feature j that is off by δ leaves an error e = δ/U_jj,
//! which the features after it make good, w ← w − e U_j,>j. Rounding so is
//! [GPTQ, Frantar et al., 2023](https://arxiv.org/abs/2210.17323), removing so SparseGPT.

use faer::Mat;

use crate::dense::Factor;
use crate::error::LayerwiseError;

/// An order of features, and U for it.
///
/// ```
/// use burn_lean_layerwise::Compensation;
///
/// // Two features that are nearly always equal.
/// let hessian = |i: usize, j: usize| if i == j { 1.0 } else { 0.99 };
/// let compensation = Compensation::new(vec![0, 1], 0.0, hessian)?;
/// let mut codes = Vec::new();
/// compensation.pass(&[0.4, 0.4], |_, left| {
///     codes.push(left[0].round());
///     left[0].round()
/// });
/// // 0.4 became 0, so that the other one was 0.4 + 0.99 · 0.4 by then.
/// assert_eq!(codes, [0.0, 1.0]);
/// # Ok::<(), burn_lean_layerwise::LayerwiseError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Compensation {
    order: Vec<usize>,
    /// Rows of U, each from its diagonal on.
    upper: Vec<Vec<f64>>,
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
        // H⁻¹ = L Lᵀ = Uᵀ U.
        let lower = factor.lower();
        let upper = |i: usize| (i..order.len()).map(|j| lower[(j, i)]).collect();
        Ok(Self {
            upper: (0..order.len()).map(upper).collect(),
            order,
        })
    }

    /// The features in their order.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Goes over `weights`, one for each feature, in the order. `choose` is told how many features came
    /// before, and the values of the others by then; it says which value the first of them takes.
    pub fn pass(&self, weights: &[f64], mut choose: impl FnMut(usize, &[f64]) -> f64) {
        let mut left: Vec<f64> = self.order.iter().map(|at| weights[*at]).collect();
        for step in 0..left.len() {
            let off = left[step] - choose(step, &left[step..]);
            self.make_good(step, off, &mut left[step + 1..]);
        }
    }

    /// U_jj of the feature of this step.
    pub(crate) fn diagonal(&self, step: usize) -> f64 {
        self.upper[step][0]
    }

    /// Changes the features `after` that of this step, which is off by so much.
    pub(crate) fn make_good(&self, step: usize, off: f64, after: &mut [f64]) {
        let error = off / self.diagonal(step);
        let pairs = after.iter_mut().zip(&self.upper[step][1..]);
        pairs.for_each(|(value, by)| *value -= error * by);
    }
}
