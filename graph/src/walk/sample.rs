//! Some of the rows of a product, on the host.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice, Tensor};

use super::lane::unread;
use super::product::{Kernel, Kind, Product};
use super::rows::rows;
use super::{Pass, Step, Walk};
use crate::{GraphError, Tensors};

impl<O: Tensors> Walk<O> {
    /// The number of rows of a product over all batches, for each group: known before anything is
    /// computed.
    pub fn row_count(&self, product: &Product) -> usize {
        let rows = |batch: usize| {
            let product = self.of_batch(product, batch);
            count(&product, &product.input.shape)
        };
        (0..self.lanes.len()).map(rows).sum()
    }
}

impl<O: Tensors> Step<'_, O> {
    /// The number of rows of a product in a batch, for each group.
    ///
    /// # Errors
    ///
    /// [`GraphError::Spill`] where the operand cannot be read back, [`GraphError::NotAlive`] for a product of
    /// another operation.
    pub fn row_count(
        &mut self,
        product: &Product,
        batch: usize,
        pass: Pass,
    ) -> Result<usize, GraphError> {
        let shape = self.walk.value(batch, product.input.id, pass)?.shape();
        Ok(count(&self.walk.of_batch(product, batch), &shape))
    }

    /// Rows `first`, `first + stride`, … of a product in a batch, `[n, inputs]` row by row in F32:
    /// those of [`rows`](Self::rows) without unfolding the others.
    ///
    /// # Errors
    ///
    /// [`GraphError::Spill`] where the operand cannot be read back, [`GraphError::Device`] where
    /// the device cannot be read, [`GraphError::NotAlive`] for a product of another operation.
    pub fn sampled_rows(
        &mut self,
        product: &Product,
        batch: usize,
        pass: Pass,
        group: usize,
        first: usize,
        stride: usize,
    ) -> Result<Vec<f32>, GraphError> {
        let value = self.walk.value(batch, product.input.id, pass)?;
        let product = &self.walk.of_batch(product, batch);
        let stride = stride.max(1);
        if let Kind::Patches(kernel) = &product.kind {
            let value = channels_of(product, kernel, value, group);
            let shape = value.shape();
            let values = host(value)?;
            return Ok(patches(product, kernel, &shape, &values, first, stride));
        }
        let mut all = Vec::new();
        let mut failed = None;
        rows(
            product,
            value,
            group,
            usize::MAX,
            &mut |x| match host(x.into_dispatch()) {
                Ok(values) => all.extend(values),
                Err(error) => failed = Some(error),
            },
        );
        let some = all.chunks_exact(product.inputs).skip(first).step_by(stride);
        match failed {
            Some(error) => Err(error),
            None if (first, stride) == (0, 1) => Ok(all),
            None => Ok(some.flatten().copied().collect()),
        }
    }
}

/// The values of a float tensor in F32.
fn host(tensor: DispatchTensor) -> Result<Vec<f32>, GraphError> {
    let count = tensor.shape().num_elements();
    let flat = Dispatch::float_reshape(tensor, Shape::new([count]));
    let flat = Tensor::<1>::from_dispatch(Dispatch::float_cast(flat, FloatDType::F32));
    let data = flat.try_into_data().map_err(unread)?;
    // Burn on CubeCL leaves Flex32, which is stored so, as it is.
    data.try_into_vec_as::<f32>().map_err(unread)
}

/// The channels that a group of a convolution reads: of a depthwise one a small part of all.
fn channels_of(
    product: &Product,
    kernel: &Kernel,
    value: DispatchTensor,
    group: usize,
) -> DispatchTensor {
    if product.groups == 1 {
        return value;
    }
    let channels = product.inputs / kernel.size.iter().product::<usize>();
    let shape = value.shape().to_vec();
    let ranges = shape.iter().enumerate().map(|(axis, size)| match axis {
        1 => group * channels..(group + 1) * channels,
        _ => 0..*size,
    });
    let slices = ranges.map(|range| Slice::new(range.start as isize, Some(range.end as isize), 1));
    Dispatch::float_slice(value, &slices.collect::<Vec<_>>())
}

/// Rows of a product whose operand has that shape.
fn count(product: &Product, shape: &Shape) -> usize {
    match &product.kind {
        Kind::Patches(kernel) => shape[0] * positions(kernel, shape).iter().product::<usize>(),
        Kind::OneHot => shape.num_elements(),
        _ => shape.num_elements() / product.inputs.max(1),
    }
}

/// Places of the kernel along each dimension.
pub(super) fn positions(kernel: &Kernel, shape: &Shape) -> Vec<usize> {
    (0..kernel.size.len())
        .map(|d| {
            let (before, after) = kernel.padding[d];
            let reach = kernel.dilation[d] * (kernel.size[d] - 1) + 1;
            (shape[d + 2] + before + after - reach) / kernel.stride[d] + 1
        })
        .collect()
}

/// Rows of one group, from its channels.
fn patches(
    product: &Product,
    kernel: &Kernel,
    shape: &Shape,
    values: &[f32],
    first: usize,
    stride: usize,
) -> Vec<f32> {
    let places: usize = kernel.size.iter().product();
    let out = positions(kernel, shape);
    let per_example: usize = out.iter().product();
    let area: usize = shape[2..].iter().product();
    let count = (shape[0] * per_example)
        .saturating_sub(first)
        .div_ceil(stride);
    let mut all = vec![0.0; count * product.inputs];
    for (at, row) in all.chunks_exact_mut(product.inputs).enumerate() {
        let position = first + at * stride;
        let example = position / per_example;
        let start = example * shape[1] * area;
        for place in 0..places {
            let Some(offset) = offset(kernel, shape, &out, position % per_example, place) else {
                continue;
            };
            let from = values[start + offset..].iter().step_by(area);
            let to = row[place..].iter_mut().step_by(places);
            to.zip(from).for_each(|(to, from)| *to = *from);
        }
    }
    all
}

/// Where a place of the kernel reads in a channel; `None` in the padding.
fn offset(
    kernel: &Kernel,
    shape: &Shape,
    out: &[usize],
    mut position: usize,
    mut place: usize,
) -> Option<usize> {
    let (mut offset, mut scale) = (0, 1);
    for d in (0..out.len()).rev() {
        let start = position % out[d] * kernel.stride[d];
        let at = start + place % kernel.size[d] * kernel.dilation[d];
        let at = at.checked_sub(kernel.padding[d].0)?;
        if at >= shape[d + 2] {
            return None;
        }
        offset += at * scale;
        scale *= shape[d + 2];
        position /= out[d];
        place /= kernel.size[d];
    }
    Some(offset)
}
