//! The quantizers of a model at the edges of its recording.

use std::collections::{HashMap, HashSet};

use burn::module::Module;
use burn_lean_graph::{Graph, HookInfo, Node, Tensors, Views, record};
use burn_lean_quant::{Site, quantizers};

use super::lower::rounds_operands;
use crate::{ActivationQuantization, DeployError, Edge, Quantization};

/// What the quantizers of `model` say of the operations of `plain`, a recording of the same forward
/// pass without them.
///
/// With its quantizers, the recording has the same operations and some more: one for each quantizer, and the
/// views of a sequence that one rounds as a whole.
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
    for node in graph.nodes().filter(|node| !node.came_with_hook()) {
        let Some(twin) = same.next().filter(|twin| twin.name() == node.name()) else {
            return Ok(found);
        };
        positions[node.index()] = Some(twin.index());
    }
    if same.next().is_some() {
        return Ok(found);
    }
    let path = |hook: usize| graph.hooks()[hook].path.as_str();
    let seen: HashSet<&str> = graph
        .hooks()
        .iter()
        .map(|hook| hook.path.as_str())
        .collect();
    let mut grids: HashMap<String, ActivationQuantization> = HashMap::new();
    // The weights whose input a quantizer rounds.
    let mut weights: HashMap<String, String> = HashMap::new();
    for located in quantizers(model) {
        let acts = seen.contains(located.path.as_str()) && located.quantizer.phase().quantizes();
        if located.site != Site::Weight
            && acts
            && let Ok(how) = ActivationQuantization::of(&located.quantizer)?
        {
            let weight = located.parameter.filter(|_| located.site == Site::Input);
            weights.extend(weight.map(|weight| (located.path.clone(), weight)));
            grids.insert(located.path, how);
        }
    }
    // A range of the values at hand is that of a view only if this shows all of them.
    let views = |hook: &HookInfo| match grids.get(&hook.path) {
        Some(ActivationQuantization::Dynamic(grid)) if grid.per_token => Views::OfRows,
        Some(ActivationQuantization::Dynamic(_)) => Views::OfAll,
        _ => Views::OfNumbers,
    };
    let (operands, results) = (graph.hooked_operands(views), graph.hooked_results(views));
    // With the operation that takes floats all the same, if there is one.
    let mut shown: HashMap<&str, Option<&'static str>> = HashMap::new();
    for (node, operand, hook) in operands.iter().copied() {
        let (Some(node), Some(how)) = (positions[node], grids.get(path(hook))) else {
            continue;
        };
        found.edges.insert(Edge { node, operand }, *how);
        if let (ActivationQuantization::Dynamic(_), Some(weight)) = (how, weights.get(path(hook))) {
            // Where it is seen, and nowhere else.
            found.inputs.remove(weight);
        }
        shown.entry(path(hook)).or_default();
    }
    for (position, hook) in results {
        if let Some(how) = grids.get(path(hook)) {
            found.results.insert(position, *how);
            shown.entry(path(hook)).or_default();
        }
    }
    for (node, operand, hook) in operands {
        let Some(reader) = positions[node].map(|node| plain.node(node)) else {
            continue;
        };
        if let Some(floats) = shown.get_mut(path(hook))
            && !is_told_apart(reader, operand, &found)
        {
            let node = reader.index();
            found.edges.remove(&Edge { node, operand });
            floats.get_or_insert(reader.name());
        }
    }
    // Rounding twice is not written: the second quantizer gets what the first one did not round.
    for hook in graph.hooked_hooks() {
        let floats = shown.entry(path(hook)).or_default();
        floats.get_or_insert("another quantizer");
    }
    found
        .left_float
        .retain_mut(|(path, why)| match shown.get(path.as_str()) {
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
