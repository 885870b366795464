//! From what was recorded to what has to be computed.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::backend::ir::{ModuleOperationIr, OperationIr, TensorId, TensorIr};
use burn::tensor::TensorData;

use crate::graph::describe::{describe, rename};
use crate::hooks::Noted;
use crate::sites::insert;
use crate::{Graph, HookInfo, Parameter};

/// What hooks are there, and which tensors stand for what they and casts make.
#[derive(Debug, Default)]
pub(crate) struct Hooked {
    pub(crate) hooks: Vec<HookInfo>,
    pub(crate) noted: Noted,
}

/// A graph of what the outputs and running statistics need, with equal views of parameters shared
/// and hooks at their sites.
pub(crate) fn simplify(
    operations: Vec<OperationIr>,
    constants: HashMap<TensorId, TensorData>,
    parameters: Vec<Parameter>,
    inputs: Vec<TensorId>,
    outputs: Vec<TensorId>,
    hooked: Hooked,
) -> Graph {
    let mut graph = Graph::new(operations, constants, parameters, inputs, outputs);
    graph.hooks = hooked.hooks;
    graph.hooked = hooked.noted.stand_ins.into_iter().collect();
    graph.noted_casts = hooked.noted.casts.into_iter().collect();
    share_views(&mut graph);
    find_updates(&mut graph);
    keep(&mut graph, true);
    insert(&mut graph);
    describe(&mut graph);
    graph
}

/// Operations only, as they came: nothing shared or fused.
pub(crate) fn as_recorded(
    operations: Vec<OperationIr>,
    constants: HashMap<TensorId, TensorData>,
    parameters: Vec<Parameter>,
    inputs: Vec<TensorId>,
    outputs: Vec<TensorId>,
) -> Graph {
    let mut graph = Graph::new(operations, constants, parameters, inputs, outputs);
    keep(&mut graph, false);
    describe(&mut graph);
    graph
}

/// One operation instead of several equal ones on parameters and constants: a recurrence cuts its
/// weights in each of its steps.
fn share_views(graph: &mut Graph) {
    let mut known: HashSet<TensorId> = graph
        .parameters
        .iter()
        .filter(|parameter| !parameter.running)
        .map(|parameter| parameter.tensor)
        .chain(graph.constants.keys().copied())
        .collect();
    let mut renamed: HashMap<TensorId, TensorId> = HashMap::new();
    let mut first: HashMap<u64, Vec<(OperationIr, TensorId)>> = HashMap::new();
    let mut kept = Vec::with_capacity(graph.operations.len());
    for mut operation in std::mem::take(&mut graph.operations) {
        rename(&mut operation, &renamed);
        let outputs: Vec<TensorId> = operation.outputs().map(|tensor| tensor.id).collect();
        let shareable = operation.inputs().next().is_some()
            && operation.inputs().all(|tensor| known.contains(&tensor.id))
            && outputs.len() == 1;
        if shareable {
            let output = outputs[0];
            let mut key = operation.clone();
            let anonymous = HashMap::from([(output, TensorId::new(u64::MAX))]);
            rename(&mut key, &anonymous);
            let mut hasher = DefaultHasher::new();
            key.hash(&mut hasher);
            let equal = first.entry(hasher.finish()).or_default();
            let noted = |id: &TensorId| (graph.hooked.get(id), graph.noted_casts.get(id));
            let same = equal
                .iter()
                .find(|(other, same)| *other == key && noted(same) == noted(&output));
            if let Some((_, same)) = same {
                renamed.insert(output, *same);
                continue;
            }
            equal.push((key, output));
            known.insert(output);
        }
        kept.push(operation);
    }
    graph.operations = kept;
    for id in &mut graph.outputs {
        *id = renamed.get(id).copied().unwrap_or(*id);
    }
}

/// The next value of a running statistic: what is computed from it last and read by nothing.
fn find_updates(graph: &mut Graph) {
    for parameter in graph.parameters.iter_mut().filter(|one| one.running) {
        let mut reached = HashSet::from([parameter.tensor]);
        let mut read = HashSet::new();
        let mut last: Option<&TensorIr> = None;
        for operation in &graph.operations {
            if operation.inputs().any(|input| reached.contains(&input.id)) {
                read.extend(operation.inputs().map(|input| input.id));
                for output in operation.outputs() {
                    reached.insert(output.id);
                    last = Some(output);
                }
            }
        }
        parameter.update = last
            .filter(|tensor| tensor.shape.to_vec() == parameter.shape)
            .map(|tensor| tensor.id)
            .filter(|id| !read.contains(id) && !graph.outputs.contains(id));
    }
}

/// Leaves out what no output needs, and what makes placeholders.
fn keep(graph: &mut Graph, fuse: bool) {
    let given: HashSet<TensorId> = graph
        .parameters
        .iter()
        .map(|parameter| parameter.tensor)
        .chain(graph.inputs.iter().copied())
        .collect();
    let mut needed: HashSet<TensorId> = graph.outputs.iter().copied().collect();
    needed.extend(graph.parameters.iter().filter_map(|one| one.update));
    let made: HashSet<TensorId> = graph
        .operations
        .iter()
        .flat_map(|operation| operation.outputs().map(|tensor| tensor.id))
        .filter(|id| !given.contains(id) && !graph.constants.contains_key(id))
        .collect();
    let mut kept = Vec::with_capacity(graph.operations.len());
    for operation in std::mem::take(&mut graph.operations).into_iter().rev() {
        if matches!(operation, OperationIr::Init(_) | OperationIr::Drop(_)) {
            continue;
        }
        if !operation
            .outputs()
            .any(|tensor| needed.contains(&tensor.id) && !given.contains(&tensor.id))
        {
            continue;
        }
        if let (true, OperationIr::Module(ModuleOperationIr::BatchNorm(norm))) = (fuse, &operation)
            && made.contains(&norm.mean.id)
            && made.contains(&norm.variance.id)
        {
            // A batch normalization in training is recorded in parts: its statistics, then the
            // normalization by them. It is one operation again, which gives the statistics, too.
            graph.batch_norms.insert(norm.out.id);
            needed.extend([norm.x.id, norm.gamma.id, norm.beta.id]);
            needed.remove(&norm.mean.id);
            needed.remove(&norm.variance.id);
        } else {
            needed.extend(operation.inputs().map(|tensor| tensor.id));
        }
        kept.push(operation);
    }
    kept.reverse();
    graph.operations = kept;
    graph.constants.retain(|id, _| needed.contains(id));
    graph.parameters.retain(|one| needed.contains(&one.tensor));
}
