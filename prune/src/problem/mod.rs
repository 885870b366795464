//! The regression that pruning solves: value, residual and gradient; nothing iterative.
//!
//! ```text
//! f(w) = ½‖y − G w‖² + λ‖w − w₀‖² + αᵀw      y = G w₀,  λ = ridge·n/2,  α = a·Gᵀ1
//! ```
//!
//! n times the local quadratic model of the loss around the dense weights w₀, with the empirical
//! Fisher GᵀG/n + ridge·I for the Hessian. Everything is computed from the change d = w − w₀, since
//! y − G w = −G d: the difference of two nearly equal vectors never appears.
//!
//! Reference: [Fast as CHITA: Neural Network Pruning with Combinatorial Optimization, Benbaki et
//! al., 2023](https://arxiv.org/abs/2302.14623).

pub(crate) mod budget;
mod divisible;
pub(crate) mod feasible;
pub(crate) mod objective;
pub(crate) mod reduced;
pub(crate) mod solution;
pub(crate) mod sparsity;

pub use budget::Budget;
pub use objective::Objective;
pub use solution::{Rounded, RoundedLayer, Solution, Step, TracePoint};
pub use sparsity::{Groups, SparsityPattern};

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::error::PruneError;
use crate::fisher::gradient_matrix::GradientMatrix;
use crate::host::{mismatch, read};
use crate::model::checks;
use crate::model::flatten::{finite, locate};
use crate::model::layout::Layout;
use crate::problem::reduced::Reduced;

/// The best-subset regression over the gradients of a trained model.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{GradientMatrix, Layout, Problem};
///
/// let device = Device::flex();
/// let gradients = Tensor::from_floats([[1., 0.], [0., 2.]], &device);
/// let dense = Tensor::from_floats([3., 1.], &device);
/// let problem = Problem::new(
///     GradientMatrix::from_tensor(gradients)?,
///     dense,
///     Layout::anonymous(2),
/// )?
/// .with_ridge(0.5)?;
/// // n = 2, so λ = 0.5; pruning the second weight costs ½·(2·1)² + 0.5·1².
/// let pruned = Tensor::from_floats([3., 0.], &device);
/// assert_eq!(problem.objective(pruned)?.total(), 2.5);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Problem {
    gradients: GradientMatrix,
    layout: Layout,
    dense: Vec<f32>,
    /// y = G w₀, [n].
    target: Vec<f64>,
    /// What the first-order term adds up the rows with, [n]: 1, but over the rows of [`Reduced`].
    ones: Vec<f64>,
    /// Fisher samples that the ridge counts: n.
    counted: usize,
    /// Weights that no gradient depends on, ascending.
    dead: Vec<usize>,
    ridge: f64,
    first_order: f64,
    tempering: f64,
    /// The same problem over fewer rows, once it was asked for; clones share it.
    reduced: Arc<OnceLock<Reduced>>,
}

impl Problem {
    /// The ridge of a problem that was not given another one.
    pub const DEFAULT_RIDGE: f64 = 1e-2;

    /// Pairs gradients `[n, p]` with the dense weights `[p]` at which they were taken.
    ///
    /// The ridge starts at [`DEFAULT_RIDGE`](Self::DEFAULT_RIDGE), without first-order term. Looks at
    /// every gradient twice: for NaN and for weights that no gradient depends on.
    ///
    /// # Errors
    ///
    /// [`PruneError::IncompleteGradients`], [`PruneError::Mismatch`],
    /// [`PruneError::NonFiniteWeight`], [`PruneError::NonFiniteGradient`], [`PruneError::Device`], and
    /// [`PruneError::Io`] where the gradients are in a file.
    pub fn new(
        gradients: GradientMatrix,
        dense: Tensor<1>,
        layout: Layout,
    ) -> Result<Self, PruneError> {
        if gradients.filled() < gradients.samples() {
            return Err(PruneError::IncompleteGradients {
                expected: gradients.samples(),
                found: gradients.filled(),
            });
        }
        let [weights] = dense.dims();
        mismatch("dense weights", gradients.parameters(), weights)?;
        mismatch(
            "weights of the layout",
            gradients.parameters(),
            layout.len(),
        )?;
        let dense = finite(&layout, dense)?;
        let target = gradients.multiply(&dense)?;
        // A sum with a NaN or an infinity in it is one itself, whatever the weights.
        if let Some(sample) = target.iter().position(|value| !value.is_finite()) {
            return Err(non_finite(&gradients, &layout, sample)?);
        }
        let dead = gradients.dead_columns()?;
        Ok(Self {
            ones: vec![1.0; gradients.samples()],
            counted: gradients.samples(),
            reduced: Arc::default(),
            gradients,
            layout,
            dense,
            target,
            dead,
            ridge: Self::DEFAULT_RIDGE,
            first_order: 0.0,
            tempering: 0.0,
        })
    }

    /// Sets the ridge on the normalised Fisher: λ = ridge·n/2. Above 0.
    ///
    /// # Errors
    ///
    /// [`PruneError::InvalidConfig`].
    pub fn with_ridge(mut self, ridge: f64) -> Result<Self, PruneError> {
        checks::ridge(ridge)?;
        self.ridge = ridge;
        Ok(self)
    }

    /// Adds the gradient of the loss at w₀: a = 1/m for Fisher batches of m examples, 0 for none
    /// (the default). 1/m brings the gradient to the scale of a Fisher from mini-batches. Under
    /// [`with_tempering`](Self::with_tempering) it is the sum of the weighed gradients, no longer
    /// the gradient of the loss.
    ///
    /// # Errors
    ///
    /// [`PruneError::InvalidConfig`] where `a` is negative or not finite.
    pub fn with_first_order(mut self, a: f64) -> Result<Self, PruneError> {
        checks::first_order(a)?;
        self.first_order = a;
        Ok(self)
    }

    /// Weighs samples: every gradient is divided by its length to the power of `exponent`, in
    /// [0, 1]; a common factor keeps the sum of their squared lengths. 0 leaves them as they are
    /// (the default), 1 makes all of them equally long.
    ///
    /// The gradients of a trained network differ in length by factors of thousands: those of the
    /// few examples that it gets wrong make up nearly all of the empirical Fisher, and what it gets
    /// right counts for nothing. It counts with an exponent near 1. The objective becomes another
    /// one, not comparable between exponents.
    ///
    /// # Errors
    ///
    /// [`PruneError::InvalidConfig`], [`PruneError::Device`], [`PruneError::Io`].
    pub fn with_tempering(mut self, exponent: f64) -> Result<Self, PruneError> {
        checks::tempering(exponent)?;
        if exponent == self.tempering {
            return Ok(self);
        }
        self.gradients = self.gradients.tempered(exponent)?;
        self.target = self.gradients.multiply(&self.dense)?;
        self.tempering = exponent;
        self.reduced = Arc::default();
        Ok(self)
    }

    /// The same problem over as few rows as it takes.
    pub(crate) fn over_few_rows(&self) -> Result<Cow<'_, Self>, PruneError> {
        if !Reduced::is_better(self.samples(), self.parameters()) {
            return Ok(Cow::Borrowed(self));
        }
        let Reduced { gradients, ones } = match self.reduced.get() {
            Some(reduced) => reduced.clone(),
            None => {
                let reduced = Reduced::of(&self.gradients, &self.ones)?;
                self.reduced.get_or_init(|| reduced).clone()
            }
        };
        Ok(Cow::Owned(Self {
            target: gradients.multiply(&self.dense)?,
            gradients,
            ones,
            ..self.clone()
        }))
    }

    /// The gradient matrix.
    pub fn gradients(&self) -> &GradientMatrix {
        &self.gradients
    }

    /// Which weight belongs to which parameter.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The dense weights w₀, `[p]`.
    pub fn dense(&self) -> &[f32] {
        &self.dense
    }

    /// Weights that no gradient depends on, ascending: their columns of G are zero, the loss says
    /// nothing about them.
    pub fn dead(&self) -> &[usize] {
        &self.dead
    }

    /// Rows of the gradient matrix: Fisher samples n.
    pub fn samples(&self) -> usize {
        self.gradients.samples()
    }

    /// Fisher samples n that the ridge counts, whatever the rows.
    pub(crate) fn counted(&self) -> usize {
        self.counted
    }

    /// Weights p.
    pub fn parameters(&self) -> usize {
        self.gradients.parameters()
    }

    /// The ridge on the normalised Fisher.
    pub fn ridge(&self) -> f64 {
        self.ridge
    }

    /// The factor λ = ridge·n/2 of ‖w − w₀‖².
    pub fn lambda(&self) -> f64 {
        self.ridge * self.counted as f64 / 2.0
    }

    /// The factor a of the first-order term.
    pub fn first_order(&self) -> f64 {
        self.first_order
    }

    /// The exponent by which the lengths of the gradients are evened out.
    pub fn tempering(&self) -> f64 {
        self.tempering
    }

    /// Where the gradients are.
    pub fn device(&self) -> Device {
        self.gradients.device()
    }

    /// The objective at `weights`, `[p]`.
    ///
    /// # Errors
    ///
    /// [`PruneError::Mismatch`] on another length, [`PruneError::Device`].
    pub fn objective(&self, weights: Tensor<1>) -> Result<Objective, PruneError> {
        self.objective_at(&self.host(weights)?)
    }

    /// y = G w₀, `[n]`.
    pub(crate) fn target(&self) -> &[f64] {
        &self.target
    }

    /// The objective at weights on the host.
    pub(crate) fn objective_at(&self, weights: &[f32]) -> Result<Objective, PruneError> {
        let change = self.change(weights);
        let residual = self.residual_at(&change)?;
        Ok(self.objective_from(&change, &residual))
    }

    /// The objective where the change is `change` and the residual `residual`.
    pub(crate) fn objective_from(&self, change: &[f32], residual: &[f64]) -> Objective {
        let fit = 0.5 * residual.iter().map(|value| value * value).sum::<f64>();
        let square = |value: &f32| f64::from(*value) * f64::from(*value);
        let ridge = self.lambda() * change.iter().map(square).sum::<f64>();
        // αᵀw = a·1ᵀG w, and G w = y − r.
        let predicted = self.target.iter().zip(residual).map(|(y, r)| y - r);
        let linear = match self.first_order {
            0.0 => 0.0,
            a => {
                a * predicted
                    .zip(&self.ones)
                    .map(|(g, one)| g * one)
                    .sum::<f64>()
            }
        };
        Objective { fit, ridge, linear }
    }

    /// The constant part of the objective that completing the square with the first-order term
    /// leaves: f(w) = ½‖(y − a·1) − G w‖² + λ‖w − w₀‖² + this.
    pub(crate) fn completed_square(&self) -> f64 {
        self.linear_of_dense() - 0.5 * self.squared_first_order()
    }

    /// αᵀw₀, the first-order term of the dense weights.
    pub(crate) fn linear_of_dense(&self) -> f64 {
        let pairs = self.target.iter().zip(&self.ones);
        self.first_order * pairs.map(|(y, one)| y * one).sum::<f64>()
    }

    /// ‖a·1‖²
    pub(crate) fn squared_first_order(&self) -> f64 {
        self.first_order.powi(2) * self.ones.iter().map(|one| one * one).sum::<f64>()
    }

    /// a·1, `[n]`.
    pub(crate) fn shift(&self) -> impl Iterator<Item = f64> + '_ {
        self.ones.iter().map(|one| self.first_order * one)
    }

    /// a·1 − r: what Gᵀ is multiplied with, since α shifts the residual.
    pub(crate) fn shifted(&self, residual: &[f64]) -> Vec<f64> {
        self.shift().zip(residual).map(|(a, r)| a - r).collect()
    }

    /// The residual −G d of a change d = w − w₀.
    pub(crate) fn residual_at(&self, change: &[f32]) -> Result<Vec<f64>, PruneError> {
        let mut product = self.gradients.multiply(change)?;
        product.iter_mut().for_each(|value| *value = -*value);
        Ok(product)
    }

    /// The residual of weights that are zero but on `support` (ascending).
    ///
    /// Where little is kept, the change is about −w₀, and −G d as large as y: nothing is lost in
    /// y − G_S w_S then, which reads less.
    pub(crate) fn residual_on(
        &self,
        support: &[usize],
        weights: &[f32],
    ) -> Result<Vec<f64>, PruneError> {
        if self.gradients.prefers_all(support) {
            return self.residual_at(&self.change(weights));
        }
        let kept: Vec<f32> = support.iter().map(|index| weights[*index]).collect();
        let product = self.gradients.multiply_at(support, &kept)?;
        Ok(self
            .target
            .iter()
            .zip(product)
            .map(|(y, g)| y - g)
            .collect())
    }

    /// The gradient −Gᵀr + α + 2λd at these weights only, where the change is `change`, d, and the
    /// residual `residual`, r.
    pub(crate) fn gradient_on(
        &self,
        indices: &[usize],
        change: &[f32],
        residual: &[f64],
    ) -> Result<Vec<f32>, PruneError> {
        let shifted = self.shifted(residual);
        let gradients = &self.gradients;
        let mut gradient = gradients.transpose_multiply_at(indices, &narrow(&shifted))?;
        let pull = 2.0 * self.lambda() as f32;
        for (gradient, index) in gradient.iter_mut().zip(indices) {
            *gradient += pull * change[*index];
        }
        Ok(gradient)
    }

    /// d = w − w₀.
    pub(crate) fn change(&self, weights: &[f32]) -> Vec<f32> {
        weights
            .iter()
            .zip(&self.dense)
            .map(|(w, d)| w - d)
            .collect()
    }

    /// A host vector on the device of the gradients.
    pub(crate) fn tensor(&self, values: &[f32]) -> Tensor<1> {
        Tensor::from_data(
            TensorData::new(values.to_vec(), [values.len()]),
            (&self.device(), DType::F32),
        )
    }

    fn host(&self, weights: Tensor<1>) -> Result<Vec<f32>, PruneError> {
        mismatch("weights", self.parameters(), weights.dims()[0])?;
        read(weights)
    }
}

/// To the precision of the device.
pub(crate) fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// The first non-finite gradient of a row.
fn non_finite(
    gradients: &GradientMatrix,
    layout: &Layout,
    sample: usize,
) -> Result<PruneError, PruneError> {
    let row = gradients.row(sample)?;
    let found = row.iter().enumerate().find(|(_, value)| !value.is_finite());
    Ok(match found {
        Some((index, value)) => {
            let (path, index) = locate(layout, index);
            PruneError::NonFiniteGradient {
                sample,
                path,
                index,
                value: *value,
            }
        }
        None => PruneError::Overflow { sample },
    })
}
