//! Whether a kernel may convolve by the codes of a weight.
//!
//! Stride, padding, dilation and the number of groups are the layer's, and are not seen with its weight. They do not
//! change what is summed of a window, so that windows alone are looked at, in steps of 1 and without padding: of one group
//! and, with one channel for each output, of as many groups as outputs.

use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor};

use super::comb::Comb;
use super::speed::{self, Rest, Rounding};
use super::{Compared, Factors, ROWS, numbers_of};
use crate::QuantizedTensor;
use crate::codes::kernel::PackedConvolution;
use crate::range::observer::read;

/// Sides of the outputs whose time is measured, where they do not take more multiplications than [`MOST`]; along one axis
/// their squares.
const SIDES: [usize; 3] = [1, 8, 32];

/// Multiplications of a convolution whose time is measured: about a millisecond of a core.
const MOST: usize = 1 << 24;

/// The kernel of a convolution `[outputs, channels / groups, height, width]`: its codes, and its values.
#[derive(Debug)]
pub(super) struct Convolution {
    /// For each number of groups that it may have.
    codes: Vec<PackedConvolution>,
    values: Tensor<4>,
    factors: Factors,
    is_along_one_axis: bool,
}

impl Convolution {
    /// # Errors
    ///
    /// Why there is no such kernel.
    pub(super) fn of(
        device: &Device,
        quantized: &QuantizedTensor,
        factors: Factors,
    ) -> Result<Self, String> {
        let values = match *quantized.shape() {
            [outputs, channels, width] => {
                let values = quantized.dequantize::<3>(device);
                values.map(|values| values.reshape([outputs, channels, 1, width]))
            }
            _ => quantized.dequantize::<4>(device),
        };
        let values = values.map_err(|error| error.to_string())?;
        let [outputs, channels, ..] = values.dims();
        let groups = match channels == 1 && outputs > 1 {
            true => vec![1, outputs],
            false => vec![1],
        };
        let packed = groups
            .into_iter()
            .map(|groups| PackedConvolution::new(quantized, factors, groups));
        Ok(Self {
            codes: packed.collect::<Result<_, _>>()?,
            values,
            factors,
            is_along_one_axis: quantized.shape().len() == 3,
        })
    }

    /// Bytes that a kernel takes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.codes
            .iter()
            .map(PackedConvolution::bytes)
            .max()
            .unwrap_or(0)
    }

    fn of_values(&self, x: &Tensor<4>, groups: usize) -> Tensor<4> {
        let options = ConvOptions::new([1, 1], [0, 0], [1, 1], groups);
        conv2d(x.clone(), self.values.clone(), None, options)
    }

    /// Extents of the outputs whose time is measured.
    fn sizes(&self) -> Vec<[usize; 2]> {
        let weights: usize = self.values.dims().iter().product();
        let most = (MOST / weights.max(1)).max(1);
        let size = |side: usize| match self.is_along_one_axis {
            true => [1, (side * side).min(most)],
            false => [side.min(most.isqrt()); 2],
        };
        let mut sizes: Vec<[usize; 2]> = SIDES.map(size).to_vec();
        sizes.dedup();
        sizes
    }
}

impl Compared for Convolution {
    fn check(&self) -> Result<(), String> {
        let [outputs, channels, height, width] = self.values.dims();
        let terms = channels * height * width;
        let numbers = read(self.values.clone()).map_err(|error| error.to_string())?;
        for packed in &self.codes {
            let groups = packed.groups();
            for rows in ROWS {
                let comb = Comb {
                    rows,
                    inputs: groups * terms,
                };
                let x = comb.tensor([rows, groups * channels, height, width], &self.values);
                let floats = numbers_of(|| self.of_values(&x, groups))?;
                let codes = numbers_of(|| packed.of_comb(&x))?;
                let sums = comb.through(&numbers, outputs, groups);
                let of = format!("convolution of {rows} windows");
                sums.judge([&floats, &codes], f64::from(f32::EPSILON), &of)?;
            }
        }
        Ok(())
    }

    fn compare_speed(&self, rest: &Rest) -> Result<(), String> {
        let [_, channels, height, width] = self.values.dims();
        let device = self.values.device();
        let rounding = Rounding::of(self.factors, &device);
        for packed in &self.codes {
            let groups = packed.groups();
            for [down, across] in self.sizes() {
                let image = [1, groups * channels, down + height - 1, across + width - 1];
                let comb = Comb {
                    rows: 1,
                    inputs: image.iter().product(),
                };
                let x = comb.tensor(image, &self.values);
                let of_values = || self.of_values(&rounding.apply(&x), groups);
                let both: [&dyn Fn() -> Tensor<4>; 2] = [&of_values, &|| packed.of_comb(&x)];
                let of = format!("convolution to {down} × {across} outputs");
                speed::compare(&device, rest, both, &of)?;
            }
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::{Granularity, NumberFormat, Scheme};

    fn quantized(shape: &[usize]) -> QuantizedTensor {
        let scheme = Scheme::symmetric(NumberFormat::int8().narrow())
            .with_granularity(Granularity::PerChannel { axis: 0 });
        let count: usize = shape.iter().product();
        let codes = (0..count as i32).map(|i| (i * 37) % 255 - 127).collect();
        let scale = (0..shape[0]).map(|output| 0.01 + output as f32 * 0.001);
        let scale: Vec<f32> = scale.collect();
        let zeros = vec![0.0; scale.len()];
        QuantizedTensor::new(codes, shape.to_vec(), scale, zeros, scheme).unwrap()
    }

    #[test]
    fn a_convolution_of_other_numbers_is_found_in_every_number_of_the_kernel() {
        let device = Device::flex();
        for shape in [vec![4, 3, 2, 3], vec![3, 2, 5], vec![6, 1, 2, 3]] {
            let quantized = quantized(&shape);
            for factors in [Factors::Floats, Factors::Integers] {
                let look = Convolution::of(&device, &quantized, factors);
                // Where each output has one channel, it may be depthwise.
                if shape[1] == 1 && factors == Factors::Floats {
                    assert!(look.unwrap_err().contains("it may be depthwise"));
                    continue;
                }
                let right = look.unwrap();
                assert_eq!(right.check(), Ok(()), "{shape:?} {factors:?}");
                let dims = right.values.dims();
                let numbers = read(right.values.clone()).unwrap();
                for at in 0..numbers.len() {
                    let mut wrong = numbers.clone();
                    wrong[at] += 0.5;
                    let data = burn::tensor::TensorData::new(wrong, dims);
                    let values = Tensor::from_data(data, &device);
                    let convolution = Convolution {
                        values,
                        ..Convolution::of(&device, &quantized, factors).unwrap()
                    };
                    // Floats give other sums than codes, and are right.
                    let reason = convolution.check().unwrap_err();
                    assert!(reason.contains("is off by"), "{reason}");
                }
            }
        }
    }

    #[test]
    fn no_more_is_measured_than_takes_milliseconds() {
        let device = Device::flex();
        let sizes = |shape: &[usize]| {
            let convolution = Convolution::of(&device, &quantized(shape), Factors::Integers);
            convolution.unwrap().sizes()
        };
        assert_eq!(sizes(&[32, 3, 3, 3]), [[1, 1], [8, 8], [32, 32]]);
        assert_eq!(sizes(&[8, 4, 3]), [[1, 1], [1, 64], [1, 1024]]);
        // 147,456 weights: 113 outputs.
        assert_eq!(sizes(&[128, 128, 3, 3]), [[1, 1], [8, 8], [10, 10]]);
    }
}
