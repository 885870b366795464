//! Convolutions along one or two axes.

use std::sync::Arc;

use burn_lean_kernels::{Depthwise, FloatMatrix, Geometry, IntegerMatrix, Windows};

use super::failed;
use super::linear::Ends;
use super::value::{Floats, Value, channels_last};
use crate::DeployError;

/// A convolution, and what follows.
#[derive(Debug)]
pub(super) struct Convolution {
    pub(super) kernel: Arc<Kernel>,
    pub(super) geometry: Geometry,
    pub(super) channels: [usize; 2],
    /// One for each group.
    pub(super) ends: Vec<Arc<Ends>>,
}

#[derive(Debug)]
pub(super) enum Kernel {
    /// One matrix for each group, `[taps · channels, outputs]`.
    Codes(Vec<IntegerMatrix>),
    Floats(Vec<FloatMatrix>),
    DepthwiseCodes(Depthwise<i8>),
    DepthwiseFloats(Depthwise<f32>),
}

impl Kernel {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Codes(groups) => groups.iter().map(IntegerMatrix::bytes).sum(),
            Self::Floats(groups) => groups.iter().map(FloatMatrix::bytes).sum(),
            Self::DepthwiseCodes(kernel) => kernel.bytes(),
            Self::DepthwiseFloats(kernel) => kernel.bytes(),
        }
    }
}

/// `[batch, height, width, channels]`; one axis alone is the width.
fn images(shape: &[usize], channels: usize) -> Result<[usize; 4], DeployError> {
    match *shape {
        [batch, of, height, width] if of == channels => Ok([batch, height, width, channels]),
        [batch, of, width] if of == channels => Ok([batch, 1, width, channels]),
        _ => Err(failed(format!(
            "images of {channels} channels, not {shape:?}"
        ))),
    }
}

impl Convolution {
    pub(super) fn run(&self, x: Value) -> Result<Floats, DeployError> {
        let [from, to] = self.channels;
        let too_small = || failed("an input is smaller than the window of a convolution");
        let output = |shape: &[usize], [height, width]: [usize; 2]| {
            let mut made = vec![shape[0], to];
            if shape.len() == 4 {
                made.push(height);
            }
            made.push(width);
            let data = vec![0.0; made.iter().product()];
            (made, data)
        };
        let (shape, data) = match (&*self.kernel, x) {
            (Kernel::Codes(_) | Kernel::DepthwiseCodes(_), Value::Codes(x)) if x.last => {
                let size = images(&x.shape, from)?;
                let windows = Windows::new(&x.codes, size, self.geometry).ok_or_else(too_small)?;
                let (shape, mut data) = output(&x.shape, windows.output());
                match &*self.kernel {
                    Kernel::Codes(groups) => {
                        let (inputs, outputs) = (from / groups.len(), to / groups.len());
                        for (index, matrix) in groups.iter().enumerate() {
                            let windows = windows.group(index * inputs, inputs);
                            let first = index * outputs;
                            self.ends[index].with(&x.scale, |ends| {
                                matrix.multiply_into(&windows, ends, &mut data, to, first);
                            });
                        }
                    }
                    Kernel::DepthwiseCodes(kernel) => self.ends[0].with(&x.scale, |ends| {
                        kernel.convolve(&windows, ends, &mut data);
                    }),
                    _ => {}
                }
                let image = shape[1..].iter().product();
                x.spoil(&mut data, image);
                (shape, data)
            }
            (Kernel::Floats(_) | Kernel::DepthwiseFloats(_), x) => {
                let x = channels_last(x.floats()?);
                let size = images(&x.shape, from)?;
                let windows = Windows::new(&x.data, size, self.geometry).ok_or_else(too_small)?;
                let (shape, mut data) = output(&x.shape, windows.output());
                match &*self.kernel {
                    Kernel::Floats(groups) => {
                        let (inputs, outputs) = (from / groups.len(), to / groups.len());
                        for (index, matrix) in groups.iter().enumerate() {
                            let windows = windows.group(index * inputs, inputs);
                            let ends = &self.ends[index].epilogue;
                            let first = index * outputs;
                            matrix.multiply_into(&windows, ends, &mut data, to, first);
                        }
                    }
                    Kernel::DepthwiseFloats(kernel) => {
                        kernel.convolve(&windows, &self.ends[0].epilogue, &mut data);
                    }
                    _ => {}
                }
                (shape, data)
            }
            _ => return Err(failed("a convolution of codes got no codes")),
        };
        Ok(Floats {
            shape,
            data,
            last: true,
        })
    }
}
