//! What an integer-only device computes: the reference for deployable numbers.
//!
//! Codes times codes, summed in `i32`, plus an `i32` bias of scale `s_in · s_w[c]`; then
//! requantization to the output grid ([`requantize`](crate::integer::Multiplier)). Everything runs on the
//! host, checks its ranges, and is written for reading, not for speed: it exists to prove that the
//! numbers of a converted model are the ones that integer hardware will give.
//!
//! ```text
//! acc[i, c] = Σ_k (x[i, k] − z_in) · w[k, c] + bias[c]
//! out[i, c] = clamp(round(acc[i, c] · s_in · s_w[c] / s_out) + z_out)
//! ```
//!
//! [Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
//! Jacob et al., 2018](https://arxiv.org/abs/1712.05877), section 2.

pub(crate) mod requantize;

pub use requantize::{Multiplier, Requantization};

mod conv2d;
mod grid;

use crate::{Granularity, QuantError, QuantizedTensor};

pub use conv2d::{ConvGeometry, IntegerConv2d};
pub use grid::Grid;

/// The part that linear and convolution share: what happens per output channel.
#[derive(Debug, Clone, PartialEq)]
struct Channels {
    /// `s_in · s_w[c]`.
    scale: Vec<f32>,
    bias: Vec<i32>,
}

impl Channels {
    fn new(
        count: usize,
        weight_scale: &[f32],
        bias: Option<&[f32]>,
        input: Grid,
    ) -> Result<Self, QuantError> {
        let weight_scale = match weight_scale {
            [scale] => vec![*scale; count],
            scales => scales.to_vec(),
        };
        QuantError::expect_len("weight scales", count, weight_scale.len())?;
        let scale: Vec<f32> = weight_scale.iter().map(|s| input.scale * s).collect();
        if let Some(bad) = scale.iter().find(|s| !(**s > 0.0 && s.is_finite())) {
            return Err(QuantError::InvalidScale {
                what: "input scale · weight scale".into(),
                value: *bad,
            });
        }
        let bias = match bias {
            None => vec![0; count],
            Some(bias) => {
                QuantError::expect_len("bias", count, bias.len())?;
                bias.iter()
                    .zip(&scale)
                    .enumerate()
                    .map(|(channel, (bias, scale))| to_i32_bias(channel, *bias, *scale))
                    .collect::<Result<_, _>>()?
            }
        };
        Ok(Self { scale, bias })
    }

    /// Requantizes accumulators; channel `c` owns runs of `run` values.
    fn requantize(
        &self,
        accumulators: &[i32],
        run: usize,
        output: Grid,
        mode: Requantization,
    ) -> Result<Vec<i32>, QuantError> {
        output.check("output grid", &[])?;
        let real: Vec<f64> = self
            .scale
            .iter()
            .map(|scale| f64::from(*scale) / f64::from(output.scale))
            .collect();
        let fixed: Vec<Multiplier> = real
            .iter()
            .map(|real| Multiplier::new(*real))
            .collect::<Result<_, _>>()?;
        let code = |(index, accumulator): (usize, &i32)| {
            let channel = (index / run) % self.scale.len();
            let steps = match mode {
                Requantization::FixedPoint => i64::from(fixed[channel].apply(*accumulator)),
                Requantization::Float => {
                    (f64::from(*accumulator) * real[channel]).round_ties_even() as i64
                }
            };
            let code = steps.saturating_add(i64::from(output.zero_point));
            code.clamp(i64::from(output.quant_min), i64::from(output.quant_max)) as i32
        };
        Ok(accumulators.iter().enumerate().map(code).collect())
    }

    fn dequantize(&self, accumulators: &[i32], run: usize) -> Vec<f32> {
        accumulators
            .iter()
            .enumerate()
            .map(|(index, acc)| *acc as f32 * self.scale[(index / run) % self.scale.len()])
            .collect()
    }
}

/// A linear layer in integers: input codes × `i8` weights, summed in `i32`.
///
/// ```
/// use burn_lean_quant::integer::{Grid, IntegerLinear, Requantization};
///
/// let input = Grid { scale: 0.5, zero_point: 10, quant_min: 0, quant_max: 255 };
/// // [d_input, d_output] = [2, 1], weights 3 · 0.25 and −1 · 0.25, bias 1.0
/// let layer = IntegerLinear::new(vec![3, -1], [2, 1], &[0.25], Some(&[1.0]), input).unwrap();
/// let accumulators = layer.accumulate(&[12, 6]).unwrap(); // 1.0 and −2.0
/// assert_eq!(accumulators, [2 * 3 + 4 + 8]);
/// assert_eq!(layer.dequantize(&accumulators), [1.0 * 0.75 + 2.0 * 0.25 + 1.0]);
/// let output = Grid { scale: 0.25, zero_point: 0, quant_min: -128, quant_max: 127 };
/// let codes = layer.requantize(&accumulators, output, Requantization::FixedPoint).unwrap();
/// assert_eq!(codes, [9]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct IntegerLinear {
    codes: Vec<i8>,
    shape: [usize; 2],
    input: Grid,
    channels: Channels,
}

impl IntegerLinear {
    /// A layer from weight codes `[d_input, d_output]` (row-major, zero point 0).
    ///
    /// `weight_scale` holds one scale, or one for each output; `bias` is rounded to
    /// multiples of `input.scale · weight_scale[c]`.
    ///
    /// # Errors
    ///
    /// [`QuantError::LengthMismatch`] when the numbers do not fit the shape,
    /// [`QuantError::InvalidScale`] for a scale that is not positive and finite,
    /// [`QuantError::BiasOverflow`] for a bias that does not fit `i32`.
    pub fn new(
        codes: Vec<i8>,
        shape: [usize; 2],
        weight_scale: &[f32],
        bias: Option<&[f32]>,
        input: Grid,
    ) -> Result<Self, QuantError> {
        QuantError::expect_len("weight codes", shape[0] * shape[1], codes.len())?;
        input.check("input grid", &[])?;
        let channels = Channels::new(shape[1], weight_scale, bias, input)?;
        Ok(Self {
            codes,
            shape,
            input,
            channels,
        })
    }

    /// The layer of a quantized weight, one of a converted model for example
    /// ([`quantized_weights`](crate::quantized_weights)).
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`QuantError::UnsupportedScheme`] unless the weight is of signed
    /// integers, symmetric, and has one scale or one for each output.
    pub fn of(
        weight: &QuantizedTensor,
        bias: Option<&[f32]>,
        input: Grid,
    ) -> Result<Self, QuantError> {
        let (codes, scale) = weight_codes(weight, 1)?;
        let shape = rank(weight)?;
        Self::new(codes, shape, scale, bias, input)
    }

    /// Accumulators `[rows, d_output]` of input codes `[rows, d_input]`.
    ///
    /// # Errors
    ///
    /// [`QuantError::LengthMismatch`], [`QuantError::CodeOutOfRange`] for a code outside of the
    /// input grid, [`QuantError::AccumulatorOverflow`] where a sum leaves `i32`.
    pub fn accumulate(&self, input: &[i32]) -> Result<Vec<i32>, QuantError> {
        let [d_input, d_output] = self.shape;
        if d_input == 0 || !input.len().is_multiple_of(d_input) {
            return Err(QuantError::LengthMismatch {
                what: "input codes of a linear layer".into(),
                expected: d_input,
                found: input.len(),
            });
        }
        self.input.check("input codes", input)?;
        let mut accumulators = Vec::with_capacity(input.len() / d_input * d_output);
        for row in input.chunks_exact(d_input) {
            for output in 0..d_output {
                let products = row.iter().enumerate().map(|(k, code)| {
                    let weight = self.codes[k * d_output + output];
                    self.input.steps(*code) * i64::from(weight)
                });
                let sum = products.sum::<i64>() + i64::from(self.channels.bias[output]);
                accumulators.push(to_i32_accumulator(sum)?);
            }
        }
        Ok(accumulators)
    }

    /// Output codes of accumulators `[rows, d_output]`.
    ///
    /// # Errors
    ///
    /// [`QuantError::InvalidScale`], [`QuantError::InvalidConfig`] and
    /// [`QuantError::InvalidMultiplier`] for an output grid that is impossible or absurdly fine.
    pub fn requantize(
        &self,
        accumulators: &[i32],
        output: Grid,
        mode: Requantization,
    ) -> Result<Vec<i32>, QuantError> {
        self.channels.requantize(accumulators, 1, output, mode)
    }

    /// Real values of accumulators `[rows, d_output]`.
    pub fn dequantize(&self, accumulators: &[i32]) -> Vec<f32> {
        self.channels.dequantize(accumulators, 1)
    }
}

/// Codes and scales of a weight whose output channels are along `axis`.
fn weight_codes(weight: &QuantizedTensor, axis: usize) -> Result<(Vec<i8>, &[f32]), QuantError> {
    let scheme = weight.scheme();
    let fits = match scheme.granularity {
        Granularity::PerTensor => true,
        Granularity::PerChannel { axis: of } => of == axis,
        _ => false,
    };
    let codes = weight.codes().iter().map(|code| i8::try_from(*code).ok());
    let signed = scheme.format.is_int() && weight.zero_point().iter().all(|zero| *zero == 0.0);
    match codes.collect::<Option<Vec<i8>>>() {
        Some(codes) if fits && signed => Ok((codes, weight.scale())),
        _ => Err(QuantError::UnsupportedScheme {
            scheme: scheme.to_string(),
            reason: "integer arithmetic takes weights that are signed integers without a zero \
                     point, with one scale or one for each output channel",
        }),
    }
}

fn rank<const D: usize>(weight: &QuantizedTensor) -> Result<[usize; D], QuantError> {
    let shape = weight.shape();
    shape.try_into().map_err(|_| QuantError::LengthMismatch {
        what: "axes of the weight".into(),
        expected: D,
        found: shape.len(),
    })
}

fn to_i32_bias(channel: usize, bias: f32, scale: f32) -> Result<i32, QuantError> {
    let steps = (bias / scale).round_ties_even();
    // `f32` cannot hold i32::MAX; the bounds below are the nearest powers of two.
    match steps >= -(2.0_f32.powi(31)) && steps < 2.0_f32.powi(31) {
        true => Ok(steps as i32),
        false => Err(QuantError::BiasOverflow {
            channel,
            bias,
            scale,
        }),
    }
}

fn to_i32_accumulator(sum: i64) -> Result<i32, QuantError> {
    i32::try_from(sum).map_err(|_| QuantError::AccumulatorOverflow { sum })
}
