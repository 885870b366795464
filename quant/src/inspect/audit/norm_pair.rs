//! Batch norms that can be folded into the layer before them.

use std::collections::HashMap;
use std::fmt;

use burn::backend::ir::{BaseOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr};
use serde::{Deserialize, Serialize};

use super::SiteKind;
use super::graph::Graph;
use super::operation::{element_wise, product};

/// A batch norm that normalizes the output of a layer, and nothing else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NormPair {
    /// The layer's operation, for example `Conv2d`.
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
struct LayerOutput {
    operation: &'static str,
    weight: String,
    bias: Option<String>,
    is_shared: bool,
    /// Where the layer's outputs are; `None` once a reshape tore them apart.
    axis: Option<usize>,
}

impl LayerOutput {
    fn not_foldable(&self) -> Option<NotFoldable> {
        match self {
            _ if self.axis != Some(NORM_AXIS) => Some(NotFoldable::OtherAxis),
            _ if self.is_shared => Some(NotFoldable::OutputShared),
            _ => None,
        }
    }
}

/// The axis of a layer's outputs in `output`: the last one of a product with a matrix, that of the
/// channels of a convolution.
fn output_axis(operation: &str, output: &TensorIr) -> usize {
    match operation {
        "Matmul" | "Linear" => output.shape.num_dims().saturating_sub(1),
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

pub(super) fn find(operations: &[OperationIr], graph: &Graph) -> Vec<NormPair> {
    let computes = |operation: &&OperationIr| {
        !matches!(operation, OperationIr::Drop(_) | OperationIr::Init(_))
    };
    let mut uses: HashMap<TensorId, usize> = HashMap::new();
    for operation in operations.iter().filter(computes) {
        for input in operation.inputs() {
            *uses.entry(input.id).or_default() += 1;
        }
    }
    let path = |id: &TensorId| graph.derived.get(id).cloned().flatten();
    let is_shared = |id: &TensorId| uses.get(id).is_some_and(|uses| *uses > 1);

    let mut outputs: HashMap<TensorId, LayerOutput> = HashMap::new();
    let mut pairs = Vec::new();
    let mut layer_runs: HashMap<String, usize> = HashMap::new();
    let mut norm_runs: HashMap<String, usize> = HashMap::new();
    for operation in operations.iter().filter(computes) {
        if let Some(product) = product(operation) {
            if let Some(weight) = path(&product.weight.id)
                && product.input.is_some_and(|input| path(&input.id).is_none())
            {
                *layer_runs.entry(weight.clone()).or_default() += 1;
                let output = LayerOutput {
                    operation: product.name,
                    weight,
                    bias: product.bias.and_then(|bias| path(&bias.id)),
                    is_shared: is_shared(&product.output.id),
                    axis: Some(output_axis(product.name, product.output)),
                };
                outputs.insert(product.output.id, output);
            }
        } else if let Some((input, output, axis)) = moved_axis(operation, |id| {
            outputs.get(&id).and_then(|layer| layer.axis)
        }) {
            if let Some(mut layer) = outputs.get(&input).cloned() {
                layer.is_shared |= is_shared(&output);
                layer.axis = axis;
                outputs.insert(output, layer);
            }
        } else if let Some((SiteKind::Add, [a, b], output)) = element_wise(operation) {
            let bias = match (outputs.get(&a.id), outputs.get(&b.id)) {
                (Some(layer), None) => path(&b.id).map(|bias| (layer, bias)),
                (None, Some(layer)) => path(&a.id).map(|bias| (layer, bias)),
                _ => None,
            };
            if let Some((layer, bias)) = bias
                && layer.bias.is_none()
                // Another parameter that is added is not scaled along with the layer.
                && parent(&bias) == parent(&layer.weight)
            {
                let mut layer = layer.clone();
                layer.bias = Some(bias);
                layer.is_shared |= is_shared(&output.id);
                outputs.insert(output.id, layer);
            }
        } else if let OperationIr::Module(ModuleOperationIr::BatchNorm(norm)) = operation
            && let (Some(gamma), Some(beta)) = (path(&norm.gamma.id), path(&norm.beta.id))
        {
            *norm_runs.entry(gamma.clone()).or_default() += 1;
            if let Some(layer) = outputs.get(&norm.x.id) {
                pairs.push(NormPair {
                    operation: layer.operation.to_string(),
                    layer: parent(&layer.weight),
                    weight: layer.weight.clone(),
                    bias: layer.bias.clone(),
                    norm: parent(&gamma),
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
            if layer_runs.get(&pair.weight) != Some(&runs) {
                pair.not_foldable = Some(NotFoldable::LayerShared);
            } else if norm_runs.get(&pair.gamma) != Some(&runs) {
                pair.not_foldable = Some(NotFoldable::NormShared);
            }
        }
        pair
    });
    checked.collect()
}

/// The module that a parameter belongs to.
fn parent(path: &str) -> String {
    path.rsplit_once('.')
        .map_or(String::new(), |(module, _)| module.to_string())
}
