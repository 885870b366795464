//! Batch norms that can be folded into the layer before them.

use std::collections::{HashMap, HashSet};
use std::fmt;

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr,
};
use burn::module::{Module, ParamId};
use burn_lean_graph::{Graph, Node, Place, Role, SiteUse};
use serde::{Deserialize, Serialize};

use crate::fold::FoldPair;
use crate::model::channel_layout::ChannelLayout;
use crate::model::float_parameters::{self, FloatParameter};

/// A batch norm that normalizes the output of a layer, and nothing else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NormPair {
    /// The layer's operation, for example `conv2d`.
    pub operation: String,
    /// Path of the layer, for example `stem.conv`.
    pub layer: String,
    /// Path of the layer's weight.
    pub weight: String,
    /// Path of the layer's bias, if it adds one as it is.
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
    /// The layer runs several times, at its path or tied at another one, and not always before this
    /// norm.
    LayerShared,
    /// The norm runs several times, and not always after this layer.
    NormShared,
    /// The norm is over another axis than the layer's outputs: after a linear layer on more than
    /// two axes, or where axes are swapped in between.
    OtherAxis,
    /// The layer multiplies with something else than its weight as it lies there: a standardized or
    /// normalized one, the sum with an adapter, the transpose.
    WeightComputed,
    /// The layer adds something else than its bias as it lies there, or its bias is not added.
    BiasComputed,
    /// The layer is none of those whose channels are known: a `Linear`, or a convolution, transposed or not.
    OtherLayer,
}

impl fmt::Display for NotFoldable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutputShared => "the layer's output is also used without the norm",
            Self::LayerShared => "the layer also runs elsewhere",
            Self::NormShared => "the norm also runs elsewhere",
            Self::OtherAxis => "the norm is over another axis than the layer's outputs",
            Self::WeightComputed => "the layer multiplies with what is computed from its weight",
            Self::BiasComputed => "the layer adds something else than its bias",
            Self::OtherLayer => "the layer is not one whose channels are known",
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
    /// The weight is multiplied as it lies in its layer.
    is_plain: bool,
    /// Its channels are known.
    is_known: bool,
    bias: Bias<'a>,
    is_shared: bool,
    /// Where the layer's outputs are; `None` once a reshape tore them apart.
    axis: Option<usize>,
}

/// What was added to a product.
#[derive(Clone, Copy, PartialEq)]
enum Bias<'a> {
    Nothing,
    /// This parameter, along the outputs.
    Parameter(&'a str),
    Other,
}

impl<'a> Bias<'a> {
    fn of(graph: &'a Graph, bias: &TensorIr, axis: Option<usize>) -> Self {
        match axis.and_then(|axis| graph.viewed(bias.id, axis)) {
            Some((parameter, 0)) if parameter.shape.len() == 1 => Self::Parameter(&parameter.path),
            _ => Self::Other,
        }
    }

    fn path(self) -> Option<&'a str> {
        match self {
            Self::Parameter(path) => Some(path),
            Self::Nothing | Self::Other => None,
        }
    }
}

impl LayerOutput<'_> {
    /// `own_bias` is the path of the bias that the layer has.
    fn not_foldable(&self, own_bias: Option<&str>) -> Option<NotFoldable> {
        match self {
            _ if !self.is_known => Some(NotFoldable::OtherLayer),
            _ if !self.is_plain => Some(NotFoldable::WeightComputed),
            _ if self.bias == Bias::Other || self.bias.path() != own_bias => {
                Some(NotFoldable::BiasComputed)
            }
            _ if self.axis != Some(NORM_AXIS) => Some(NotFoldable::OtherAxis),
            _ if self.is_shared => Some(NotFoldable::OutputShared),
            _ => None,
        }
    }
}

/// The axis of a layer's outputs: that of the columns or rows of a product with a matrix, that of the
/// channels of a convolution.
fn output_axis(operation: &OperationIr, weight: Place, output: &TensorIr) -> usize {
    let rank = output.shape.num_dims();
    match (operation, weight) {
        (OperationIr::Float(_, FloatOperationIr::Matmul(_)), Place::Operand(0)) => {
            rank.saturating_sub(2)
        }
        (OperationIr::Float(_, FloatOperationIr::Matmul(_)), _)
        | (OperationIr::Module(ModuleOperationIr::Linear(_)), _) => rank.saturating_sub(1),
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

/// The batch norms of an evaluation of `model` that directly follow a layer.
pub(crate) fn find<M: Module>(graph: &Graph, model: &M) -> Vec<NormPair> {
    let parameters = float_parameters::list(model);
    let own_bias = |weight: &str| {
        let path = format!("{}.bias", parent(weight));
        let mut paths = parameters.iter().map(|parameter| &parameter.path);
        paths.find(|other| **other == path).map(String::as_str)
    };
    let readers = readers(graph);
    let is_shared = |id: TensorId| readers.get(&id).is_some_and(|readers| *readers > 1);
    let layers = Layers::of(graph, &parameters);
    let mut outputs: HashMap<TensorId, LayerOutput<'_>> = HashMap::new();
    let path_of = |tensor: TensorId| {
        let mut parameters = graph.parameters().iter();
        parameters
            .find(|parameter| parameter.tensor == tensor)
            .map(|parameter| parameter.path.clone())
    };
    // One parameter may be shown at several paths.
    let identity = |path: &str| {
        let mut parameters = graph.parameters().iter();
        parameters
            .find(|parameter| parameter.path == path)
            .map(|parameter| parameter.id)
    };
    let mut pairs = Vec::new();
    let mut norm_runs: HashMap<ParamId, usize> = HashMap::new();
    for node in graph.nodes() {
        let operation = node.operation();
        let moved = moved_axis(operation, |id| {
            outputs.get(&id).and_then(|layer| layer.axis)
        });
        let made = if let Some((input, output, axis)) = moved {
            let layer = outputs.get(&input).cloned();
            layer.map(|layer| (output, LayerOutput { axis, ..layer }))
        } else {
            layers.output(graph, &node, &outputs)
        };
        if let Some((output, mut layer)) = made {
            layer.is_shared |= is_shared(output);
            outputs.insert(output, layer);
        } else if let OperationIr::Module(ModuleOperationIr::BatchNorm(norm)) = operation
            && let (Some(gamma), Some(beta)) = (path_of(norm.gamma.id), path_of(norm.beta.id))
        {
            if let Some(id) = identity(&gamma) {
                *norm_runs.entry(id).or_default() += 1;
            }
            if let Some(layer) = outputs.get(&norm.x.id) {
                pairs.push(NormPair {
                    operation: layer.operation.to_string(),
                    layer: parent(layer.weight).to_string(),
                    weight: layer.weight.to_string(),
                    bias: layer.bias.path().map(str::to_string),
                    norm: parent(&gamma).to_string(),
                    gamma,
                    beta,
                    epsilon: norm.epsilon.elem(),
                    not_foldable: layer.not_foldable(own_bias(layer.weight)),
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
            let all_runs = |of: &HashMap<ParamId, usize>, path: &str| {
                let id = identity(path)?;
                of.get(&id).copied()
            };
            if all_runs(&layers.runs, &pair.weight) != Some(runs) {
                pair.not_foldable = Some(NotFoldable::LayerShared);
            } else if all_runs(&norm_runs, &pair.gamma) != Some(runs) {
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

/// The layers of a graph.
struct Layers<'a> {
    /// How often each runs, by the identity of its weight.
    runs: HashMap<ParamId, usize>,
    /// The products, by their nodes.
    products: HashMap<usize, LayerOutput<'a>>,
    /// The nodes that add a bias to one.
    sums: HashSet<usize>,
}

impl<'a> Layers<'a> {
    fn of(graph: &'a Graph, parameters: &[FloatParameter]) -> Self {
        let mut layers = Self {
            runs: HashMap::new(),
            products: HashMap::new(),
            sums: HashSet::new(),
        };
        let nodes: Vec<Node<'a>> = graph.nodes().collect();
        for one in graph.sites() {
            match (one.site.role, one.place) {
                (Role::Weight, _) => layers.add(graph, &nodes[one.node], &one, parameters),
                (Role::Output, Place::Result) => {
                    layers.sums.insert(one.node);
                }
                _ => {}
            }
        }
        layers
    }

    /// The product that a weight is read by.
    fn add(
        &mut self,
        graph: &'a Graph,
        node: &Node<'a>,
        weight: &SiteUse,
        parameters: &[FloatParameter],
    ) {
        let operation = node.operation();
        let path = &weight.site.path;
        let mut all = graph.parameters().iter();
        let (Some(parameter), Some(output)) = (
            all.find(|parameter| parameter.path == *path),
            operation.outputs().next(),
        ) else {
            return;
        };
        *self.runs.entry(parameter.id).or_default() += 1;
        if let OperationIr::Module(ModuleOperationIr::Embedding(_)) = operation {
            return;
        }
        let stored = parameters.iter().find(|parameter| parameter.path == *path);
        let layout = stored.and_then(|parameter| ChannelLayout::of(parameter).ok());
        let channels = graph.output_channels(weight);
        let is_plain = layout.is_some_and(|of| channels == Some(stored_axis(of)));
        let bias = bias_operand(operation);
        let layer = LayerOutput {
            operation: node.name(),
            weight: &parameter.path,
            is_plain,
            is_known: layout.is_some() && path.rsplit('.').next() == Some("weight"),
            bias: bias.map_or(Bias::Nothing, |bias| Bias::of(graph, bias, Some(0))),
            is_shared: false,
            axis: Some(output_axis(operation, weight.place, output)),
        };
        self.products.insert(node.index(), layer);
    }

    /// The result of a node, where it is a product or the sum with its bias.
    fn output(
        &self,
        graph: &'a Graph,
        node: &Node<'a>,
        outputs: &HashMap<TensorId, LayerOutput<'a>>,
    ) -> Option<(TensorId, LayerOutput<'a>)> {
        let operation = node.operation();
        let output = operation.outputs().next()?.id;
        if let Some(layer) = self.products.get(&node.index()) {
            return Some((output, layer.clone()));
        }
        if !self.sums.contains(&node.index()) {
            return None;
        }
        let mut operands = operation.inputs();
        let (a, b) = (operands.next()?, operands.next()?);
        let (layer, bias) = match (outputs.get(&a.id), outputs.get(&b.id)) {
            (Some(layer), None) => (layer, b),
            (None, Some(layer)) => (layer, a),
            _ => return None,
        };
        let bias = Bias::of(graph, bias, layer.axis);
        Some((
            output,
            LayerOutput {
                bias,
                ..layer.clone()
            },
        ))
    }
}

/// Where a layer's outputs are in its weight.
fn stored_axis(layout: ChannelLayout) -> usize {
    match layout {
        ChannelLayout::Conv => 0,
        ChannelLayout::Linear | ChannelLayout::ConvTranspose => 1,
    }
}

/// The bias that a layer's operation adds by itself.
fn bias_operand(operation: &OperationIr) -> Option<&TensorIr> {
    use ModuleOperationIr as Op;
    let OperationIr::Module(operation) = operation else {
        return None;
    };
    match operation {
        Op::Linear(op) => op.bias.as_ref(),
        Op::Conv1d(op) => op.bias.as_ref(),
        Op::Conv2d(op) => op.bias.as_ref(),
        Op::Conv3d(op) => op.bias.as_ref(),
        Op::DeformableConv2d(op) => op.bias.as_ref(),
        Op::ConvTranspose1d(op) => op.bias.as_ref(),
        Op::ConvTranspose2d(op) => op.bias.as_ref(),
        Op::ConvTranspose3d(op) => op.bias.as_ref(),
        _ => None,
    }
}

/// The module that a parameter belongs to.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}
