//! XᵀX and XᵀY of a product, from the rows of all batches.

use burn::tensor::Tensor;
use burn_lean_graph::{Pass, Product, Step, Tensors};
use burn_lean_layerwise::Gram;
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, get_global_parallelism};

use crate::PruneError;
use crate::host::read;
use crate::layerwise::failed;
use crate::layerwise::residual::{Rows, gains, make_up};
use crate::layerwise::stops::Site;

/// Which rows take part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    /// Batches that layers are fitted to: the first ones.
    pub(crate) batches: usize,
    /// Rows to sum over, about, at most.
    pub(crate) rows: usize,
}

/// Rows of a product that take part: in each batch every so many-th.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampled {
    batches: usize,
    stride: usize,
}

impl Sampling {
    /// Of a product; the rows of each of its groups are as many.
    pub(crate) fn of<O: Tensors>(
        self,
        step: &mut Step<'_, O>,
        product: &Product,
    ) -> Result<Sampled, PruneError> {
        let mut total = 0;
        for batch in 0..self.batches {
            total += step
                .row_count(product, batch, Pass::Replaced)
                .map_err(failed)?;
        }
        Ok(Sampled {
            batches: self.batches,
            // Odd, so that it passes over the columns of an image.
            stride: total.div_ceil(self.rows.max(1)).max(1) | 1,
        })
    }
}

impl Sampled {
    /// Batches in which rows are not those of the dense network: their order, or which of them take part,
    /// follows from the data and came out otherwise.
    pub(crate) fn own_targets<O: Tensors>(self, step: &Step<'_, O>, product: &Product) -> usize {
        let batches = 0..self.batches;
        batches
            .filter(|batch| !step.rows_correspond(product, *batch))
            .count()
    }
}

/// Sums over the rows of `group`: inputs as they are now, targets of the dense network, of which the
/// weights of the group are `dense`, `[outputs, inputs]`; where rows are not those of the dense network, what
/// these weights give for the inputs as they are now. `differs` says whether the dense inputs are
/// others, `order` in which order the inputs are counted.
pub(crate) fn sum<O: Tensors>(
    step: &mut Step<'_, O>,
    site: &Site,
    group: usize,
    dense: &Tensor<2>,
    differs: bool,
    order: Option<&[usize]>,
    sampled: Sampled,
) -> Result<Gram, PruneError> {
    let product = &site.product;
    let [outputs, inputs] = dense.dims();
    let mut gram = Gram::with_targets(inputs, outputs);
    let Sampled { batches, stride } = sampled;
    let weights = read(dense.clone())?;
    let made_up = match &site.residual {
        Some(residual) if differs => match &residual.norm {
            Some(norm) => Some((residual, gains(norm, step)?)),
            None => None,
        },
        _ => None,
    };
    for batch in 0..batches {
        // Others in each batch, so that no place of an image is left out.
        let first = batch % stride;
        let corresponds = step.rows_correspond(product, batch);
        let mut rows = |pass| {
            let rows = step.sampled_rows(product, batch, pass, group, first, stride);
            rows.map_err(failed)
        };
        let now = rows(Pass::Replaced)?;
        let targets = match differs && corresponds {
            true => {
                let mut targets = products(&rows(Pass::Original)?, &weights, inputs);
                if let Some((residual, gains)) = &made_up
                    && step.places_correspond(batch, residual.other)
                {
                    let rows = Rows {
                        batch,
                        first,
                        stride,
                        channels: group * outputs..(group + 1) * outputs,
                    };
                    make_up(residual, gains, step, &rows, &mut targets)?;
                }
                targets
            }
            false => products(&now, &weights, inputs),
        };
        let now = match order {
            Some(order) => reordered(&now, order),
            None => now,
        };
        let added = gram.add_with_targets(&now, &targets);
        added.map_err(|source| PruneError::LayerSystem {
            path: product.parameter.path.clone(),
            source,
        })?;
    }
    Ok(gram)
}

/// X Wᵀ `[rows, outputs]`.
fn products(rows: &[f32], weights: &[f32], inputs: usize) -> Vec<f32> {
    let (count, outputs) = (rows.len() / inputs, weights.len() / inputs);
    let mut targets = vec![0.0; count * outputs];
    matmul(
        MatMut::from_row_major_slice_mut(&mut targets, count, outputs),
        Accum::Replace,
        MatRef::from_row_major_slice(rows, count, inputs),
        MatRef::from_row_major_slice(weights, outputs, inputs).transpose(),
        1.0,
        get_global_parallelism(),
    );
    targets
}

/// Rows `[n, d]` with their places in another order: `order[new]` is the old one.
pub(crate) fn reordered(rows: &[f32], order: &[usize]) -> Vec<f32> {
    let rows = rows.chunks_exact(order.len());
    rows.flat_map(|row| order.iter().map(|place| row[*place]))
        .collect()
}
