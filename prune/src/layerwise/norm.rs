//! Running statistics of a BatchNorm, measured anew on the way.

use std::collections::HashSet;

use burn::backend::ir::{ModuleOperationIr, OperationIr, TensorId};
use burn::tensor::Tensor;
use burn_lean_graph::{Graph, GraphError, Node, Pass, Step, Tensors};

use crate::PruneError;
use crate::host::read;
use crate::layerwise::failed;

/// Values that are summed in F32.
const PART: usize = 1024;
/// Of them, side by side.
const LANES: usize = 8;

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

/// The path of the layer that has these statistics.
pub(crate) fn layer(statistics: &[String; 2]) -> &str {
    let [mean, _] = statistics;
    mean.rsplit_once('.').map_or("", |(layer, _)| layer)
}

/// Paths of the BatchNorm layers that keep their statistics: those with no weight before them that `is_pruned`,
/// since what is behind them was trained with them, and those that are called several times, of which no
/// statistics are those of every call.
pub(crate) fn still(graph: &Graph, is_pruned: impl Fn(&str) -> bool) -> HashSet<String> {
    let pruned = graph.parameters().iter().filter(|one| is_pruned(&one.path));
    let mut changed: HashSet<TensorId> = pruned.map(|one| one.tensor).collect();
    let read_once = |path: &String| {
        let mut found = graph.parameters().iter().filter(|one| one.path == *path);
        found.all(|one| graph.users(one.id).count() == 1)
    };
    let mut still = HashSet::new();
    for node in graph.nodes() {
        let operation = node.operation();
        if let Some(paths) = statistics(graph, &node) {
            let mut operands = operation.inputs();
            let is_behind = operands.next().is_some_and(|x| changed.contains(&x.id));
            if !is_behind || !paths.iter().all(read_once) {
                still.insert(layer(&paths).to_string());
            }
        }
        if operation.inputs().any(|read| changed.contains(&read.id)) {
            changed.extend(operation.outputs().map(|made| made.id));
        }
    }
    still
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
        let (x, shape) = match shape.len() {
            2 => values(step.operand::<2>(batch, 0, Pass::Replaced))?,
            3 => values(step.operand::<3>(batch, 0, Pass::Replaced))?,
            4 => values(step.operand::<4>(batch, 0, Pass::Replaced))?,
            5 => values(step.operand::<5>(batch, 0, Pass::Replaced))?,
            _ => return Ok(false),
        };
        let places: usize = shape[2..].iter().product();
        let n = (shape[0] * places) as f64;
        // About the first value of each channel, so that a large mean costs no digits.
        let mut sums = vec![(0.0, 0.0); channels];
        for (at, plane) in x.chunks_exact(places.max(1)).enumerate() {
            let origin = x[at % channels * places];
            let sums = &mut sums[at % channels];
            for part in plane.chunks(PART) {
                let (mut sum, mut square) = ([0.0_f32; LANES], [0.0_f32; LANES]);
                for values in part.chunks(LANES) {
                    for (lane, x) in values.iter().enumerate() {
                        let x = x - origin;
                        sum[lane] += x;
                        square[lane] += x * x;
                    }
                }
                sums.0 += f64::from(sum.iter().sum::<f32>());
                sums.1 += f64::from(square.iter().sum::<f32>());
            }
        }
        for (c, (sum, square)) in sums.into_iter().enumerate() {
            let own = f64::from(x[c * places]) + sum / n;
            let within = (square - sum * sum / n).max(0.0);
            // Chan's update: no difference of large sums.
            let delta = own - mean[c];
            squares[c] += within + delta * delta * count * n / (count + n);
            mean[c] += delta * n / (count + n);
        }
        count += n;
    }
    let mean: Vec<f32> = mean.iter().map(|m| *m as f32).collect();
    let variance: Vec<f32> = squares.iter().map(|s| (s / count) as f32).collect();
    for (path, values) in [(mean_path, mean), (variance_path, variance)] {
        let old = step.parameter::<1>(path, Pass::Replaced).map_err(failed)?;
        let new = Tensor::<1>::from_data(&values[..], (&old.device(), old.dtype()));
        if read(new.clone())?.iter().any(|value| !value.is_finite()) {
            return Err(PruneError::NonFiniteStatistics { path: path.clone() });
        }
        step.replace(path, new).map_err(failed)?;
    }
    Ok(true)
}

/// The values of an operand and its shape.
fn values<const D: usize>(
    operand: Result<Tensor<D>, GraphError>,
) -> Result<(Vec<f32>, Vec<usize>), PruneError> {
    let operand = operand.map_err(failed)?;
    let shape = operand.dims().to_vec();
    Ok((read(operand)?, shape))
}
