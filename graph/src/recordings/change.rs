//! Whether a recording that was kept is still what the forward pass does.

use burn::backend::ir::{OperationIr, TensorId};
use burn::module::ParamId;
use burn::tensor::{DType, Shape, TensorData};
use rustc_hash::FxHashMap as HashMap;

use crate::graph::describe::rename;
use crate::{Graph, Node};

/// The tensors that are no parameters, in the order in which they were recorded.
fn constants(graph: &Graph) -> Vec<(TensorId, &TensorData)> {
    let mut all: Vec<_> = graph
        .constants
        .iter()
        .map(|(id, data)| (*id, data))
        .collect();
    all.sort_by_key(|(id, _)| id.value());
    all
}

fn values(graph: &Graph) -> Vec<(&Shape, DType, &[u8])> {
    let parts = constants(graph).into_iter();
    parts
        .map(|(_, data)| (data.shape(), data.dtype(), data.as_bytes()))
        .collect()
}

/// The tensors that no operation makes.
fn given(graph: &Graph) -> Vec<TensorId> {
    let parameters = graph.parameters.iter().map(|one| one.tensor);
    let constants = constants(graph).into_iter().map(|(id, _)| id);
    let inputs = graph.inputs.iter().copied();
    parameters.chain(inputs).chain(constants).collect()
}

/// What is no longer as it was recorded, if anything is.
pub(super) fn change(before: &Graph, now: &Graph) -> Option<String> {
    if before.nodes().len() != now.nodes().len() {
        return Some("the number of operations".into());
    }
    let read = |graph: &Graph| -> Vec<ParamId> {
        let parameters = graph.parameters.iter();
        parameters.map(|one| one.id).collect()
    };
    if read(before) != read(now) {
        return Some("which parameters are read".into());
    }
    // Which tensor is which.
    let mut names: HashMap<TensorId, TensorId> =
        given(before).into_iter().zip(given(now)).collect();
    for (one, other) in before.nodes().zip(now.nodes()) {
        if !is_same(&one, &other, &mut names) {
            let module = match other.module() {
                "?" => String::new(),
                module => format!(" of `{module}`"),
            };
            return Some(format!(
                "an operation `{}`{module}, or a number or an operand of it,",
                other.name()
            ));
        }
    }
    let results = before.outputs.iter().map(|id| names.get(id));
    if !results.eq(now.outputs.iter().map(Some)) {
        return Some("which tensor is a result".into());
    }
    (values(before) != values(now))
        .then(|| "a tensor that is no parameter, or was made of numbers of the host,".into())
}

/// Whether two operations compute the same; then their results have a name, too.
fn is_same(one: &Node<'_>, other: &Node<'_>, names: &mut HashMap<TensorId, TensorId>) -> bool {
    let (before, now) = (one.operation(), other.operation());
    // The statistics of a batch normalization that is one operation are nobody's result.
    for (old, new) in before.inputs().zip(now.inputs()) {
        names.entry(old.id).or_insert(new.id);
    }
    let text = |operation: &OperationIr, names: &HashMap<TensorId, TensorId>| {
        let mut operation = operation.clone();
        rename(&mut operation, names);
        // Axes, ranges, options and distributions, too; as text, so that NaN is NaN.
        format!("{operation:?}")
    };
    // With gradients Burn records the places of maxima, too, of sorted and of pooled numbers.
    let plain = |node: &Node<'_>| node.name().trim_end_matches("_with_indices");
    let made = before.outputs().zip(now.outputs());
    names.extend(made.map(|(old, new)| (old.id, new.id)));
    match one.name() == other.name() {
        true => text(before, names) == text(now, &HashMap::default()),
        false => {
            let read = before.inputs().map(|old| names.get(&old.id).copied());
            plain(one) == plain(other) && read.eq(now.inputs().map(|new| Some(new.id)))
        }
    }
}
