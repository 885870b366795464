//! What is added to the outputs of a layer: the layer can make up for what pruning changed in it.
//!
//! Behind a residual sum `s + f(x)` the network sees the sum. Where `s` is there before the last layer
//! of `f` is fitted, that layer's targets get the difference of the dense and the pruned `s`, through
//! the BatchNorm between them, if there is one.

use std::collections::HashSet;

use burn::backend::ir::{
    ModuleOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorId, TensorIr,
};
use burn::tensor::Tensor;
use burn_lean_graph::{Graph, GraphError, Node, Pass, Step, Tensors};

use crate::PruneError;
use crate::host::read;
use crate::layerwise::failed;

/// Gains of a normalization below this fraction of their root mean square count less: what is divided
/// by them would be the target.
const SMALL_GAIN: f32 = 0.05;

/// The other summand of the outputs of a product.
#[derive(Debug, Clone)]
pub(crate) struct Shortcut {
    other: TensorId,
    shape: Vec<usize>,
    /// Gain, variance and epsilon of the BatchNorm between the product and the sum.
    norm: Option<(TensorId, TensorId, ScalarIr)>,
}

/// Rows of outputs that a product is fitted to.
pub(crate) struct Rows {
    pub(crate) batch: usize,
    pub(crate) first: usize,
    pub(crate) stride: usize,
    /// The first channel, and how many there are.
    pub(crate) channels: std::ops::Range<usize>,
}

impl Shortcut {
    /// What is added to the outputs of this operation, behind a bias and a BatchNorm at most, if it
    /// is there before them.
    pub(crate) fn of(graph: &Graph, product: &Node<'_>) -> Option<Self> {
        let mut before: HashSet<TensorId> = HashSet::new();
        for node in graph.nodes().take(product.index()) {
            before.extend(node.operation().outputs().map(|out| out.id));
        }
        let parameters: HashSet<TensorId> =
            graph.parameters().iter().map(|one| one.tensor).collect();
        let mut norm = None;
        let mut at = product.operation().outputs().next()?;
        let mut node = *product;
        loop {
            let readers: Vec<Node<'_>> = node.readers().collect();
            let [only] = readers[..] else {
                return None;
            };
            node = only;
            match node.operation() {
                OperationIr::Module(ModuleOperationIr::BatchNorm(op)) if norm.is_none() => {
                    norm = Some((op.gamma.id, op.variance.id, op.epsilon));
                    at = &op.out;
                }
                OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) => {
                    let other: &TensorIr = match op.lhs.id == at.id {
                        true => &op.rhs,
                        false => &op.lhs,
                    };
                    if parameters.contains(&other.id) {
                        at = &op.out;
                        continue;
                    }
                    let fits = other.shape == at.shape && before.contains(&other.id);
                    return fits.then(|| Self {
                        other: other.id,
                        shape: other.shape.to_vec(),
                        norm,
                    });
                }
                _ => return None,
            }
        }
    }

    /// Adds to `targets`, `[rows, channels]`, what makes up for the change of the other summand.
    pub(crate) fn make_up<O: Tensors>(
        &self,
        step: &mut Step<'_, O>,
        rows: &Rows,
        is_convolution: bool,
        targets: &mut [f32],
    ) -> Result<(), PruneError> {
        let gains = self.gains(step)?;
        let (dense, shape) = self.values(step, rows.batch, Pass::Original)?;
        let (now, _) = self.values(step, rows.batch, Pass::Replaced)?;
        let count = rows.channels.len();
        let (all, area) = match is_convolution {
            true => (shape[1], shape[2..].iter().product::<usize>()),
            false => (shape[shape.len() - 1], 1),
        };
        for (at, row) in targets.chunks_exact_mut(count).enumerate() {
            let position = rows.first + at * rows.stride;
            let (example, place) = (position / area, position % area);
            for (target, channel) in row.iter_mut().zip(rows.channels.clone()) {
                let from = (example * all + channel) * area + place;
                let gain = gains.as_ref().map_or(1.0, |gains| gains[channel]);
                *target += gain * (dense[from] - now[from]);
            }
        }
        Ok(())
    }

    /// By how much a channel's output must change for its normalized one to change by 1.
    fn gains<O: Tensors>(&self, step: &mut Step<'_, O>) -> Result<Option<Vec<f32>>, PruneError> {
        let Some((gamma, variance, epsilon)) = self.norm else {
            return Ok(None);
        };
        let mut numbers = |id| -> Result<Vec<f32>, PruneError> {
            read(step.tensor::<1>(0, id, Pass::Original).map_err(failed)?)
        };
        let (gamma, variance) = (numbers(gamma)?, numbers(variance)?);
        let epsilon: f32 = epsilon.elem();
        let squares = gamma.iter().map(|g| g * g).sum::<f32>() / gamma.len().max(1) as f32;
        let small = SMALL_GAIN * SMALL_GAIN * squares;
        let gains = gamma.iter().zip(variance);
        let gains = gains.map(|(g, v)| match *g == 0.0 {
            true => 0.0,
            false => (v + epsilon).sqrt() * g / (g * g + small),
        });
        Ok(Some(gains.collect()))
    }

    fn values<O: Tensors>(
        &self,
        step: &mut Step<'_, O>,
        batch: usize,
        pass: Pass,
    ) -> Result<(Vec<f32>, Vec<usize>), PruneError> {
        fn flat<const D: usize>(
            tensor: Result<Tensor<D>, GraphError>,
        ) -> Result<(Vec<f32>, Vec<usize>), PruneError> {
            let tensor = tensor.map_err(failed)?;
            let shape = tensor.dims().to_vec();
            Ok((read(tensor)?, shape))
        }
        match self.shape.len() {
            2 => flat(step.tensor::<2>(batch, self.other, pass)),
            3 => flat(step.tensor::<3>(batch, self.other, pass)),
            4 => flat(step.tensor::<4>(batch, self.other, pass)),
            _ => flat(step.tensor::<5>(batch, self.other, pass)),
        }
    }
}
