//! The quantizers of a recording in the one step that stands for all steps of a loop.

use std::collections::HashMap;

use burn::backend::ir::TensorId;
use burn_lean_graph::{Graph, LoopPart, Node, Rolled};

use crate::{ActivationQuantization, Edge, Quantization};

/// What is said of the operations of `plain`, said of those of the rolled graph.
///
/// The error says which operation of a loop is quantized in other ways in some of its steps.
pub(super) fn quantization(
    plain: &Graph,
    rolled: &Rolled,
    of_plain: &Quantization,
) -> Result<Quantization, String> {
    let mut found = Quantization {
        edges: HashMap::new(),
        ..of_plain.clone()
    };
    if of_plain.edges.is_empty() {
        return Ok(found);
    }
    let how = |node: usize, operand: usize| of_plain.edges.get(&Edge { node, operand }).copied();
    for (node, origin) in rolled.graph.nodes().zip(&rolled.origins) {
        let Some(origin) = *origin else {
            collected(plain, of_plain, rolled, node.index(), &mut found)?;
            continue;
        };
        let operands = plain.node(origin).operation().inputs();
        let before: Vec<TensorId> = operands.map(|tensor| tensor.id).collect();
        let count = node.operation().inputs().count();
        for (operand, tensor) in node.operation().inputs().enumerate() {
            // Where a loop collects operands of a concatenation, the others have moved.
            let at = match before.len() == count {
                true => Some(operand),
                false => before.iter().position(|id| *id == tensor.id),
            };
            let Some(at) = at else { continue };
            let own = how(origin, at);
            if let Some(twins) = rolled.twins.get(&origin) {
                let (first, others) = twins.split_first().ok_or("a loop has no steps")?;
                let agree = others.iter().all(|twin| how(*twin, at) == own);
                // What is there before the first step may be zeros, which have no quantizer, and are no others rounded.
                let begins = how(*first, at) == own || are_zeros(plain, *first, at);
                if !agree || !begins {
                    let name = node.name();
                    return Err(format!(
                        "`{name}` in a loop over it is quantized in other ways in some steps"
                    ));
                }
            }
            if let Some(own) = own {
                let node = node.index();
                found.edges.insert(Edge { node, operand }, own);
            }
        }
    }
    Ok(found)
}

/// Whether an operand is made as zeros.
fn are_zeros(plain: &Graph, node: usize, operand: usize) -> bool {
    let tensor = plain.node(node).operation().inputs().nth(operand);
    let makes = |node: &Node<'_>| {
        let mut outputs = node.operation().outputs();
        outputs.any(|out| tensor.is_some_and(|tensor| tensor.id == out.id))
    };
    plain
        .nodes()
        .find(makes)
        .is_some_and(|node| node.name() == "zeros")
}

/// What a concatenation rounds of each step is rounded where it is collected.
fn collected(
    plain: &Graph,
    of_plain: &Quantization,
    rolled: &Rolled,
    node: usize,
    found: &mut Quantization,
) -> Result<(), String> {
    let end = LoopPart::of(rolled.graph.node(node).operation());
    let Some(LoopPart::End {
        next,
        parts,
        collected,
        ..
    }) = end
    else {
        return Ok(());
    };
    for (place, (part, all)) in parts.iter().zip(collected).enumerate() {
        let how = match put(plain, of_plain, rolled, all.id)? {
            Some(how) => Some(how),
            None => rounded(plain, of_plain, rolled, part.id, all.id)?,
        };
        if let Some(how) = how {
            let operand = 1 + next.len() + place;
            found.edges.insert(Edge { node, operand }, how);
        }
    }
    Ok(())
}

/// How what is written into `all` in each step is rounded before.
fn put(
    plain: &Graph,
    of_plain: &Quantization,
    rolled: &Rolled,
    all: TensorId,
) -> Result<Option<ActivationQuantization>, String> {
    let makes = |node: &Node<'_>| node.operation().outputs().any(|out| out.id == all);
    let last = plain
        .nodes()
        .find(makes)
        .filter(|node| node.name() == "slice_assign");
    let twins = last.and_then(|last| {
        let mut loops = rolled.twins.values();
        loops.find(|twins| twins.contains(&last.index()))
    });
    // The value comes behind the tensor that it is written into.
    let how = |node: &usize| {
        of_plain
            .edges
            .get(&Edge {
                node: *node,
                operand: 1,
            })
            .copied()
    };
    let Some(twins) = twins else { return Ok(None) };
    match twins.iter().all(|twin| how(twin) == how(&twins[0])) {
        true => Ok(how(&twins[0])),
        false => Err("`slice_assign` of a loop's steps rounds them in other ways".into()),
    }
}

/// How the concatenation outside of the loop that gives `all`, or a part of whose result it is, rounds a
/// step's part.
fn rounded(
    plain: &Graph,
    of_plain: &Quantization,
    rolled: &Rolled,
    part: TensorId,
    all: TensorId,
) -> Result<Option<ActivationQuantization>, String> {
    let makes = |node: &Node<'_>| node.operation().outputs().any(|out| out.id == all);
    let is_new = !plain.nodes().any(|node| makes(&node));
    let is_in_loop = |at: usize| rolled.twins.values().any(|twins| twins.contains(&at));
    for node in plain.nodes().filter(|node| node.name() == "cat") {
        let mut inputs = node.operation().inputs();
        let operand = inputs.position(|tensor| tensor.id == part);
        let Some(operand) = operand.filter(|_| makes(&node) || is_new && !is_in_loop(node.index()))
        else {
            continue;
        };
        let node_index = node.index();
        let how = |operand| {
            let edge = Edge {
                node: node_index,
                operand,
            };
            of_plain.edges.get(&edge).copied()
        };
        let count = node.operation().inputs().count();
        return match (0..count).all(|other| how(other) == how(operand)) {
            true => Ok(how(operand)),
            false => Err("`cat` rounds the steps of a loop over it in other ways".into()),
        };
    }
    Ok(None)
}
