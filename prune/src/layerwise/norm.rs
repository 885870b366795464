//! Running statistics of a BatchNorm, measured anew on the way.

use burn::backend::ir::{ModuleOperationIr, OperationIr};
use burn::tensor::Tensor;
use burn_lean_graph::{Graph, Node, Pass, Step, Tensors};

use crate::PruneError;
use crate::fisher::gradient_matrix::read;
use crate::layerwise::failed;

/// Paths of the running mean and variance of a normalization; `None` where it is none, or they are no
/// parameters.
pub(crate) fn statistics(graph: &Graph, node: &Node<'_>) -> Option<[String; 2]> {
    let OperationIr::Module(ModuleOperationIr::BatchNorm(norm)) = node.operation() else {
        return None;
    };
    let path = |id| {
        let found = graph.parameters().iter().find(|one| one.tensor == id);
        found.map(|one| one.path.clone())
    };
    Some([path(norm.mean.id)?, path(norm.variance.id)?])
}

/// Replaces the running statistics by those of what arrives now, over the first `batches`; whether it
/// did.
pub(crate) fn recalibrate<O: Tensors>(
    step: &mut Step<'_, O>,
    [mean_path, variance_path]: &[String; 2],
    batches: usize,
) -> Result<bool, PruneError> {
    let node = step.node();
    let Some(shape) = node.operation().inputs().next().map(|x| x.shape.to_vec()) else {
        return Ok(false);
    };
    let channels = shape[1];
    let mut count = 0.0;
    let mut mean = vec![0.0; channels];
    let mut squares = vec![0.0; channels];
    for batch in 0..batches {
        let x = match shape.len() {
            2 => by_channel(
                step.operand::<2>(batch, 0, Pass::Replaced)
                    .map_err(failed)?,
            ),
            3 => by_channel(
                step.operand::<3>(batch, 0, Pass::Replaced)
                    .map_err(failed)?,
            ),
            4 => by_channel(
                step.operand::<4>(batch, 0, Pass::Replaced)
                    .map_err(failed)?,
            ),
            5 => by_channel(
                step.operand::<5>(batch, 0, Pass::Replaced)
                    .map_err(failed)?,
            ),
            _ => return Ok(false),
        };
        let n = x.dims()[1] as f64;
        let (variance, own) = x.var_mean_bias(1);
        let (variance, own) = (read(variance)?, read(own)?);
        // Chan's update: no difference of large sums.
        for c in 0..channels {
            let delta = f64::from(own[c]) - mean[c];
            squares[c] += n * f64::from(variance[c]) + delta * delta * count * n / (count + n);
            mean[c] += delta * n / (count + n);
        }
        count += n;
    }
    let device = step
        .parameter::<1>(mean_path, Pass::Replaced)
        .map_err(failed)?
        .device();
    let mean: Vec<f32> = mean.iter().map(|m| *m as f32).collect();
    let variance: Vec<f32> = squares.iter().map(|s| (s / count) as f32).collect();
    let tensor = |values: &[f32]| Tensor::<1>::from_data(values, &device);
    step.replace(mean_path, tensor(&mean)).map_err(failed)?;
    step.replace(variance_path, tensor(&variance))
        .map_err(failed)?;
    Ok(true)
}

/// `[channels, all else]`
fn by_channel<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let channels = x.dims()[1];
    x.swap_dims(0, 1).reshape([channels as i64, -1])
}
