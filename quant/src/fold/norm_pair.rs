//! Batch norms that can be folded into the layer before them.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr,
};
use burn_lean_graph::{Graph, Place, Role};
use serde::{Deserialize, Serialize};

use crate::FoldPair;

/// A batch norm that normalizes the output of a layer, and nothing else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NormPair {
    /// The layer's operation, for example `conv2d`.
    pub operation: String,
    /// Path of the layer, for example `stem.conv`.
    pub layer: String,
    /// Path of the layer's weight.
    pub weight: String,
    /// Path of the layer's bias, if it has one.
    pub bias: Option<String>,
    /// Path of the norm, for example `stem.norm`.
    pub norm: String,
    /// Path of the norm's scale.
    pub gamma: String,
    /// Path of the norm's shift.
    pub beta: String,
    /// The norm's epsilon.
    pub epsilon: f64,
    /// What stands against folding.
    pub not_foldable: Option<NotFoldable>,
}

/// Why a batch norm cannot be folded into the layer before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NotFoldable {
    /// The layer's output is also used without the norm.
    OutputShared,
    /// The layer runs several times, and not always before this norm.
    LayerShared,
    /// The norm runs several times, and not always after this layer.
    NormShared,
    /// The norm is over another axis than the layer's outputs: after a linear layer on more than
    /// two axes, or where axes are swapped in between.
    OtherAxis,
}

impl fmt::Display for NotFoldable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutputShared => "the layer's output is also used without the norm",
            Self::LayerShared => "the layer also runs elsewhere",
            Self::NormShared => "the norm also runs elsewhere",
            Self::OtherAxis => "the norm is over another axis than the layer's outputs",
        })
    }
}

/// The axis that a batch norm is over.
const NORM_AXIS: usize = 1;

/// The output of a layer, as far as only its bias was added and its axes were moved.
#[derive(Clone)]
struct LayerOutput<'a> {
    operation: &'static str,
    weight: &'a str,
    bias: Option<&'a str>,
    is_shared: bool,
    /// Where the layer's outputs are; `None` once a reshape tore them apart.
    axis: Option<usize>,
}

impl LayerOutput<'_> {
    fn not_foldable(&self) -> Option<NotFoldable> {
        match self {
            _ if self.axis != Some(NORM_AXIS) => Some(NotFoldable::OtherAxis),
            _ if self.is_shared => Some(NotFoldable::OutputShared),
            _ => None,
        }
    }
}

/// The axis of a layer's outputs: the last one of a product with a matrix, that of the channels of a
/// convolution.
fn output_axis(operation: &OperationIr, output: &TensorIr) -> usize {
    match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(_))
        | OperationIr::Module(ModuleOperationIr::Linear(_)) => {
            output.shape.num_dims().saturating_sub(1)
        }
        _ => 1,
    }
}

/// Input and output of an operation that moves all numbers of a tensor, and where `axis` goes.
fn moved_axis(
    operation: &OperationIr,
    axis: impl Fn(TensorId) -> Option<usize>,
) -> Option<(TensorId, TensorId, Option<usize>)> {
    use BaseOperationIr as Op;
    let OperationIr::BaseFloat(operation) = operation else {
        return None;
    };
    Some(match operation {
        Op::Cast(op) => (op.input.id, op.out.id, axis(op.input.id)),
        Op::SwapDims(op) => {
            let axis = axis(op.input.id).map(|axis| match axis {
                axis if axis == op.dim1 => op.dim2,
                axis if axis == op.dim2 => op.dim1,
                axis => axis,
            });
            (op.input.id, op.out.id, axis)
        }
        Op::Permute(op) => {
            let axis = axis(op.input.id);
            let axis = axis.and_then(|axis| op.axes.iter().position(|from| *from == axis));
            (op.input.id, op.out.id, axis)
        }
        Op::Reshape(op) => {
            let axis = axis(op.input.id);
            let axis = axis.and_then(|axis| reshaped(&op.input.shape, &op.out.shape, axis));
            (op.input.id, op.out.id, axis)
        }
        _ => return None,
    })
}

/// The axis after a reshape with the same numbers before it, if it has the same length.
fn reshaped(from: &[usize], to: &[usize], axis: usize) -> Option<usize> {
    let before: usize = from[..axis].iter().product();
    let same = |candidate: &usize| {
        to[*candidate] == from[axis] && to[..*candidate].iter().product::<usize>() == before
    };
    (0..to.len()).find(same)
}

/// Those of the pairs that can be folded.
pub(crate) fn foldable(found: &[NormPair]) -> Vec<FoldPair> {
    let foldable = found.iter().filter(|pair| pair.not_foldable.is_none());
    let pairs = foldable.map(|pair| FoldPair::new(&pair.layer, &pair.norm, pair.epsilon));
    pairs.collect()
}

/// The batch norms of an evaluation that directly follow a layer.
pub(crate) fn find(graph: &Graph) -> Vec<NormPair> {
    let readers = readers(graph);
    let is_shared = |id: TensorId| readers.get(&id).is_some_and(|readers| *readers > 1);
    let (layer_runs, mut outputs) = layers(graph, is_shared);
    let path_of = |tensor: TensorId| {
        let mut parameters = graph.parameters().iter();
        parameters
            .find(|parameter| parameter.tensor == tensor)
            .map(|parameter| parameter.path.clone())
    };
    let mut pairs = Vec::new();
    let mut norm_runs: HashMap<String, usize> = HashMap::new();
    for node in graph.nodes() {
        let operation = node.operation();
        if let Some((input, output, axis)) = moved_axis(operation, |id| {
            outputs.get(&id).and_then(|layer| layer.axis)
        }) {
            if let Some(mut layer) = outputs.get(&input).cloned() {
                layer.is_shared |= is_shared(output);
                layer.axis = axis;
                outputs.insert(output, layer);
            }
        } else if let OperationIr::Module(ModuleOperationIr::BatchNorm(norm)) = operation
            && let (Some(gamma), Some(beta)) = (path_of(norm.gamma.id), path_of(norm.beta.id))
        {
            *norm_runs.entry(gamma.clone()).or_default() += 1;
            if let Some(layer) = outputs.get(&norm.x.id) {
                pairs.push(NormPair {
                    operation: layer.operation.to_string(),
                    layer: parent(layer.weight).to_string(),
                    weight: layer.weight.to_string(),
                    bias: layer.bias.map(str::to_string),
                    norm: parent(&gamma).to_string(),
                    gamma,
                    beta,
                    epsilon: norm.epsilon.elem(),
                    not_foldable: layer.not_foldable(),
                });
            }
        }
    }
    // A pair that runs several times is one pair, if its members never run with others.
    let mut unique: Vec<(NormPair, usize)> = Vec::new();
    for pair in pairs {
        match unique.iter_mut().find(|(known, _)| *known == pair) {
            Some((_, runs)) => *runs += 1,
            None => unique.push((pair, 1)),
        }
    }
    let checked = unique.into_iter().map(|(mut pair, runs)| {
        if pair.not_foldable.is_none() {
            if layer_runs.get(pair.weight.as_str()) != Some(&runs) {
                pair.not_foldable = Some(NotFoldable::LayerShared);
            } else if norm_runs.get(&pair.gamma) != Some(&runs) {
                pair.not_foldable = Some(NotFoldable::NormShared);
            }
        }
        pair
    });
    checked.collect()
}

/// How often each tensor is read, by an operation or as a result.
fn readers(graph: &Graph) -> HashMap<TensorId, usize> {
    let mut readers: HashMap<TensorId, usize> = HashMap::new();
    let operands = graph.nodes().flat_map(|node| node.operands());
    for id in operands
        .map(|operand| operand.id)
        .chain(graph.outputs().iter().copied())
    {
        *readers.entry(id).or_default() += 1;
    }
    readers
}

/// How often each layer runs, by the path of its weight, and its outputs.
fn layers(
    graph: &Graph,
    is_shared: impl Fn(TensorId) -> bool,
) -> (HashMap<&str, usize>, HashMap<TensorId, LayerOutput<'_>>) {
    let mut runs: HashMap<&str, usize> = HashMap::new();
    let mut outputs = HashMap::new();
    let sites = graph.sites();
    let mut products: HashMap<&str, VecDeque<usize>> = HashMap::new();
    for one in sites.iter().filter(|one| one.site.role == Role::Input) {
        let of_layer = products.entry(&one.site.path).or_default();
        of_layer.push_back(one.node);
    }
    let nodes: Vec<_> = graph.nodes().collect();
    let results = sites
        .iter()
        .filter(|one| one.site.role == Role::Output && one.place == Place::Result);
    for one in results {
        let of_layer = products.get_mut(one.site.path.as_str());
        let Some(product) = of_layer.and_then(VecDeque::pop_front) else {
            continue;
        };
        let (product, last) = (&nodes[product], &nodes[one.node]);
        let Some(weight) = graph
            .parameters()
            .iter()
            .find(|parameter| parameter.path == one.site.path)
        else {
            continue;
        };
        let (Some(made), Some(output)) = (
            product.operation().outputs().next(),
            last.operation().outputs().next(),
        ) else {
            continue;
        };
        let weight = weight.path.as_str();
        *runs.entry(weight).or_default() += 1;
        let bias = [product, last]
            .into_iter()
            .flat_map(|node| node.parameters())
            .map(|parameter| parameter.path.as_str())
            .find(|path| *path != weight && parent(path) == parent(weight));
        let layer = LayerOutput {
            operation: product.name(),
            weight,
            bias,
            is_shared: is_shared(made.id) || is_shared(output.id),
            axis: Some(output_axis(product.operation(), output)),
        };
        outputs.insert(output.id, layer);
    }
    (runs, outputs)
}

/// The module that a parameter belongs to.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}
