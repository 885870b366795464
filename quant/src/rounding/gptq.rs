//! Rounding one input feature at a time, and letting the others make up for it.

use burn::config::Config;
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par, Side};

use crate::QuantError;
use crate::module::listen::input_statistics::InputStatistics;
use crate::rounding::weight_grid::WeightGrid;

/// Settings of [`gptq`].
#[derive(Config, Debug, PartialEq)]
pub struct GptqConfig {
    /// Added to the Hessian's diagonal, as a fraction of its mean. Larger values compensate less
    /// and are more robust to little data. Default 0.01.
    #[config(default = 0.01)]
    pub damping: f64,
    /// Rounds the features with the largest second moment first ("act-order"), while the most
    /// others are left to make up for them. Default: no, in their order.
    #[config(default = false)]
    pub activation_order: bool,
}

impl Default for GptqConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// Codes `[outputs, inputs]` that keep the outputs over `inputs` close to the unquantized ones.
///
/// ```text
/// H = 2 · Σ x xᵀ / n + damping · mean(diag H) · I
/// U = upper Cholesky factor of H⁻¹
/// for each input feature j:
///     q_j = round(w_j / s_j)                      all outputs at once
///     w_k −= (w_j − q_j · s_j) / U_jj · U_jk       for the features k > j still to come
/// ```
///
/// Features that are zero in all samples say nothing about their weights: those are rounded to
/// nearest. A weight of exactly zero was pruned: it stays zero, and the others make up for what
/// would have moved it.
///
/// [GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, Frantar et
/// al., 2023](https://arxiv.org/abs/2210.17323).
///
/// # Errors
///
/// [`QuantError::NoData`], [`QuantError::LengthMismatch`] for inputs of another layer,
/// [`QuantError::InvalidConfig`] for a negative damping, [`QuantError::NotPositiveDefinite`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{GptqConfig, module::InputStatistics, rounding::{WeightGrid, gptq}};
///
/// // Two features that are always equal: their errors can cancel.
/// let mut inputs = InputStatistics::new(2);
/// inputs.observe(Tensor::from_data([[1.0, 1.0], [2.0, 2.0]], &Device::flex())).unwrap();
/// let grid = WeightGrid::new([1, 2], vec![0.4, 0.4], vec![1.0; 2], vec![0.0; 2], (-7, 7)).unwrap();
/// assert_eq!(grid.nearest(), [0, 0]);
/// let codes = gptq(&grid, &inputs, &GptqConfig::new()).unwrap();
/// assert_eq!(codes, [0, 1]);
/// // 0 instead of 0.8 against 1 instead of 0.8, over inputs 1 and 2
/// assert!((grid.output_error(&grid.nearest(), &inputs).unwrap() - 1.6).abs() < 1e-6);
/// assert!((grid.output_error(&codes, &inputs).unwrap() - 0.1).abs() < 1e-6);
/// ```
pub fn gptq(
    grid: &WeightGrid,
    inputs: &InputStatistics,
    config: &GptqConfig,
) -> Result<Vec<i32>, QuantError> {
    grid.expect_inputs(inputs)?;
    if !(config.damping >= 0.0 && config.damping.is_finite()) {
        return Err(QuantError::InvalidConfig {
            field: "damping",
            value: config.damping.to_string(),
            expected: "a finite number, at least 0",
        });
    }
    let [outputs, features] = grid.shape();
    let moments: Vec<f64> = (0..features).map(|j| inputs.gram()[(j, j)]).collect();
    let order = order(&moments, config.activation_order);
    let compensation = compensation(inputs, &order, config.damping)?;

    // Column `step` of `remaining` is feature `order[step]`, with what the earlier ones left.
    let mut remaining = Mat::from_fn(outputs, features, |row, step| {
        grid.weight(row * features + order[step])
    });
    let mut codes = vec![0; outputs * features];
    for (step, &feature) in order.iter().enumerate() {
        let mut error = Mat::<f64>::zeros(outputs, 1);
        for row in 0..outputs {
            let index = row * features + feature;
            codes[index] = match grid.is_zero(index) {
                true => grid.nearest_code(index, 0.0),
                false => grid.nearest_code(index, remaining[(row, step)]),
            };
            let off = remaining[(row, step)] - grid.value(index, codes[index]);
            error[(row, 0)] = off / compensation[(step, step)];
        }
        let later = features - step - 1;
        matmul(
            remaining.as_mut().subcols_mut(step + 1, later),
            Accum::Add,
            error.as_ref(),
            compensation.as_ref().submatrix(step, step + 1, 1, later),
            -1.0,
            Par::Seq,
        );
    }
    Ok(codes)
}

/// The features in the order of rounding.
fn order(moments: &[f64], by_moment: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..moments.len()).collect();
    if by_moment {
        order.sort_by(|a, b| moments[*b].total_cmp(&moments[*a]));
    }
    order
}

/// `U`: the upper Cholesky factor of the inverse of the damped Hessian, in rounding order.
fn compensation(
    inputs: &InputStatistics,
    order: &[usize],
    damping: f64,
) -> Result<Mat<f64>, QuantError> {
    let features = order.len();
    let per_sample = 2.0 / inputs.samples() as f64;
    let mut hessian = Mat::from_fn(features, features, |row, column| {
        inputs.gram()[(order[row], order[column])] * per_sample
    });
    let mean_diagonal =
        (0..features).map(|j| hessian[(j, j)]).sum::<f64>() / features.max(1) as f64;
    for j in 0..features {
        // A dead feature has no correlation with any other: alone on its diagonal, it neither
        // gives nor takes compensation.
        let dead = hessian[(j, j)] == 0.0;
        hessian[(j, j)] += damping * mean_diagonal;
        if dead {
            hessian[(j, j)] = 1.0;
        }
    }
    let not_positive = |error: faer::linalg::solvers::LltError| {
        let faer::linalg::solvers::LltError::NonPositivePivot { index } = error;
        QuantError::NotPositiveDefinite {
            index: order.get(index).copied().unwrap_or(index),
            damping,
        }
    };
    use faer::linalg::solvers::DenseSolveCore;
    let inverse = hessian.llt(Side::Lower).map_err(not_positive)?.inverse();
    let lower = inverse.llt(Side::Lower).map_err(not_positive)?;
    Ok(lower.L().transpose().to_owned())
}
