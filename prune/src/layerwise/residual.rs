//! A layer before a residual sum makes up for what pruning changed in the other summand.
//!
//! Behind `s + f(x)` the network sees the sum. Where `s` is there before the last layer of `f` is fitted,
//! that layer's targets get the difference of the dense and the pruned `s`, divided by what the BatchNorm
//! between them, if there is one, multiplies with.

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
    pub(crate) channels: std::ops::Range<usize>,
}

/// Adds to `targets`, `[rows, channels]`, what makes up for the change of the other summand.
pub(crate) fn make_up<O: Tensors>(
    residual: &Residual,
    is_convolution: bool,
    step: &mut Step<'_, O>,
    rows: &Rows,
    targets: &mut [f32],
) -> Result<(), PruneError> {
    let gains = match &residual.norm {
        Some(norm) => Some(gains(norm, step)?),
        None => None,
    };
    let mut summand = |pass| values(residual, is_convolution, step, rows.batch, pass);
    let (dense, [channels, area]) = summand(Pass::Original)?;
    let (now, _) = summand(Pass::Replaced)?;
    for (at, row) in targets.chunks_exact_mut(rows.channels.len()).enumerate() {
        let position = rows.first + at * rows.stride;
        let (example, place) = (position / area, position % area);
        for (target, channel) in row.iter_mut().zip(rows.channels.clone()) {
            let from = (example * channels + channel) * area + place;
            let gain = gains.as_ref().map_or(1.0, |gains| gains[channel]);
            *target += gain * (dense[from] - now[from]);
        }
    }
    Ok(())
}

/// By how much a channel's output must change for its normalized one to change by 1.
fn gains<O: Tensors>(norm: &ResidualNorm, step: &mut Step<'_, O>) -> Result<Vec<f32>, PruneError> {
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

/// The other summand, its channels, and the places of each in an example.
fn values<O: Tensors>(
    residual: &Residual,
    is_convolution: bool,
    step: &mut Step<'_, O>,
    batch: usize,
    pass: Pass,
) -> Result<(Vec<f32>, [usize; 2]), PruneError> {
    fn images<const D: usize>(
        tensor: Result<Tensor<D>, GraphError>,
    ) -> Result<(Vec<f32>, [usize; 2]), PruneError> {
        let tensor = tensor.map_err(failed)?;
        let shape = tensor.dims();
        Ok((read(tensor)?, [shape[1], shape[2..].iter().product()]))
    }
    let id = residual.other;
    match residual.rank {
        3 if is_convolution => images(step.tensor::<3>(batch, id, pass)),
        4 if is_convolution => images(step.tensor::<4>(batch, id, pass)),
        5 if is_convolution => images(step.tensor::<5>(batch, id, pass)),
        _ => {
            let rows = step.tensor_rows(batch, id, pass).map_err(failed)?;
            let channels = rows.dims()[1];
            Ok((read(rows)?, [channels, 1]))
        }
    }
}
