//! The quantizers of a model at the edges of its recording.

use std::collections::HashMap;

use burn::module::Module;
use burn_lean_graph::{Graph, Node, Tensors, record};
use burn_lean_quant::{
    Site,
    deploy::{QuantizedGraph, QuantizedOperand},
    integer::Grid,
    quantizers,
};

use super::lower::rounds_operands;
use crate::quantization::Expressible;
use crate::{ActivationQuantization, DeployError, Edge, Quantization};

/// What the quantizers of `model` say of the operations of `plain`, a recording of the same forward
/// pass without them.
///
/// With its quantizers, the recording has the same operations and some more: one for each quantizer.
pub(crate) fn quantization<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    inputs: &I,
    forward: &impl Fn(&M, I) -> O,
    plain: &Graph,
) -> Result<Quantization, DeployError> {
    let mut found = Quantization::of(model)?;
    if found.is_empty() && found.left_float.is_empty() {
        return Ok(found);
    }
    let Ok(recorded) = record(model, inputs, forward) else {
        return Ok(found);
    };
    let recorded = recorded.fold_rows();
    let graph = recorded.graph();
    let mut positions = vec![None; graph.nodes().len()];
    let mut same = plain.nodes();
    for node in graph.nodes().filter(|node| node.hook().is_none()) {
        let Some(twin) = same.next().filter(|twin| twin.name() == node.name()) else {
            return Ok(found);
        };
        positions[node.index()] = Some(twin.index());
    }
    if same.next().is_some() {
        return Ok(found);
    }
    // With the operation that takes floats all the same, if there is one.
    let mut shown: HashMap<String, Option<&'static str>> = HashMap::new();
    let operands = QuantizedGraph::of(graph, model)?.operands;
    for operand in &operands {
        let (Some(node), Some(how)) = (positions[operand.node], how(operand)) else {
            continue;
        };
        let edge = Edge {
            node,
            operand: operand.operand,
        };
        found.edges.insert(edge, how);
        shown.entry(operand.quantizer.clone()).or_default();
    }
    let located = quantizers(model);
    for (position, hook) in graph.hooked_results() {
        let path = &graph.hooks()[hook].path;
        let Some(one) = located.iter().find(|one| one.path == *path) else {
            continue;
        };
        let quantizer = &one.quantizer;
        if quantizer.phase().quantizes()
            && let Ok(how) = ActivationQuantization::of(quantizer)?
        {
            found.results.insert(position, how);
            shown.entry(path.clone()).or_default();
        }
    }
    for operand in operands {
        let Some(reader) = positions[operand.node].and_then(|node| plain.nodes().nth(node)) else {
            continue;
        };
        if let Some(floats) = shown.get_mut(&operand.quantizer)
            && !is_told_apart(reader, operand.operand, &found)
        {
            let (node, operand) = (reader.index(), operand.operand);
            found.edges.remove(&Edge { node, operand });
            floats.get_or_insert(reader.name());
        }
    }
    found
        .left_float
        .retain_mut(|(path, why)| match shown.get(path) {
            None => true,
            Some(None) => false,
            Some(Some(reader)) => {
                let name = why.split(": ").next().unwrap_or(path);
                *why = format!("{name}: `{reader}` reads it as it is, too");
                true
            }
        });
    Ok(found)
}

/// Whether an operation can be written with this operand rounded: not where it reads the same tensor
/// once more in another way.
fn is_told_apart(reader: Node<'_>, operand: usize, found: &Quantization) -> bool {
    if rounds_operands(reader.operation()) {
        return true;
    }
    let tensors: Vec<_> = reader.operation().inputs().map(|x| x.id).collect();
    let node = reader.index();
    let how = |operand| found.edges.get(&Edge { node, operand });
    let mut twins = (0..tensors.len()).filter(|other| tensors[*other] == tensors[operand]);
    twins.all(|other| how(other) == how(operand))
}

/// How an operand becomes integers, if ONNX can say it.
fn how(operand: &QuantizedOperand) -> Option<ActivationQuantization> {
    let scheme = &operand.scheme;
    if operand.site == Site::Weight {
        return None;
    }
    let qparams = match Expressible::of(scheme, operand.qparams.is_none()).ok()? {
        Expressible::Dynamic => return Some(ActivationQuantization::Dynamic),
        Expressible::Static => operand.qparams.as_ref()?,
    };
    Some(ActivationQuantization::Static(Grid {
        scale: *qparams.scale.first()?,
        zero_point: *qparams.zero_point.first()? as i32,
        quant_min: scheme.quant_min() as i32,
        quant_max: scheme.quant_max() as i32,
    }))
}
