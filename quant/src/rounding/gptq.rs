//! Rounding one input feature at a time, and letting the others make up for it.

use burn::config::Config;
use burn_lean_layerwise::{Compensation, LayerwiseError};

use crate::QuantError;
use crate::module::listen::input_statistics::InputStatistics;
use crate::rounding::weight_grid::WeightGrid;

/// Settings of [`gptq`].
#[derive(Config, Debug, PartialEq)]
pub struct GptqConfig {
    /// Added to the Hessian's diagonal, as a fraction of its mean (`percdamp` of the reference). Larger values compensate less
    /// and are more robust to little data. Default 0.01.
    #[config(default = 0.01)]
    pub ridge: f64,
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
/// H = 2 · Σ x xᵀ / n + ridge · mean(diag H) · I
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
/// [`QuantError::InvalidConfig`] for a negative ridge, [`QuantError::NotPositiveDefinite`].
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
    config.validate()?;
    let [outputs, features] = grid.shape();
    let compensation = compensation(inputs, config)?;
    let order = compensation.order();
    let weights = (0..outputs).flat_map(|row| order.iter().map(move |j| row * features + j));
    let weights = weights.map(|index| grid.weight(index)).collect();
    let mut rows: Vec<(usize, Vec<i32>)> = (0..outputs)
        .map(|row| (row * features, vec![0; features]))
        .collect();
    compensation.pass(weights, 1, &mut rows, |(start, codes), step, left| {
        let feature = order[step];
        let index = *start + feature;
        codes[feature] = match grid.is_zero(index) {
            true => grid.nearest_code(index, 0.0),
            false => grid.nearest_code(index, left[0]),
        };
        grid.value(index, codes[feature])
    });
    Ok(rows.into_iter().flat_map(|(_, codes)| codes).collect())
}

impl GptqConfig {
    pub(super) fn validate(&self) -> Result<(), QuantError> {
        match self.ridge >= 0.0 && self.ridge.is_finite() {
            true => Ok(()),
            false => Err(QuantError::InvalidConfig {
                field: "ridge",
                value: self.ridge.to_string(),
                expected: "a finite number, at least 0",
            }),
        }
    }
}

/// The features in the order of rounding, and `U` of the Hessian with the ridge in it.
fn compensation(inputs: &InputStatistics, config: &GptqConfig) -> Result<Compensation, QuantError> {
    let per_sample = 2.0 / inputs.samples() as f64;
    let hessian = |i: usize, j: usize| inputs.gram(i, j) * per_sample;
    let mut order: Vec<usize> = (0..inputs.features()).collect();
    if config.activation_order {
        order.sort_by(|a, b| inputs.gram(*b, *b).total_cmp(&inputs.gram(*a, *a)));
    }
    let diagonal: f64 = order.iter().map(|j| hessian(*j, *j)).sum();
    let ridge = config.ridge * (diagonal / order.len().max(1) as f64);
    let with_ridge = |i: usize, j: usize| match hessian(i, j) {
        // A dead feature has no correlation with any other: alone on its diagonal, it neither gives
        // nor takes compensation.
        sum if i == j && sum == 0.0 => 1.0,
        sum if i == j => sum + ridge,
        sum => sum,
    };
    Compensation::new(order, config.ridge, with_ridge).map_err(|error| match error {
        LayerwiseError::NotPositiveDefinite { feature, ridge } => QuantError::NotPositiveDefinite {
            index: feature,
            ridge,
        },
        other => unreachable!("a factor fails in one way: {other}"),
    })
}
