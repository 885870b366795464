//! What an integer-only device computes: the reference for deployable numbers.
//!
//! Codes times codes, summed in `i32`, plus an `i32` bias of scale `s_in · s_w[c]`; then
//! requantization to the output grid ([`requantize`](crate::Multiplier)). Everything runs on the
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

use serde::{Deserialize, Serialize};

use crate::QuantError;
use crate::requantize::{Multiplier, Requantization};

/// The integer grid of one activation tensor: `value = (code − zero_point) · scale`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Real value of one step, positive and finite.
    pub scale: f32,
    /// The code of 0.0.
    pub zero_point: i32,
    /// Smallest code.
    pub quant_min: i32,
    /// Largest code.
    pub quant_max: i32,
}

impl Grid {
    /// The code of `value`: `round(value · (1 / scale)) + zero_point`, ties to even, clamped.
    ///
    /// # Errors
    ///
    /// [`QuantError::NonFinite`] for NaN: there is no code for it.
    pub fn quantize(&self, value: f32) -> Result<i32, QuantError> {
        if value.is_nan() {
            return Err(QuantError::NonFinite {
                what: "value to quantize",
            });
        }
        // Infinities saturate here, and the sum below stays far inside of f64's exact integers.
        let steps = (value * (1.0 / self.scale)).round_ties_even();
        let code = f64::from(steps) + f64::from(self.zero_point);
        Ok(code.clamp(f64::from(self.quant_min), f64::from(self.quant_max)) as i32)
    }

    /// The value of `code`.
    pub fn dequantize(&self, code: i32) -> f32 {
        (code - self.zero_point) as f32 * self.scale
    }

    fn check(&self, what: &str, codes: &[i32]) -> Result<(), QuantError> {
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(QuantError::InvalidScale {
                what: what.to_string(),
                value: self.scale,
            });
        }
        let range = self.quant_min..=self.quant_max;
        match codes.iter().find(|code| !range.contains(*code)) {
            None => Ok(()),
            Some(code) => Err(QuantError::CodeOutOfRange {
                what: what.to_string(),
                code: i64::from(*code),
                quant_min: self.quant_min,
                quant_max: self.quant_max,
            }),
        }
    }
}

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
        expect_len("weight scales", count, weight_scale.len())?;
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
                expect_len("bias", count, bias.len())?;
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
/// use burn_lean_quant::{Grid, IntegerLinear, Requantization};
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
        expect_len("weight codes", shape[0] * shape[1], codes.len())?;
        input.check("input grid", &[])?;
        let channels = Channels::new(shape[1], weight_scale, bias, input)?;
        Ok(Self {
            codes,
            shape,
            input,
            channels,
        })
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
                    i64::from(code - self.input.zero_point) * i64::from(weight)
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
    /// [`QuantError::InvalidScale`] and [`QuantError::InvalidMultiplier`] for an output grid that
    /// is impossible or absurdly fine.
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

/// Where a convolution reads its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvGeometry {
    /// Step between windows, `[height, width]`.
    pub stride: [usize; 2],
    /// Zeros around the input (codes equal to the zero point), `[height, width]`, both sides.
    pub padding: [usize; 2],
    /// Step between the taps of a window, `[height, width]`.
    pub dilation: [usize; 2],
    /// Groups of channels that do not see each other.
    pub groups: usize,
}

impl Default for ConvGeometry {
    fn default() -> Self {
        Self {
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
        }
    }
}

/// A 2-D convolution in integers.
#[derive(Debug, Clone, PartialEq)]
pub struct IntegerConv2d {
    codes: Vec<i8>,
    shape: [usize; 4],
    geometry: ConvGeometry,
    input: Grid,
    channels: Channels,
}

impl IntegerConv2d {
    /// A layer from weight codes `[channels_out, channels_in / groups, height, width]`.
    ///
    /// # Errors
    ///
    /// As [`IntegerLinear::new`], and [`QuantError::InvalidConfig`] for a zero stride, dilation or
    /// group count, or groups that do not divide the output channels.
    pub fn new(
        codes: Vec<i8>,
        shape: [usize; 4],
        weight_scale: &[f32],
        bias: Option<&[f32]>,
        input: Grid,
        geometry: ConvGeometry,
    ) -> Result<Self, QuantError> {
        expect_len("weight codes", shape.iter().product(), codes.len())?;
        input.check("input grid", &[])?;
        let ConvGeometry {
            stride,
            dilation,
            groups,
            ..
        } = geometry;
        if stride.contains(&0)
            || dilation.contains(&0)
            || groups == 0
            || !shape[0].is_multiple_of(groups)
        {
            return Err(QuantError::InvalidConfig {
                field: "geometry",
                value: format!("{geometry:?}"),
                expected: "positive strides and dilations, and groups that divide the channels",
            });
        }
        let channels = Channels::new(shape[0], weight_scale, bias, input)?;
        Ok(Self {
            codes,
            shape,
            geometry,
            input,
            channels,
        })
    }

    /// Accumulators and their shape `[batch, channels_out, height, width]`, of input codes
    /// `[batch, channels_in, height, width]`.
    ///
    /// # Errors
    ///
    /// As [`IntegerLinear::accumulate`]; an input smaller than the kernel is a
    /// [`QuantError::InvalidConfig`].
    pub fn accumulate(
        &self,
        input: &[i32],
        shape: [usize; 4],
    ) -> Result<(Vec<i32>, [usize; 4]), QuantError> {
        let [channels_out, per_group, height, width] = self.shape;
        let groups = self.geometry.groups;
        expect_len("input codes", shape.iter().product(), input.len())?;
        expect_len("input channels", per_group * groups, shape[1])?;
        self.input.check("input codes", input)?;
        let out = [
            self.output_extent(shape[2], height, 0)?,
            self.output_extent(shape[3], width, 1)?,
        ];
        let out_shape = [shape[0], channels_out, out[0], out[1]];
        let mut accumulators = Vec::with_capacity(out_shape.iter().product());
        for index in 0..out_shape.iter().product::<usize>() {
            let [batch, channel, y, x] = coordinates(index, out_shape);
            let group = channel / (channels_out / groups);
            let mut sum = i64::from(self.channels.bias[channel]);
            for tap in 0..per_group * height * width {
                let [c, dy, dx] = [tap / (height * width), tap / width % height, tap % width];
                let (Some(y), Some(x)) = (
                    self.input_position(y, dy, shape[2], 0),
                    self.input_position(x, dx, shape[3], 1),
                ) else {
                    continue; // padding: its code is the zero point
                };
                let c_in = group * per_group + c;
                let code = input[((batch * shape[1] + c_in) * shape[2] + y) * shape[3] + x];
                let weight = self.codes[channel * per_group * height * width + tap];
                sum += i64::from(code - self.input.zero_point) * i64::from(weight);
            }
            accumulators.push(to_i32_accumulator(sum)?);
        }
        Ok((accumulators, out_shape))
    }

    /// Output codes of accumulators of `shape` (as [`accumulate`](Self::accumulate) gives them).
    ///
    /// # Errors
    ///
    /// As [`IntegerLinear::requantize`].
    pub fn requantize(
        &self,
        accumulators: &[i32],
        shape: [usize; 4],
        output: Grid,
        mode: Requantization,
    ) -> Result<Vec<i32>, QuantError> {
        let run = (shape[2] * shape[3]).max(1);
        self.channels.requantize(accumulators, run, output, mode)
    }

    fn output_extent(&self, input: usize, kernel: usize, axis: usize) -> Result<usize, QuantError> {
        let padded = input + 2 * self.geometry.padding[axis];
        let window = self.geometry.dilation[axis] * kernel.saturating_sub(1) + 1;
        match padded.checked_sub(window) {
            Some(room) => Ok(room / self.geometry.stride[axis] + 1),
            None => Err(QuantError::InvalidConfig {
                field: "input",
                value: format!("{padded} wide with its padding"),
                expected: "at least as large as the dilated kernel",
            }),
        }
    }

    fn input_position(&self, out: usize, tap: usize, extent: usize, axis: usize) -> Option<usize> {
        let ConvGeometry {
            stride,
            padding,
            dilation,
            ..
        } = self.geometry;
        let position = (out * stride[axis] + tap * dilation[axis]).checked_sub(padding[axis])?;
        (position < extent).then_some(position)
    }
}

fn coordinates(index: usize, shape: [usize; 4]) -> [usize; 4] {
    let [_, channels, height, width] = shape;
    [
        index / (channels * height * width),
        index / (height * width) % channels,
        index / width % height,
        index % width,
    ]
}

fn expect_len(what: &str, expected: usize, found: usize) -> Result<(), QuantError> {
    match expected == found {
        true => Ok(()),
        false => Err(QuantError::LengthMismatch {
            what: what.to_string(),
            expected,
            found,
        }),
    }
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
