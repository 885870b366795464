//! The largest numbers of windows.

use burn_lean_kernels::{Geometry, in_shares};

use super::failed;
use super::value::Floats;
use crate::DeployError;

/// Windows of a pooling along one or two axes, as a convolution has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pool {
    pub(super) geometry: Geometry,
    /// Whether the last window along an axis may reach beyond the padding.
    pub(super) ceil: bool,
}

impl Pool {
    /// Of images with the channels last; NaN of a window with NaN.
    pub(super) fn largest(&self, x: &Floats) -> Result<Floats, DeployError> {
        let geometry = &self.geometry;
        let [batch, channels, height, width] = match x.shape[..] {
            [batch, channels, height, width] => [batch, channels, height, width],
            [batch, channels, width] => [batch, channels, 1, width],
            _ => return Err(failed(format!("no images: {:?}", x.shape))),
        };
        let output = self.output([height, width]);
        let [rows, columns] = output.ok_or_else(|| failed("an image is smaller than a window"))?;
        let mut data = vec![f32::NEG_INFINITY; batch * rows * columns * channels];
        in_shares(&mut data, channels, |first, data| {
            for (pixel, most) in (first..).zip(data.chunks_exact_mut(channels.max(1))) {
                let image = pixel / (rows * columns);
                let at = [pixel / columns % rows, pixel % columns];
                for tap in 0..geometry.kernel[0] * geometry.kernel[1] {
                    let tap = [tap / geometry.kernel[1], tap % geometry.kernel[1]];
                    let from = |axis: usize| {
                        (at[axis] * geometry.stride[axis] + tap[axis] * geometry.dilation[axis])
                            .wrapping_sub(geometry.padding[0][axis])
                    };
                    let (y, x_at) = (from(0), from(1));
                    if y >= height || x_at >= width {
                        continue;
                    }
                    let start = ((image * height + y) * width + x_at) * channels;
                    for (most, x) in most.iter_mut().zip(&x.data[start..start + channels]) {
                        *most = if *x > *most || x.is_nan() { *x } else { *most };
                    }
                }
            }
        });
        let mut shape = x.shape.clone();
        let rank = shape.len();
        shape[rank - 1] = columns;
        if rank == 4 {
            shape[2] = rows;
        }
        Ok(Floats {
            shape,
            data,
            last: true,
        })
    }

    /// How many windows images of these extents have, down and across, as Burn counts them; `None` where none fits.
    fn output(&self, input: [usize; 2]) -> Option<[usize; 2]> {
        if !self.ceil {
            return self.geometry.output(input);
        }
        let Geometry {
            kernel,
            stride,
            padding: [before, after],
            dilation,
        } = self.geometry;
        let mut output = [0; 2];
        for axis in 0..2 {
            let padded = input[axis] + before[axis] + after[axis];
            let reach = dilation[axis] * kernel[axis].checked_sub(1)? + 1;
            let steps = (padded + stride[axis]).checked_sub(reach + 1)?;
            let count = steps.checked_div(stride[axis])? + 1;
            // None begins behind the image.
            let is_behind = (count - 1) * stride[axis] >= input[axis] + before[axis];
            output[axis] = count - usize::from(is_behind);
        }
        Some(output)
    }
}

#[cfg(test)]
mod tests {
    use super::{Geometry, Pool};

    #[test]
    fn windows_are_counted_as_burn_counts_them() {
        let of = |ceil, size, kernel, stride, padding, dilation| {
            let geometry = Geometry {
                kernel: [1, kernel],
                stride: [1, stride],
                padding: [[0, padding]; 2],
                dilation: [1, dilation],
            };
            let output = Pool { geometry, ceil }.output([1, size]);
            output.map(|[rows, columns]| rows * columns)
        };
        assert_eq!(of(false, 6, 3, 2, 0, 1), Some(2));
        assert_eq!(of(true, 6, 3, 2, 0, 1), Some(3));
        assert_eq!(of(true, 7, 3, 2, 0, 1), Some(3));
        assert_eq!(of(true, 7, 3, 2, 0, 2), Some(2));
        // Another one would begin in the padding behind.
        assert_eq!(of(true, 5, 2, 3, 1, 1), Some(2));
        // One that reaches less than a step beyond the end, and one that reaches farther.
        assert_eq!(of(true, 2, 3, 2, 0, 1), Some(1));
        assert_eq!(of(true, 1, 3, 2, 0, 1), None);
        assert_eq!(of(false, 2, 3, 2, 0, 1), None);
    }
}
