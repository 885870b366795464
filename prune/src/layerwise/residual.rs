//! A layer before a residual sum makes up for what pruning changed in the other summand.
//!
//! Behind `s + f(x)` the network sees the sum. Where `s` is there before the last layer of `f` is fitted,
//! and `f` ends with a BatchNorm, that layer's targets get the difference of the dense and the pruned `s`,
//! divided by what the BatchNorm multiplies with. Without one, as in transformers whose norms come before
//! the layers, sums come nearer to the dense ones so, and the outputs behind them do not.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_lean_graph::{GraphError, Pass, Residual, ResidualNorm, Step, Tensors};

use crate::PruneError;
use crate::host::read;
use crate::layerwise::failed;

/// Gains of a normalization below this fraction of their root mean square count less: what is divided
/// by them would be the target.
const SMALL_GAIN: f32 = 0.05;

/// Rows of outputs that a product is fitted to.
pub(crate) struct Rows {
    pub(crate) batch: usize,
    pub(crate) first: usize,
    pub(crate) stride: usize,
    /// Of a convolution those of one group.
    pub(crate) channels: Range<usize>,
}

/// Adds to `targets`, `[rows, channels]`, what makes up for the change of the other summand.
pub(crate) fn make_up<O: Tensors>(
    residual: &Residual,
    gains: &[f32],
    step: &mut Step<'_, O>,
    rows: &Rows,
    targets: &mut [f32],
) -> Result<(), PruneError> {
    let mut summand = |pass| values(residual, step, rows, pass);
    let (dense, area) = summand(Pass::Original)?;
    let channels = rows.channels.len();
    let (now, _) = summand(Pass::Replaced)?;
    for (at, row) in targets.chunks_exact_mut(channels).enumerate() {
        let position = rows.first + at * rows.stride;
        let (example, place) = (position / area, position % area);
        for (at, target) in row.iter_mut().enumerate() {
            let from = (example * channels + at) * area + place;
            let gain = gains[rows.channels.start + at];
            let change = dense[from] - now[from];
            // Of what is masked out, -∞, there is nothing to make up.
            if change.is_finite() {
                *target += gain * change;
            }
        }
    }
    Ok(())
}

/// By how much a channel's output must change for its normalized one to change by 1.
pub(crate) fn gains<O: Tensors>(
    norm: &ResidualNorm,
    step: &mut Step<'_, O>,
) -> Result<Vec<f32>, PruneError> {
    let mut numbers = |id| -> Result<Vec<f32>, PruneError> {
        read(step.tensor::<1>(0, id, Pass::Original).map_err(failed)?)
    };
    let (gamma, variance) = (numbers(norm.gamma)?, numbers(norm.variance)?);
    let epsilon: f32 = norm.epsilon.elem();
    let squares = gamma.iter().map(|g| g * g).sum::<f32>() / gamma.len().max(1) as f32;
    let small = SMALL_GAIN * SMALL_GAIN * squares;
    let gains = gamma.iter().zip(variance);
    let gains = gains.map(|(g, v)| match *g == 0.0 {
        true => 0.0,
        false => (v + epsilon).sqrt() * g / (g * g + small),
    });
    Ok(gains.collect())
}

/// These channels of the other summand, and how many places follow each other in one of them.
fn values<O: Tensors>(
    residual: &Residual,
    step: &mut Step<'_, O>,
    rows: &Rows,
    pass: Pass,
) -> Result<(Vec<f32>, usize), PruneError> {
    fn of<const D: usize>(
        tensor: Result<Tensor<D>, GraphError>,
        channels: &Range<usize>,
    ) -> Result<(Vec<f32>, usize), PruneError> {
        let tensor = tensor.map_err(failed)?;
        let area = tensor.dims()[2..].iter().product();
        let own = tensor.narrow(1, channels.start, channels.len());
        Ok((read(own)?, area))
    }
    let (id, batch, channels) = (residual.other, rows.batch, &rows.channels);
    // Channels come last, also of tokens whose rows the product and its BatchNorm have as one axis.
    if residual.axis + 1 == residual.rank {
        let all = step.tensor_rows(batch, id, pass).map_err(failed)?;
        let own = all.narrow(1, channels.start, channels.len());
        return Ok((read(own)?, 1));
    }
    match residual.rank {
        3 => of(step.tensor::<3>(batch, id, pass), channels),
        4 => of(step.tensor::<4>(batch, id, pass), channels),
        _ => of(step.tensor::<5>(batch, id, pass), channels),
    }
}
