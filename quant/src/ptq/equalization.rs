//! Factors that move difficulty from activations to weights, or precision to the weights that
//! matter: [`smooth_quant`] and [`awq`].
//!
//! Both divide a layer's inputs by a factor for each feature and multiply the weight's rows by it,
//! which changes nothing before quantization. [`rescale`](crate::ptq::rescale) writes the factors into a
//! model.

use burn::tensor::{Tensor, TensorData};
use faer::Mat;
use serde::{Deserialize, Serialize};

use crate::fake_quantize;
use crate::module::listen::input_statistics::InputStatistics;
use crate::range::observer::read;
use crate::{QuantError, QuantParams, Scheme};

/// The factors of SmoothQuant: what to divide each input feature by and multiply its weights by.
///
/// ```text
/// f_j = max|x_j|^alpha / max|w_j|^(1 − alpha)
/// ```
///
/// `weight` is `[d_input, d_output]`; `alpha` in `0..=1` is how much of the activations' spread
/// moves to the weights, usually 0.5. A feature that is zero in all samples keeps its weights:
/// factor 1.
///
/// [SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models, Xiao
/// et al., 2023](https://arxiv.org/abs/2211.10438).
///
/// # Errors
///
/// [`QuantError::NoData`], [`QuantError::LengthMismatch`] for inputs of another layer,
/// [`QuantError::InvalidConfig`] for an `alpha` out of range, [`QuantError::NonFinite`] for a weight
/// that is not finite, [`QuantError::Device`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{module::InputStatistics, ptq::smooth_quant};
///
/// let device = Device::flex();
/// let mut inputs = InputStatistics::new(2);
/// inputs.observe(Tensor::from_data([[16.0, 1.0]], &device)).unwrap();
/// let weight = Tensor::<2>::from_data([[1.0], [0.25]], &device);
/// assert_eq!(smooth_quant(&weight, &inputs, 0.5).unwrap(), [4.0, 2.0]);
/// ```
pub fn smooth_quant(
    weight: &Tensor<2>,
    inputs: &InputStatistics,
    alpha: f32,
) -> Result<Vec<f32>, QuantError> {
    if !(0.0..=1.0).contains(&alpha) {
        return Err(QuantError::InvalidConfig {
            field: "alpha",
            value: alpha.to_string(),
            expected: "in 0..=1",
        });
    }
    let rows = Rows::read(weight, inputs)?;
    let factor = |(row, largest_input): (&[f32], &f32)| {
        let largest_weight = row.iter().fold(0.0_f32, |largest, w| largest.max(w.abs()));
        match *largest_input > 0.0 {
            // The paper's code keeps the divisor away from zero the same way.
            true => largest_input.powf(alpha) / largest_weight.powf(1.0 - alpha).max(1e-5),
            false => 1.0,
        }
    };
    Ok(rows.iter().zip(inputs.max_abs()).map(factor).collect())
}

/// What [`awq`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AwqSearch {
    /// What to divide each input feature by and multiply its weights by.
    pub factors: Vec<f32>,
    /// The exponent they come from.
    pub ratio: f32,
    /// Mean squared error of the layer's output for each exponent 0, 1/20, … 19/20.
    pub output_errors: Vec<f64>,
}

/// The factors of activation-aware weight quantization: the exponent, of 20, whose factors give the
/// smallest output error of the quantized weight.
///
/// ```text
/// f = mean|x|^ratio,   f /= √(max f · min f)
/// error = mean ((Q(W · f) / f − W) x)²
/// ```
///
/// `weight` is `[d_input, d_output]`, and `scheme` the one it will be quantized with.
///
/// [AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, Lin et al.,
/// 2024](https://arxiv.org/abs/2306.00978).
///
/// # Errors
///
/// As [`smooth_quant`], and what [`Scheme::validate`] finds.
pub fn awq(
    weight: &Tensor<2>,
    inputs: &InputStatistics,
    scheme: &Scheme,
) -> Result<AwqSearch, QuantError> {
    const STEPS: usize = 20;
    let rows = Rows::read(weight, inputs)?;
    scheme.validate(&weight.dims())?;
    let mean_abs = inputs.mean_abs();
    let candidates = (0..STEPS).map(|step| {
        let ratio = step as f32 / STEPS as f32;
        let factors = awq_factors(&mean_abs, ratio);
        let error = scaled_error(weight, &rows, inputs, scheme, &factors)?;
        Ok((error, ratio, factors))
    });
    let candidates = candidates.collect::<Result<Vec<_>, QuantError>>()?;
    let output_errors = candidates.iter().map(|(error, ..)| *error).collect();
    let best = candidates.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
    let (_, ratio, factors) = best.expect("there are twenty candidates");
    Ok(AwqSearch {
        factors,
        ratio,
        output_errors,
    })
}

fn awq_factors(mean_abs: &[f32], ratio: f32) -> Vec<f32> {
    let raw: Vec<f32> = mean_abs.iter().map(|x| x.powf(ratio).max(1e-4)).collect();
    let largest = raw.iter().copied().fold(f32::MIN, f32::max);
    let smallest = raw.iter().copied().fold(f32::MAX, f32::min);
    let middle = (largest * smallest).sqrt();
    raw.iter().map(|factor| factor / middle).collect()
}

fn scaled_error(
    weight: &Tensor<2>,
    rows: &Rows,
    inputs: &InputStatistics,
    scheme: &Scheme,
    factors: &[f32],
) -> Result<f64, QuantError> {
    let [d_input, d_output] = weight.dims();
    let device = weight.device();
    let data = TensorData::new(factors.to_vec(), [d_input, 1]);
    let factors = Tensor::<2>::from_data(data, (&device, weight.dtype()));
    let scaled = weight.clone().detach() * factors.clone();
    let qparams = QuantParams::of(&scaled, scheme)?;
    let quantized = fake_quantize(scaled, &qparams, scheme) / factors;
    let quantized = read(quantized)?;
    let error = Mat::from_fn(d_output, d_input, |output, input| {
        let index = input * d_output + output;
        f64::from(quantized[index]) - f64::from(rows.values[index])
    });
    Ok(inputs.output_error(error.as_ref()))
}

/// A weight `[d_input, d_output]` on the host.
struct Rows {
    values: Vec<f32>,
    d_output: usize,
}

impl Rows {
    fn read(weight: &Tensor<2>, inputs: &InputStatistics) -> Result<Self, QuantError> {
        inputs.require_samples()?;
        let [d_input, d_output] = weight.dims();
        if d_input != inputs.features() {
            return Err(QuantError::LengthMismatch {
                what: "input features of the weight".into(),
                expected: d_input,
                found: inputs.features(),
            });
        }
        let values = read(weight.clone().detach())?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(QuantError::NonFinite { what: "weight" });
        }
        Ok(Self { values, d_output })
    }

    fn iter(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.d_output.max(1))
    }
}
