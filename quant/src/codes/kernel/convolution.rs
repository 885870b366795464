//! Convolutions along one or two axes that multiply by packed codes.
//!
//! Kernels of a CPU take images whose channels come last, and Burn's come first: the codes of an input are written in
//! that order as they are rounded, and outputs are turned back. An axis that is padded is padded with the code of zero.

use burn::module::Param;
use burn::nn::conv::{Conv1d, Conv2d};
use burn::tensor::{DType, Tensor, TensorData};
use burn_lean_kernels::{CodeGrid, Depthwise, Epilogue, Geometry, Windows, in_shares, transpose};

use super::matrix::{Codes, Matrix, Packed, Signed};
use super::{Tried, UNIT, acting, codes, grids};
use crate::QuantizedTensor;
use crate::codes::product::Factors;
use crate::format::groups::greatest_common_divisor;
use crate::module::listen::layer_inputs::{padding, padding_1d};

/// Numbers of a window that share a scale, at least: of fewer, scales take as many bytes as codes of 4 bits.
const LEAST_BLOCK: usize = 8;

/// Taps of a depthwise kernel, at most: sums of products of codes of 8 bits stay in 32.
const MOST_TAPS: usize = 1 << 15;

/// Pixels of a channel that are rounded at once: those of all channels stay in the cache until they are in their order.
const TILE: usize = 32;

/// A kernel `[outputs, channels / groups, height, width]`, packed; along one axis its height is 1.
#[derive(Debug)]
pub(crate) struct PackedConvolution {
    shape: [usize; 4],
    groups: usize,
    factors: Factors,
    weight: Weight,
}

#[derive(Debug)]
enum Weight {
    /// One matrix for each group, `[taps · channels, outputs]`.
    Matrices(Vec<Packed>),
    /// Of integers, with the scale of each channel.
    Depthwise(Depthwise<i8>, Vec<f32>),
}

/// Images `[batch, height, width, channels]`, and where windows are.
#[derive(Debug, Clone, Copy)]
struct Scene {
    images: [usize; 4],
    geometry: Geometry,
}

impl Scene {
    fn channels(&self) -> usize {
        self.images[3]
    }

    /// Pixels of an image.
    fn pixels(&self) -> usize {
        self.images[1] * self.images[2]
    }
}

/// The extents of a kernel along two axes.
fn extents(shape: &[usize]) -> Option<[usize; 4]> {
    match *shape {
        [outputs, channels, width] => Some([outputs, channels, 1, width]),
        [outputs, channels, height, width] => Some([outputs, channels, height, width]),
        _ => None,
    }
}

impl PackedConvolution {
    /// # Errors
    ///
    /// Why it cannot be.
    pub(crate) fn new(
        quantized: &QuantizedTensor,
        factors: Factors,
        groups: usize,
    ) -> Result<Self, String> {
        let shape = extents(quantized.shape()).ok_or("kernels convolve along one axis or two")?;
        let [outputs, channels, ..] = shape;
        if shape.contains(&0) {
            return Err("it has no numbers".into());
        }
        if groups == 0 || !outputs.is_multiple_of(groups) {
            return Err(format!(
                "{groups} groups do not divide its {outputs} outputs"
            ));
        }
        if factors == Factors::IntegersOfRows {
            return Err(
                "its input has a scale for each row, and windows are of several rows".into(),
            );
        }
        let layout = Layout::of(quantized, shape, groups)?;
        let weight = match channels == 1 && groups == outputs && outputs > 1 {
            true => layout.depthwise(factors, outputs)?,
            false => {
                let pack = |group| {
                    let (signed, shape) = layout.signed(group)?;
                    Packed::of(signed, shape, factors).map_err(|error| error.to_string())
                };
                Weight::Matrices((0..groups).map(pack).collect::<Result<_, String>>()?)
            }
        };
        Ok(Self {
            shape,
            groups,
            factors,
            weight,
        })
    }

    /// How many groups of channels do not see each other.
    pub(crate) fn groups(&self) -> usize {
        self.groups
    }

    /// Bytes that it takes in memory.
    pub(crate) fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Matrices(matrices) => matrices.iter().map(Packed::bytes).sum(),
            Weight::Depthwise(kernel, scale) => kernel.bytes() + 4 * scale.len(),
        }
    }

    /// Of each group.
    fn epilogues(&self, bias: Option<&[f32]>) -> Vec<Epilogue> {
        match &self.weight {
            Weight::Matrices(matrices) => {
                let outputs = self.shape[0] / self.groups;
                let of_group = |(group, matrix): (usize, &Packed)| {
                    let bias = bias.map(|bias| &bias[group * outputs..][..outputs]);
                    matrix.epilogue(bias)
                };
                matrices.iter().enumerate().map(of_group).collect()
            }
            Weight::Depthwise(_, scale) => {
                let epilogue = Epilogue::new(scale.len()).with_scale(scale);
                vec![match bias {
                    Some(bias) => epilogue.with_bias(bias),
                    None => epilogue,
                }]
            }
        }
    }

    /// The outputs `[batch, outputs, height, width]` of images `[batch, channels, height, width]` that are rounded to
    /// this grid. `None` where they cannot be, where no window fits, and unless it is multiplied by integers.
    fn of_integers(
        &self,
        x: &[f32],
        scene: Scene,
        grid: CodeGrid,
        ends: &mut [Epilogue],
    ) -> Option<Vec<f32>> {
        let codes = codes_last(x, [scene.channels(), scene.pixels()], grid)?;
        let windows = Windows::new(&codes, scene.images, scene.geometry)?;
        let pixels: usize = windows.output().iter().product();
        let rows = scene.images[0] * pixels;
        let outputs = self.shape[0];
        let mut y = vec![0.0; rows * outputs];
        let mut scale = Some(vec![grid.scale; rows]);
        match &self.weight {
            Weight::Depthwise(kernel, _) => {
                let ends = &mut ends[0];
                ends.replace_row_scale(scale);
                kernel.convolve(&windows, ends, &mut y);
                ends.replace_row_scale(None);
            }
            Weight::Matrices(matrices) => {
                let (channels, columns) = (self.shape[1], outputs / self.groups);
                for (group, (packed, ends)) in matrices.iter().zip(ends).enumerate() {
                    let Matrix::Integers(matrix) = &packed.matrix else {
                        return None;
                    };
                    let windows = windows.group(group * channels, channels);
                    ends.replace_row_scale(scale);
                    matrix.multiply_into(&windows, ends, &mut y, outputs, group * columns);
                    scale = ends.replace_row_scale(None);
                }
            }
        }
        Some(channels_first(y, scene.images[0], pixels, outputs))
    }

    /// The same of floats as they are; `None` where one is not finite, where no window fits, and unless it is multiplied
    /// by floats.
    fn of_floats(&self, x: &[f32], scene: Scene, ends: &[Epilogue]) -> Option<Vec<f32>> {
        let Weight::Matrices(matrices) = &self.weight else {
            return None;
        };
        if !are_finite(x) {
            return None;
        }
        let last;
        let x = match scene.channels() == 1 || scene.pixels() == 1 {
            true => x,
            false => {
                last = transpose(x, scene.images[0], scene.channels(), scene.pixels());
                &last[..]
            }
        };
        let windows = Windows::new(x, scene.images, scene.geometry)?;
        let pixels: usize = windows.output().iter().product();
        let outputs = self.shape[0];
        let (channels, columns) = (self.shape[1], outputs / self.groups);
        let mut y = vec![0.0; scene.images[0] * pixels * outputs];
        for (group, (packed, ends)) in matrices.iter().zip(ends).enumerate() {
            let Matrix::Floats(matrix) = &packed.matrix else {
                return None;
            };
            let windows = windows.group(group * channels, channels);
            matrix.multiply_into(&windows, ends, &mut y, outputs, group * columns);
        }
        Some(channels_first(y, scene.images[0], pixels, outputs))
    }

    /// The convolution of images of −1, 0 and 1, in steps of 1 and without padding.
    pub(crate) fn of_comb(&self, x: &Tensor<4>) -> Tensor<4> {
        let data = x.clone().into_data();
        let numbers = data.as_slice::<f32>().expect("combs are of F32");
        let [batch, channels, height, width] = x.dims();
        let geometry = Geometry {
            kernel: [self.shape[2], self.shape[3]],
            stride: [1; 2],
            padding: [[0; 2]; 2],
            dilation: [1; 2],
        };
        let scene = Scene {
            images: [batch, height, width, channels],
            geometry,
        };
        let mut ends = self.epilogues(None);
        let y = match self.factors {
            Factors::Floats => self.of_floats(numbers, scene, &ends),
            _ => self.of_integers(numbers, scene, UNIT, &mut ends),
        };
        let y = y.expect("combs are finite, and have windows");
        let [height, width] = geometry.output([height, width]).unwrap_or_default();
        let data = TensorData::new(y, [batch, self.shape[0], height, width]);
        Tensor::from_data(data, (&x.device(), DType::F32))
    }
}

/// The codes of a kernel, and which of them share a scale.
struct Layout<'a> {
    codes: Codes,
    scale: &'a [f32],
    /// The group of each code.
    of: Vec<usize>,
    /// Where in the numbers of an output those of a window are, whose channels come last.
    places: Vec<usize>,
    /// Outputs of a group of channels.
    outputs: usize,
}

impl<'a> Layout<'a> {
    fn of(
        quantized: &'a QuantizedTensor,
        [outputs, channels, height, width]: [usize; 4],
        groups: usize,
    ) -> Result<Self, String> {
        let taps = height * width;
        let of_tap = |tap| (0..channels).map(move |channel| channel * taps + tap);
        let shared = quantized.groups().map_err(|error| error.to_string())?;
        Ok(Self {
            codes: Codes::of(quantized)?,
            scale: quantized.scale(),
            of: shared.of_all().collect(),
            places: (0..taps).flat_map(of_tap).collect(),
            outputs: outputs / groups,
        })
    }

    /// The matrix of a group of channels, and its shape.
    fn signed(&self, group: usize) -> Result<(Signed, [usize; 2]), String> {
        let (rows, columns) = (self.places.len(), self.outputs);
        let at = |row: usize, column: usize| {
            let output = group * columns + column;
            output * rows + self.places[row]
        };
        // The largest blocks in which no column changes its scale.
        let mut block = rows;
        for column in 0..columns {
            for row in 1..rows {
                if self.of[at(row, column)] != self.of[at(row - 1, column)] {
                    block = greatest_common_divisor(block, row);
                }
            }
        }
        if block < rows && block < LEAST_BLOCK {
            return Err(format!(
                "of its windows {block} numbers in a row share a scale, and kernels need {LEAST_BLOCK}"
            ));
        }
        let of_blocks = |of_groups: &[f32]| -> Vec<f32> {
            let starts = (0..rows).step_by(block);
            let of_block = |row| {
                let columns = 0..columns;
                columns.map(move |column| of_groups[self.of[at(row, column)]])
            };
            starts.flat_map(of_block).collect()
        };
        let of_row = |row| (0..columns).map(move |column| self.codes.codes[at(row, column)]);
        let signed = Signed {
            codes: (0..rows).flat_map(of_row).collect(),
            bits: self.codes.bits,
            rows: block,
            scales: of_blocks(self.scale),
            offsets: self.codes.offsets.as_deref().map(of_blocks),
        };
        Ok((signed, [rows, columns]))
    }

    /// Of one channel for each output.
    fn depthwise(&self, factors: Factors, channels: usize) -> Result<Weight, String> {
        let taps = self.places.len();
        let of_channel = |channel: usize| &self.of[channel * taps..][..taps];
        let has_one_scale = |channel: usize| {
            let of = of_channel(channel);
            of.iter().all(|group| *group == of[0])
        };
        let is_plain = self.codes.offsets.is_none() && (0..channels).all(has_one_scale);
        if factors != Factors::Integers || !is_plain {
            return Err(
                "it may be depthwise, and there kernels multiply integers alone, by codes of one scale for \
                 each channel around 0"
                    .into(),
            );
        }
        if taps > MOST_TAPS {
            return Err("its sums may be beyond 32 bits".into());
        }
        let of_tap = |tap| (0..channels).map(move |channel| self.codes.codes[channel * taps + tap]);
        let codes: Vec<i8> = (0..taps).flat_map(of_tap).collect();
        let kernel = Depthwise::new(&codes, taps, channels).map_err(|error| error.to_string())?;
        let scale = (0..channels).map(|channel| self.scale[of_channel(channel)[0]]);
        Ok(Weight::Depthwise(kernel, scale.collect()))
    }
}

/// A layer as kernels convolve.
struct Layer<'a, const D: usize> {
    weight: &'a Param<Tensor<D>>,
    bias: Option<&'a Param<Tensor<1>>>,
    groups: usize,
    geometry: Geometry,
}

/// The output of a layer whose weight was converted so that a kernel multiplies by its codes, with its
/// quantizers; `None` where it is to be computed by Burn, from values.
pub(crate) fn conv1d(layer: &Conv1d, x: &Tensor<3>) -> Option<Tensor<3>> {
    let [_, _, length] = x.dims();
    let (left, right) = padding_1d(layer, length);
    let of = Layer {
        weight: &layer.weight,
        bias: layer.bias.as_ref(),
        groups: layer.groups,
        geometry: Geometry {
            kernel: [1, layer.kernel_size],
            stride: [1, layer.stride],
            padding: [[0, left], [0, right]],
            dilation: [1, layer.dilation],
        },
    };
    convolve(&of, x, |x| layer.forward(x))
}

/// As [`conv1d`].
pub(crate) fn conv2d(layer: &Conv2d, x: &Tensor<4>) -> Option<Tensor<4>> {
    let [_, _, height, width] = x.dims();
    let [(top, bottom), (left, right)] = padding(layer, [height, width]);
    let of = Layer {
        weight: &layer.weight,
        bias: layer.bias.as_ref(),
        groups: layer.groups,
        geometry: Geometry {
            kernel: layer.kernel_size,
            stride: layer.stride,
            padding: [[top, left], [bottom, right]],
            dilation: layer.dilation,
        },
    };
    convolve(&of, x, |x| layer.forward(x))
}

fn convolve<const D: usize>(
    layer: &Layer<'_, D>,
    x: &Tensor<D>,
    of_values: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Option<Tensor<D>> {
    let quantizers = acting(layer.weight, x)?;
    let groups = layer.groups;
    let factors = Factors::of(quantizers.input.as_ref());
    let tried = quantizers.weight.packed(
        |tried: &Tried<PackedConvolution>| tried.factors == factors && tried.groups == groups,
        || {
            let asked = (factors, groups);
            Tried::new(layer.weight, quantizers, asked, |codes| {
                PackedConvolution::new(codes, factors, groups)
            })
        },
    );
    let packed = tried.packed.as_ref()?;
    let dims = x.dims();
    let [batch, channels, height, width] = extents(&dims)?;
    let [outputs, per_group, down, across] = packed.shape;
    let mut geometry = layer.geometry;
    geometry.kernel = [down, across];
    // What Burn refuses, it is to refuse.
    if channels != per_group * groups || geometry.dilation.contains(&0) {
        return None;
    }
    let output = geometry.output([height, width])?;
    let scene = Scene {
        images: [batch, height, width, channels],
        geometry,
    };
    let make = |bias: Option<&[f32]>| packed.epilogues(bias);
    let y = match factors {
        Factors::Floats => {
            let x = quantizers.quantize_input(x.clone());
            let data = x.clone().into_data();
            let found = data.as_slice::<f32>().ok().and_then(|x| {
                let multiply = |ends: &mut [Epilogue]| packed.of_floats(x, scene, ends);
                tried.ends.with(layer.bias, make, multiply).flatten()
            });
            match found {
                Some(y) => y,
                // Its range was observed, which is not to happen twice.
                None => return Some(quantizers.quantize_output(of_values(x))),
            }
        }
        _ => {
            let input = quantizers.input.as_ref()?;
            let grids = grids(&input.rounds_with(x)?, input.scheme(), &dims)?;
            let [grid] = grids[..] else {
                return None;
            };
            let data = x.clone().into_data();
            let x = data.as_slice::<f32>().ok()?;
            let multiply = |ends: &mut [Epilogue]| packed.of_integers(x, scene, grid, ends);
            let y = tried.ends.with(layer.bias, make, multiply)??;
            input.called();
            y
        }
    };
    let shape: [usize; D] = std::array::from_fn(|axis| match axis {
        0 => batch,
        1 => outputs,
        axis if axis + 1 == D => output[1],
        _ => output[0],
    });
    let y = Tensor::from_data(TensorData::new(y, shape), (&x.device(), DType::F32));
    Some(quantizers.quantize_output(y))
}

fn are_finite(x: &[f32]) -> bool {
    // The bits of numbers without a sign are ordered as the numbers, infinity and NaN last.
    let largest = |part: &[f32]| {
        let bits = part.iter().map(|x| x.abs().to_bits());
        bits.fold(0, u32::max)
    };
    x.chunks(1024)
        .all(|part| f32::from_bits(largest(part)).is_finite())
}

/// The codes of images `[batch, channels, pixels]` as `[batch, pixels, channels]`; `None` where a number is not finite.
fn codes_last(x: &[f32], [channels, pixels]: [usize; 2], grid: CodeGrid) -> Option<Vec<i16>> {
    if channels == 1 || pixels == 1 {
        return codes(x, 1, &[grid]);
    }
    let mut codes = vec![0; x.len()];
    let are_finite = in_shares(&mut codes, channels, |first, codes| {
        let mut are_finite = true;
        let mut tile = [0; TILE];
        let (mut pixel, end) = (first, first + codes.len() / channels);
        while pixel < end {
            let (image, inside) = (pixel / pixels, pixel % pixels);
            let count = TILE.min(pixels - inside).min(end - pixel);
            let to = &mut codes[(pixel - first) * channels..][..count * channels];
            for channel in 0..channels {
                let from = (image * channels + channel) * pixels + inside;
                are_finite &= grid.quantize(&x[from..from + count], &mut tile[..count]);
                let places = to[channel..].iter_mut().step_by(channels);
                for (place, code) in places.zip(&tile) {
                    *place = *code;
                }
            }
            pixel += count;
        }
        are_finite
    });
    are_finite.into_iter().all(|is| is).then_some(codes)
}

/// Images `[batch, pixels, channels]` as `[batch, channels, pixels]`.
fn channels_first(y: Vec<f32>, batch: usize, pixels: usize, channels: usize) -> Vec<f32> {
    match pixels == 1 || channels == 1 {
        true => y,
        false => transpose(&y, batch, pixels, channels),
    }
}

#[cfg(test)]
mod tests;
