//! The rows `X` of a product, a chunk at a time.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::ops::PadMode;
use burn::tensor::{Int, Shape, Slice, Tensor};

use super::product::{Kernel, Kind, Product};
use super::sample::positions;

/// Calls `each` with the rows of `group`, at most `chunk` at a time; of a convolution, whole
/// examples.
pub(super) fn rows(
    product: &Product,
    operand: DispatchTensor,
    group: usize,
    chunk: usize,
    each: &mut impl FnMut(Tensor<2>),
) {
    let chunk = chunk.max(1);
    match &product.kind {
        Kind::Last => matrix_rows(operand, product.inputs, chunk, each),
        Kind::LastButOne => {
            let rank = operand.shape().num_dims();
            let operand = Dispatch::float_swap_dims(operand, rank - 2, rank - 1);
            matrix_rows(operand, product.inputs, chunk, each);
        }
        Kind::OneHot => {
            let count = operand.shape().num_elements();
            let indices = Dispatch::int_reshape(operand, Shape::new([count]));
            let indices = Tensor::<1, Int>::from_dispatch(indices);
            for start in (0..count).step_by(chunk) {
                let end = (start + chunk).min(count);
                let some = indices.clone().slice([start..end]);
                each(some.one_hot::<2>(product.inputs).float());
            }
        }
        Kind::Patches(kernel) => patches(product, kernel, operand, group, chunk, each),
    }
}

fn matrix_rows(x: DispatchTensor, inputs: usize, chunk: usize, each: &mut impl FnMut(Tensor<2>)) {
    let count = x.shape().num_elements() / inputs;
    let x = Tensor::<2>::from_dispatch(Dispatch::float_reshape(x, Shape::new([count, inputs])));
    for start in (0..count).step_by(chunk) {
        each(x.clone().slice([start..(start + chunk).min(count)]));
    }
}

fn patches(
    product: &Product,
    kernel: &Kernel,
    x: DispatchTensor,
    group: usize,
    chunk: usize,
    each: &mut impl FnMut(Tensor<2>),
) {
    let shape = x.shape().to_vec();
    let channels = product.inputs / kernel.size.iter().product::<usize>();
    let positions: usize = positions(kernel, &x.shape()).iter().product();
    let examples = (chunk / positions.max(1)).max(1);
    for start in (0..shape[0]).step_by(examples) {
        let count = examples.min(shape[0] - start);
        let mut ranges = vec![slice(start, count, 1), slice(group * channels, channels, 1)];
        ranges.extend(shape[2..].iter().map(|size| slice(0, *size, 1)));
        each(kernel.patches(Dispatch::float_slice(x.clone(), &ranges)));
    }
}

impl Kernel {
    /// What it sees of the float tensor `x`, `[batch, channels, …]`, at each of its places:
    /// `[batch · places, channels · elements]`.
    ///
    /// # Panics
    ///
    /// Unless `x` has two axes more than the kernel, and room for it.
    pub fn patches(&self, x: DispatchTensor) -> Tensor<2> {
        let shape = x.shape();
        let (count, channels) = (shape[0], shape[1]);
        let out = positions(self, &shape);
        let positions: usize = out.iter().product();
        let elements: usize = self.size.iter().product();
        if count == 0 {
            let shape = Shape::new([0, channels * elements]);
            return Tensor::from_dispatch(Dispatch::float_reshape(x, shape));
        }
        let x = match self.padding.iter().all(|pad| *pad == (0, 0)) {
            true => x,
            false => {
                let padding = [(0, 0), (0, 0)].into_iter();
                let padding: Vec<(usize, usize)> =
                    padding.chain(self.padding.iter().copied()).collect();
                Dispatch::float_pad(x, &padding, PadMode::Constant(0.0))
            }
        };
        let seen: Vec<DispatchTensor> = (0..elements)
            .map(|element| {
                let mut ranges = vec![slice(0, count, 1), slice(0, channels, 1)];
                let mut rest = element;
                let mut starts = vec![0; out.len()];
                for d in (0..out.len()).rev() {
                    starts[d] = (rest % self.size[d]) * self.dilation[d];
                    rest /= self.size[d];
                }
                for (d, start) in starts.into_iter().enumerate() {
                    ranges.push(slice(start, out[d], self.stride[d]));
                }
                let seen = Dispatch::float_slice(x.clone(), &ranges);
                Dispatch::float_reshape(seen, Shape::new([count, channels, 1, positions]))
            })
            .collect();
        let patches = Dispatch::float_cat(seen, 2);
        let patches = Dispatch::float_permute(patches, &[0, 3, 1, 2]);
        let shape = Shape::new([count * positions, channels * elements]);
        Tensor::from_dispatch(Dispatch::float_reshape(patches, shape))
    }
}

/// `count` elements from `start` on, every `step`-th.
fn slice(start: usize, count: usize, step: usize) -> Slice {
    let end = start + (count - 1) * step + 1;
    Slice::new(start as isize, Some(end as isize), step as isize)
}
