//! Recordings of several batches in one naming: operation 17 of one is operation 17 of all.

use burn::backend::ir::TensorId;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use crate::graph::describe::{describe, operands, rename};
use crate::graph::rows;
use crate::interpret::name;
use crate::{Graph, GraphError, Node, Parameter};

/// The graph with its tensors numbered in the order in which they are first named and the rows of its linear
/// layers folded, so that equal forward passes are equal graphs.
pub(super) fn canonical(mut graph: Graph) -> Graph {
    rows::fold(&mut graph);
    let mut names: HashMap<TensorId, TensorId> = HashMap::default();
    let mut note = |id: TensorId| {
        let next = TensorId::new(names.len() as u64);
        names.entry(id).or_insert(next);
    };
    for parameter in &graph.parameters {
        note(parameter.tensor);
    }
    graph.inputs.iter().for_each(|id| note(*id));
    for operation in &graph.operations {
        operands(&graph, operation).into_iter().for_each(&mut note);
        operation.outputs().for_each(|tensor| note(tensor.id));
    }
    graph.outputs.iter().for_each(|id| note(*id));

    let named = |id: &TensorId| names[id];
    for parameter in &mut graph.parameters {
        parameter.tensor = named(&parameter.tensor);
    }
    graph.inputs = graph.inputs.iter().map(named).collect();
    graph.outputs = graph.outputs.iter().map(named).collect();
    let constants = std::mem::take(&mut graph.constants).into_iter();
    graph.constants = constants
        .filter_map(|(id, data)| Some((*names.get(&id)?, data)))
        .collect();
    for operation in &mut graph.operations {
        rename(operation, &names);
    }
    describe(&mut graph);
    graph
}

/// Refuses a recording whose operations are not those of the first one, both canonical.
pub(super) fn check(first: &Graph, other: &Graph, batch: usize) -> Result<(), GraphError> {
    let differs = |found: String, expected: String| {
        Err(GraphError::Differs {
            batch,
            found,
            expected,
        })
    };
    // They are numbered before all else: one more, and every later number is another.
    if let Some(path) = only_read_by(first, other) {
        return differs(format!("no use of `{path}`"), "one".into());
    }
    if let Some(path) = only_read_by(other, first) {
        return differs(format!("a use of `{path}`"), "none".into());
    }
    let inputs = |graph: &Graph| format!("{} inputs", graph.inputs.len());
    if first.inputs.len() != other.inputs.len() {
        return differs(inputs(other), inputs(first));
    }
    for (one, two) in first.nodes().zip(other.nodes()) {
        let (a, b) = (one.operation(), two.operation());
        let same = name(a) == name(b)
            && operands(first, a) == operands(other, b)
            && a.outputs()
                .map(|out| out.id)
                .eq(b.outputs().map(|out| out.id));
        if !same {
            let (reads, other_reads) = (operands(first, a), operands(other, b));
            let read = reads.iter().zip(&other_reads);
            // Of the same operation, what it reads tells them apart.
            return match read.into_iter().find(|(one, two)| one != two) {
                Some((x, y)) if name(a) == name(b) => {
                    let (mut found, expected) = (origin(other, *y), origin(first, *x));
                    // Words that two constants share.
                    if found == expected {
                        found.push_str(", another one,");
                    }
                    let say =
                        |node: Node<'_>, of: String| format!("{}, that reads {of}", say(node));
                    differs(say(two, found), say(one, expected))
                }
                _ => differs(say(two), say(one)),
            };
        }
    }
    let count = |graph: &Graph| format!("{} operations", graph.operations.len());
    if first.operations.len() != other.operations.len() {
        return differs(count(other), count(first));
    }
    if first.inputs != other.inputs || first.outputs != other.outputs {
        return differs("other inputs or results".into(), "those of batch 0".into());
    }
    Ok(())
}

/// The first parameter of `one` that `two` does not read.
fn only_read_by(one: &Graph, two: &Graph) -> Option<String> {
    let read: HashSet<_> = two.parameters.iter().map(Parameter::place).collect();
    let mut places = one.parameters.iter().map(Parameter::place);
    let (path, _) = places.find(|place| !read.contains(place))?;
    Some(path)
}

fn say(node: Node<'_>) -> String {
    format!("operation {}, {node:?}", node.index())
}

/// Where a tensor comes from, in the words of an error.
fn origin(graph: &Graph, tensor: TensorId) -> String {
    let is_made = |node: &Node<'_>| node.operation().outputs().any(|made| made.id == tensor);
    if let Some(parameter) = graph.parameters.iter().find(|one| one.tensor == tensor) {
        return format!("`{}`", parameter.path);
    }
    match graph.nodes().find(is_made) {
        Some(node) => say(node),
        None if graph.inputs.contains(&tensor) => "an input".into(),
        None => "a constant".into(),
    }
}
