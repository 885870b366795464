//! XᵀX and XᵀY of a product, from the rows of all batches.

use burn::tensor::Tensor;
use burn_lean_graph::{Pass, Product, Step, Tensors};
use burn_lean_layerwise::Gram;

use crate::PruneError;
use crate::fisher::gradient_matrix::read;
use crate::layerwise::failed;

/// Rows that are unfolded at once.
const CHUNK: usize = 16_384;

/// Which rows take part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    /// Batches that layers are fitted to: the first ones.
    pub(crate) batches: usize,
    /// Rows to sum over, about, at most.
    pub(crate) rows: usize,
}

/// Sums over the rows of `group`: inputs as they are now, targets of the dense network, of which the
/// weights of the group are `dense`, `[outputs, inputs]`. `differs` says whether the dense inputs are
/// others, `order` in which order the inputs are counted.
pub(crate) fn sum<O: Tensors>(
    step: &mut Step<'_, O>,
    product: &Product,
    group: usize,
    dense: &Tensor<2>,
    differs: bool,
    order: Option<&[usize]>,
    sampling: Sampling,
) -> Result<Gram, PruneError> {
    let [outputs, inputs] = dense.dims();
    let mut gram = Gram::with_targets(inputs, outputs);
    let stride = stride(step, product, group, sampling)?;
    let transposed = dense.clone().transpose();
    for batch in 0..sampling.batches {
        let mut rows = |pass| -> Result<Vec<Tensor<2>>, PruneError> {
            let mut parts = Vec::new();
            // Others in each batch, so that no place of an image is left out.
            let mut first = batch % stride;
            step.rows(product, batch, pass, group, CHUNK, |x| {
                let [count, width] = x.dims();
                if first < count {
                    let places = (count - first).div_ceil(stride);
                    parts.push(every(x, first, stride, places, width));
                    first += places * stride;
                }
                first -= count;
            })
            .map_err(failed)?;
            Ok(parts)
        };
        let now = rows(Pass::Replaced)?;
        let before = match differs {
            true => rows(Pass::Original)?,
            false => now.clone(),
        };
        for (x, original) in now.into_iter().zip(before) {
            let targets = read(original.matmul(transposed.clone()))?;
            let mut inputs = read(x)?;
            if let Some(order) = order {
                inputs = reordered(&inputs, order);
            }
            let added = gram.add_with_targets(&inputs, &targets);
            added.map_err(|source| PruneError::LayerSystem {
                path: product.parameter.path.clone(),
                source,
            })?;
        }
    }
    Ok(gram)
}

/// `places` rows from `first` on, `stride` apart.
fn every(x: Tensor<2>, first: usize, stride: usize, places: usize, width: usize) -> Tensor<2> {
    if stride == 1 {
        return x;
    }
    let last = first + (places - 1) * stride + 1;
    x.slice([
        burn::tensor::Slice::new(first as isize, Some(last as isize), stride as isize),
        burn::tensor::Slice::new(0, Some(width as isize), 1),
    ])
}

/// Rows `[n, d]` with their places in another order: `order[new]` is the old one.
pub(crate) fn reordered(rows: &[f32], order: &[usize]) -> Vec<f32> {
    let rows = rows.chunks_exact(order.len());
    rows.flat_map(|row| order.iter().map(|place| row[*place]))
        .collect()
}

/// How far apart the rows are that take part; odd, so that they pass over rows of an image.
fn stride<O: Tensors>(
    step: &mut Step<'_, O>,
    product: &Product,
    group: usize,
    sampling: Sampling,
) -> Result<usize, PruneError> {
    let mut total = 0;
    // Batches have about the same size.
    step.rows(product, 0, Pass::Replaced, group, CHUNK, |x| {
        total += x.dims()[0]
    })
    .map_err(failed)?;
    total *= sampling.batches;
    let stride = total.div_ceil(sampling.rows.max(1)).max(1);
    Ok(stride | 1)
}
