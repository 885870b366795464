//! What is known about the quantization of each tensor of a forward pass.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr,
};
use burn::module::Module;
use burn::tensor::DType;
use burn_lean_graph::{Graph, Node, Role};
use burn_lean_reparam::each_float;

use super::{Cause, Coverage};
use crate::{Scheme, Site, module::Phase, quantizers};

pub(super) struct Coverages {
    /// Scheme of each quantizer, and what it does now, by path.
    quantizers: HashMap<String, (Scheme, Phase)>,
    /// Path of the quantizer for the input of the layer with a weight.
    input_quantizers: HashMap<String, String>,
    known: HashMap<TensorId, Coverage>,
}

impl Coverages {
    pub(super) fn of<M: Module>(graph: &Graph, model: &M) -> Self {
        let mut coverages = Self {
            quantizers: HashMap::new(),
            input_quantizers: HashMap::new(),
            known: HashMap::new(),
        };
        for located in quantizers(model) {
            if let (Site::Input, Some(weight)) = (located.site, located.parameter) {
                coverages
                    .input_quantizers
                    .insert(weight, located.path.clone());
            }
            let quantizer = &located.quantizer;
            let of_path = (quantizer.scheme().clone(), quantizer.phase());
            coverages.quantizers.insert(located.path, of_path);
        }
        // Burn's scheme of each parameter that is stored quantized.
        let mut stored: HashMap<String, String> = HashMap::new();
        each_float(model, |at, float| {
            if let DType::QFloat(scheme) = float.dtype() {
                stored.insert(at.path(), format!("{scheme:?}"));
            }
        });
        for parameter in graph.parameters() {
            if let Some(scheme) = stored.get(&parameter.path) {
                let coverage = Coverage::Stored(scheme.clone());
                coverages.known.insert(parameter.tensor, coverage);
            }
        }
        coverages.follow(graph);
        coverages
    }

    pub(super) fn get(&self, tensor: TensorId) -> Option<&Coverage> {
        self.known.get(&tensor)
    }

    pub(super) fn input_quantizer(&self, weight: &str) -> Option<&str> {
        self.input_quantizers.get(weight).map(String::as_str)
    }

    fn follow(&mut self, graph: &Graph) {
        let layers: HashSet<usize> = graph
            .sites()
            .into_iter()
            .filter(|one| one.site.role == Role::Weight)
            .map(|one| one.node)
            .collect();
        // What is computed from parameters and constants alone.
        let mut derived: HashSet<TensorId> = graph
            .parameters()
            .iter()
            .map(|parameter| parameter.tensor)
            .chain(graph.constants().map(|(id, _)| id))
            .collect();
        for node in graph.nodes() {
            let is_layer = layers.contains(&node.index());
            let of_parameters = node.operands().all(|one| derived.contains(&one.id));
            if of_parameters && !is_layer {
                derived.extend(node.operation().outputs().map(|output| output.id));
            }
            let coverage = match (node.hook(), keeps_grid(&node)) {
                (Some(hook), _) => self.hooked(&node, &hook.path),
                (None, Some(input)) => self.known.get(&input.id).cloned(),
                // Of a weight, everything else that happens to it after its quantizer is of
                // interest.
                (None, None) if of_parameters && !is_layer => self.changed(&node),
                (None, None) => None,
            };
            if let Some(coverage) = coverage {
                for output in node.operation().outputs() {
                    self.known.insert(output.id, coverage.clone());
                }
            }
        }
    }

    /// What a quantizer puts out.
    fn hooked(&self, node: &Node<'_>, path: &str) -> Option<Coverage> {
        let before = node.operands().find_map(|one| self.known.get(&one.id));
        let Some((scheme, phase)) = self.quantizers.get(path) else {
            return before.cloned();
        };
        Some(match (phase.quantizes(), before) {
            // What is stored quantized is not quantized once more, and what a quantizer lets pass
            // may be quantized already.
            (_, Some(stored @ Coverage::Stored(_))) => stored.clone(),
            (false, Some(before)) if before.is_quantized() => before.clone(),
            (true, _) => Coverage::FakeQuantized {
                quantizer: path.to_string(),
                scheme: scheme.clone(),
            },
            (false, _) => Coverage::Float(Cause::NotQuantizing {
                quantizer: path.to_string(),
                phase: *phase,
            }),
        })
    }

    fn changed(&self, node: &Node<'_>) -> Option<Coverage> {
        let quantizer =
            node.operands()
                .find_map(|operand| match self.known.get(&operand.id)? {
                    Coverage::FakeQuantized { quantizer, .. } => Some(quantizer.clone()),
                    Coverage::Stored(scheme) => Some(scheme.clone()),
                    _ => None,
                })?;
        Some(Coverage::Float(Cause::Changed {
            quantizer,
            operation: node.name().to_string(),
        }))
    }
}

/// The operand of an operation after which quantized numbers are still on their grid: what moves
/// them, a maximum of some of them, a ReLU and a pruning mask, since zero is on every grid.
fn keeps_grid<'a>(node: &Node<'a>) -> Option<&'a TensorIr> {
    use ModuleOperationIr as Op;
    match node.operation() {
        OperationIr::Activation(ActivationOperationIr::Relu(op)) => Some(&op.input),
        OperationIr::Module(operation) => Some(match operation {
            Op::MaxPool1d(op) => &op.x,
            Op::MaxPool2d(op) => &op.x,
            Op::MaxPool1dWithIndices(op) => &op.x,
            Op::MaxPool2dWithIndices(op) => &op.x,
            Op::Unfold4d(op) => &op.x,
            _ => return None,
        }),
        OperationIr::BaseFloat(BaseOperationIr::MaskFill(op)) if node.scalars() == [0.0] => {
            Some(&op.tensor)
        }
        _ => node.moved(),
    }
}
