//! The quantizers of a model at the edges of its recording.

use std::collections::HashMap;

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
};
use burn::module::Module;
use burn_lean_graph::{Graph, Tensors, record};
use burn_lean_quant::{
    Site,
    deploy::{QuantizedGraph, QuantizedOperand},
    integer::Grid,
};

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
    for operand in QuantizedGraph::of(graph, model)?.operands {
        let (Some(node), Some(how)) = (positions[operand.node], how(&operand)) else {
            continue;
        };
        let Some(reader) = graph.nodes().nth(operand.node) else {
            continue;
        };
        let floats = shown.entry(operand.quantizer.clone()).or_default();
        if !takes_quantized(reader.operation()) {
            floats.get_or_insert(reader.name());
            continue;
        }
        let operand = operand.operand;
        found.edges.insert(Edge { node, operand }, how);
    }
    found
        .left_float
        .retain_mut(|(path, why)| match shown.get(path) {
            None => true,
            Some(None) => false,
            Some(Some(reader)) => {
                let name = why.split(": ").next().unwrap_or(path);
                *why = format!("{name}: `{reader}` takes floats in the file");
                true
            }
        });
    Ok(found)
}

/// Whether operands of an operation are written as their quantizers have them.
fn takes_quantized(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::Float(_, float) => matches!(float, FloatOperationIr::Matmul(_)),
        OperationIr::NumericFloat(_, numeric) => matches!(numeric, NumericOperationIr::Add(_)),
        OperationIr::BaseFloat(base) => matches!(base, BaseOperationIr::Cat(_)),
        OperationIr::Module(module) => matches!(
            module,
            ModuleOperationIr::Linear(_)
                | ModuleOperationIr::Conv1d(_)
                | ModuleOperationIr::Conv2d(_)
                | ModuleOperationIr::Conv3d(_)
                | ModuleOperationIr::ConvTranspose1d(_)
                | ModuleOperationIr::ConvTranspose2d(_)
                | ModuleOperationIr::ConvTranspose3d(_)
                | ModuleOperationIr::Embedding(_)
                | ModuleOperationIr::Attention(_)
        ),
        _ => false,
    }
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
