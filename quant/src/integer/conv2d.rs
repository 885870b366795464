//! A 2-D convolution in integers.

use super::{Channels, Grid, rank, to_i32_accumulator, weight_codes};
use crate::integer::requantize::Requantization;
use crate::{QuantError, QuantizedTensor};

/// Where a convolution reads its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// As [`IntegerLinear::new`](crate::integer::IntegerLinear::new), and [`QuantError::InvalidConfig`] for a zero stride, dilation or
    /// group count, or groups that do not divide the output channels.
    pub fn new(
        codes: Vec<i8>,
        shape: [usize; 4],
        weight_scale: &[f32],
        bias: Option<&[f32]>,
        input: Grid,
        geometry: ConvGeometry,
    ) -> Result<Self, QuantError> {
        QuantError::expect_len("weight codes", shape.iter().product(), codes.len())?;
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

    /// The layer of a quantized weight, as [`IntegerLinear::of`](crate::integer::IntegerLinear::of).
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new) and [`IntegerLinear::of`](crate::integer::IntegerLinear::of).
    pub fn of(
        weight: &QuantizedTensor,
        bias: Option<&[f32]>,
        input: Grid,
        geometry: ConvGeometry,
    ) -> Result<Self, QuantError> {
        let (codes, scale) = weight_codes(weight, 0)?;
        let shape = rank(weight)?;
        Self::new(codes, shape, scale, bias, input, geometry)
    }

    /// Accumulators and their shape `[batch, channels_out, height, width]`, of input codes
    /// `[batch, channels_in, height, width]`.
    ///
    /// # Errors
    ///
    /// As [`IntegerLinear::accumulate`](crate::integer::IntegerLinear::accumulate); an input smaller than the kernel is a
    /// [`QuantError::InvalidConfig`].
    pub fn accumulate(
        &self,
        input: &[i32],
        shape: [usize; 4],
    ) -> Result<(Vec<i32>, [usize; 4]), QuantError> {
        let [channels_out, per_group, height, width] = self.shape;
        let groups = self.geometry.groups;
        QuantError::expect_len("input codes", shape.iter().product(), input.len())?;
        QuantError::expect_len("input channels", per_group * groups, shape[1])?;
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
                sum += self.input.steps(code) * i64::from(weight);
            }
            accumulators.push(to_i32_accumulator(sum)?);
        }
        Ok((accumulators, out_shape))
    }

    /// Output codes of accumulators of `shape` (as [`accumulate`](Self::accumulate) gives them).
    ///
    /// # Errors
    ///
    /// As [`IntegerLinear::requantize`](crate::integer::IntegerLinear::requantize).
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
