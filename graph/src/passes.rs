//! From what was recorded to what has to be computed.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::backend::ir::{
    BaseOperationIr, BatchNormOpIr, ModuleOperationIr, NumericOperationIr, OperationIr, TensorId,
};
use burn::tensor::TensorData;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

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

/// A graph of what the outputs and running states need, with equal views of parameters shared
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
    graph.full = hooked.noted.full;
    graph.stopped = hooked.noted.stopped.into_iter().collect();
    skip_divisions(&mut graph);
    share_views(&mut graph);
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

/// The next values of running states as the forward pass gave them: Burn divides the sum of what
/// threads give by their number, which is one while recording.
fn skip_divisions(graph: &mut Graph) {
    if graph.parameters.iter().all(|one| one.update.is_none()) {
        return;
    }
    let divided: HashMap<TensorId, TensorId> = graph
        .operations
        .iter()
        .filter_map(|operation| match operation {
            OperationIr::NumericFloat(_, NumericOperationIr::DivScalar(division))
                if division.rhs.elem::<f64>() == 1.0 =>
            {
                Some((division.out.id, division.lhs.id))
            }
            _ => None,
        })
        .collect();
    for update in graph
        .parameters
        .iter_mut()
        .filter_map(|one| one.update.as_mut())
    {
        *update = divided.get(update).copied().unwrap_or(*update);
    }
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
    let mut renamed: HashMap<TensorId, TensorId> = HashMap::default();
    let mut first: HashMap<u64, Vec<(OperationIr, TensorId)>> = HashMap::default();
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
            let anonymous = HashMap::from_iter([(output, TensorId::new(u64::MAX))]);
            rename(&mut key, &anonymous);
            let mut hasher = DefaultHasher::new();
            key.hash(&mut hasher);
            let equal = first.entry(hasher.finish()).or_default();
            let noted = |id: &TensorId| {
                (
                    graph.hooked.get(id),
                    graph.noted_casts.get(id),
                    graph.is_full(*id),
                    graph.stopped.contains(id),
                )
            };
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
    let updates = graph.parameters.iter_mut();
    let updates = updates.filter_map(|one| one.update.as_mut());
    for id in graph.outputs.iter_mut().chain(updates) {
        *id = renamed.get(id).copied().unwrap_or(*id);
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
    let in_training = match fuse {
        true => norms_in_training(&graph.operations),
        false => HashSet::default(),
    };
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
        if let OperationIr::Module(ModuleOperationIr::BatchNorm(norm)) = &operation
            && in_training.contains(&norm.out.id)
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
    graph
        .parameters
        .retain(|one| needed.contains(&one.tensor) || one.update.is_some());
}

/// The results of batch normalizations by the statistics of what they normalize.
fn norms_in_training(operations: &[OperationIr]) -> HashSet<TensorId> {
    let norms: Vec<&BatchNormOpIr> = operations
        .iter()
        .filter_map(|operation| match operation {
            OperationIr::Module(ModuleOperationIr::BatchNorm(norm)) => Some(norm),
            _ => None,
        })
        .collect();
    if norms.is_empty() {
        return HashSet::default();
    }
    let makers = operations.iter().flat_map(|operation| {
        let made = operation.outputs();
        made.map(move |tensor| (tensor.id, operation))
    });
    let makers = Makers(makers.collect());
    norms
        .into_iter()
        .filter(|norm| makers.are_of_the_batch(norm))
        .map(|norm| norm.out.id)
        .collect()
}

/// Which operation makes which tensor.
struct Makers<'a>(HashMap<TensorId, &'a OperationIr>);

impl Makers<'_> {
    /// Whether mean and variance are what Burn computes of the input in training: the mean over all
    /// dimensions but that of the channels, and that of the squares of the distances from it.
    fn are_of_the_batch(&self, norm: &BatchNormOpIr) -> bool {
        let Some(squares) = self.averaged(norm.variance.id) else {
            return false;
        };
        let Some(OperationIr::NumericFloat(_, NumericOperationIr::Mul(square))) =
            self.0.get(&squares)
        else {
            return false;
        };
        let Some(OperationIr::NumericFloat(_, NumericOperationIr::Sub(distance))) =
            self.0.get(&square.lhs.id)
        else {
            return false;
        };
        self.averaged(norm.mean.id) == Some(norm.x.id)
            && square.lhs.id == square.rhs.id
            && distance.lhs.id == norm.x.id
            && self.unshaped(distance.rhs.id) == self.unshaped(norm.mean.id)
    }

    /// What this tensor is the mean of, over all dimensions but the second.
    fn averaged(&self, id: TensorId) -> Option<TensorId> {
        let OperationIr::NumericFloat(_, NumericOperationIr::MeanDim(mean)) =
            self.0.get(&self.unshaped(id))?
        else {
            return None;
        };
        let OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap)) =
            self.0.get(&self.unshaped(mean.input.id))?
        else {
            return None;
        };
        let to_front = matches!((swap.dim1, swap.dim2), (0, 1) | (1, 0));
        (mean.axis == 1 && to_front).then_some(swap.input.id)
    }

    /// The tensor of which this one is another shape.
    fn unshaped(&self, mut id: TensorId) -> TensorId {
        while let Some(OperationIr::BaseFloat(BaseOperationIr::Reshape(view))) = self.0.get(&id) {
            id = view.input.id;
        }
        id
    }
}
