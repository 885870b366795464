//! The operations in an order in which the steps of a loop are alike.

use std::collections::hash_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::backend::ir::{
    BaseOperationIr, IrVisitorMut, NumericOperationIr, OperationIr, TensorId, TensorIr,
    TensorStatus,
};
use burn::tensor::Slice;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::find::{Found, STEPS};
use crate::graph::Graph;
use crate::graph::describe::rename;

/// The operations of a graph: first views of parameters and tensors of one number, of equal ones one; then the
/// others as they were recorded, except that a slice that has others like it comes right before what reads it.
#[derive(Debug)]
pub(super) struct Tape {
    pub(super) operations: Vec<OperationIr>,
    /// Where they are in the graph.
    pub(super) origins: Vec<usize>,
    /// What each of them does, whatever it reads.
    pub(super) kinds: Vec<u64>,
    /// Which of them makes a tensor, as which of its results.
    pub(super) makers: HashMap<TensorId, (usize, usize)>,
    pub(super) readers: HashMap<TensorId, Vec<usize>>,
    /// The tensors that are read after the last one.
    pub(super) results: HashSet<TensorId>,
}

impl Tape {
    pub(super) fn of(graph: &Graph) -> Self {
        let fixed = Fixed::of(graph);
        let mut operations: Vec<OperationIr> = graph.operations.clone();
        for operation in &mut operations {
            rename(operation, &fixed.same);
        }
        let order = order(graph, &operations, &fixed);
        let ordered: Vec<OperationIr> = order.iter().map(|at| operations[*at].clone()).collect();
        let mut makers = HashMap::default();
        let mut readers: HashMap<TensorId, Vec<usize>> = HashMap::default();
        for (at, operation) in ordered.iter().enumerate() {
            for (place, tensor) in operation.outputs().enumerate() {
                makers.insert(tensor.id, (at, place));
            }
            for tensor in operation.inputs() {
                let readers = readers.entry(tensor.id).or_default();
                if readers.last() != Some(&at) {
                    readers.push(at);
                }
            }
        }
        Self {
            kinds: ordered.iter().map(kind).collect(),
            operations: ordered,
            origins: order,
            makers,
            readers,
            results: graph.results.clone(),
        }
    }

    /// What an operation of a step makes, by its place in the step and among its results.
    pub(super) fn made(&self, found: &Found, step: usize, from: (usize, usize)) -> TensorIr {
        let (offset, place) = from;
        let at = found.start + step * found.period + offset;
        let mut outputs = self.operations[at].outputs();
        status_free(outputs.nth(place).expect("found among its results"))
    }
}

pub(super) fn status_free(tensor: &TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadOnly,
        ..tensor.clone()
    }
}

/// Parameters, constants, their views, and tensors of one number.
struct Fixed {
    tensors: HashSet<TensorId>,
    /// Positions of the operations that make it.
    operations: HashSet<usize>,
    /// Those that another one does, too.
    twice: HashSet<usize>,
    /// What stands for a tensor that is computed more than once.
    same: HashMap<TensorId, TensorId>,
}

impl Fixed {
    fn of(graph: &Graph) -> Self {
        let mut found = Self {
            tensors: graph.parameters.iter().map(|one| one.tensor).collect(),
            operations: HashSet::default(),
            twice: HashSet::default(),
            same: HashMap::default(),
        };
        let mut equal: HashMap<u64, TensorId> = HashMap::default();
        let mut constants: Vec<TensorId> = graph.constants.keys().copied().collect();
        constants.sort();
        for id in constants {
            let data = &graph.constants[&id];
            match equal.entry(hashed(&data.as_bytes())) {
                Entry::Vacant(entry) => drop(entry.insert(id)),
                Entry::Occupied(entry) if graph.constants[entry.get()] == *data => {
                    found.same.insert(id, *entry.get());
                }
                Entry::Occupied(_) => {}
            }
            found.tensors.insert(id);
        }
        let mut done: HashMap<u64, Vec<(OperationIr, Vec<TensorId>)>> = HashMap::default();
        for (at, operation) in graph.operations.iter().enumerate() {
            let mut inputs = operation.inputs();
            let is_fixed = inputs.all(|tensor| found.tensors.contains(&tensor.id))
                && is_given(operation)
                && graph.hook_of(operation).is_none();
            if !is_fixed {
                continue;
            }
            found.operations.insert(at);
            let outputs: Vec<TensorId> = operation.outputs().map(|tensor| tensor.id).collect();
            found.tensors.extend(&outputs);
            if outputs.iter().any(|id| graph.results.contains(id)) {
                continue;
            }
            let mut key = operation.clone();
            rename(&mut key, &found.same);
            rename(
                &mut key,
                &outputs.iter().map(|id| (*id, TensorId::new(0))).collect(),
            );
            let alike = done.entry(hashed(&key)).or_default();
            match alike.iter().find(|(other, _)| *other == key) {
                None => alike.push((key, outputs)),
                Some((_, made)) => {
                    found.twice.insert(at);
                    found
                        .same
                        .extend(outputs.into_iter().zip(made.iter().copied()));
                }
            }
        }
        found
    }
}

/// Whether it makes a tensor of one number, or a view of all of one.
fn is_given(operation: &OperationIr) -> bool {
    use BaseOperationIr::*;
    match operation {
        OperationIr::NumericFloat(_, numeric) | OperationIr::NumericInt(_, numeric) => {
            matches!(numeric, NumericOperationIr::Full(_))
        }
        _ => matches!(
            base(operation),
            Some(
                Reshape(_)
                    | SwapDims(_)
                    | Permute(_)
                    | Expand(_)
                    | Cast(_)
                    | Empty(_)
                    | Zeros(_)
                    | Ones(_)
            )
        ),
    }
}

fn base(operation: &OperationIr) -> Option<&BaseOperationIr> {
    match operation {
        OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) => {
            Some(base)
        }
        _ => None,
    }
}

/// Operand and result of a slice.
pub(super) fn sliced(operation: &OperationIr) -> Option<(&TensorIr, &TensorIr)> {
    match base(operation)? {
        BaseOperationIr::Slice(o) => Some((&o.tensor, &o.out)),
        _ => None,
    }
}

/// Operands, axis and result of a concatenation.
pub(super) fn concatenated(operation: &OperationIr) -> Option<(&[TensorIr], usize, &TensorIr)> {
    match base(operation)? {
        BaseOperationIr::Cat(o) => Some((&o.tensors, o.dim, &o.out)),
        _ => None,
    }
}

/// A concatenation of other operands.
pub(super) fn with_parts(operation: &OperationIr, parts: &[TensorIr]) -> OperationIr {
    let mut operation = operation.clone();
    if let OperationIr::BaseFloat(BaseOperationIr::Cat(o))
    | OperationIr::BaseInt(BaseOperationIr::Cat(o))
    | OperationIr::BaseBool(BaseOperationIr::Cat(o)) = &mut operation
    {
        o.tensors = parts.to_vec();
    }
    operation
}

/// Tensor and ranges of what takes or assigns a part of it.
pub(super) fn ranges(operation: &OperationIr) -> Option<(&TensorIr, &[Slice])> {
    match base(operation)? {
        BaseOperationIr::Slice(o) => Some((&o.tensor, &o.ranges)),
        BaseOperationIr::SliceAssign(o) => Some((&o.tensor, &o.ranges)),
        _ => None,
    }
}

pub(super) fn is_reshape(operation: &OperationIr) -> bool {
    matches!(base(operation), Some(BaseOperationIr::Reshape(_)))
}

/// The order of the operations; of equal fixed ones there is one.
fn order(graph: &Graph, operations: &[OperationIr], fixed: &Fixed) -> Vec<usize> {
    let mut makers: HashMap<TensorId, usize> = HashMap::default();
    let mut readers: HashMap<TensorId, Vec<usize>> = HashMap::default();
    for (at, operation) in operations.iter().enumerate() {
        makers.extend(operation.outputs().map(|tensor| (tensor.id, at)));
        for tensor in operation.inputs() {
            readers.entry(tensor.id).or_default().push(at);
        }
    }
    let read_by = |at: usize| {
        let outputs = operations[at].outputs();
        let mut all = Vec::new();
        for tensor in outputs {
            if graph.results.contains(&tensor.id) {
                return Vec::new();
            }
            all.extend(readers.get(&tensor.id).into_iter().flatten().copied());
        }
        all
    };
    // Slices of one tensor that are as large as each other.
    let key = |(whole, part): (&TensorIr, &TensorIr)| (whole.id, part.shape.to_vec());
    let mut siblings: HashMap<_, usize> = HashMap::default();
    for slice in operations.iter().filter_map(sliced) {
        *siblings.entry(key(slice)).or_default() += 1;
    }
    let mut placing = Placing {
        operations,
        makers: &makers,
        lazy: HashSet::default(),
        placed: fixed.operations.clone(),
        order: Vec::with_capacity(operations.len()),
    };
    let fixed_ones = (0..operations.len()).filter(|at| fixed.operations.contains(at));
    let once = fixed_ones.filter(|at| !fixed.twice.contains(at));
    placing.order.extend(once);
    for (at, operation) in operations.iter().enumerate() {
        if fixed.operations.contains(&at) {
            continue;
        }
        let of = operation.inputs().next().and_then(|x| makers.get(&x.id));
        let is_of_lazy = of.is_some_and(|of| placing.lazy.contains(of));
        let is_reshape = is_reshape(operation);
        let is_part = sliced(operation).is_some_and(|slice| siblings[&key(slice)] >= STEPS);
        if (is_part || is_reshape && is_of_lazy) && !read_by(at).is_empty() {
            placing.lazy.insert(at);
            continue;
        }
    }
    for at in 0..operations.len() {
        if !placing.lazy.contains(&at) && !placing.placed.contains(&at) {
            placing.place(at);
        }
    }
    placing.order
}

struct Placing<'a> {
    operations: &'a [OperationIr],
    makers: &'a HashMap<TensorId, usize>,
    /// Come right before what reads them.
    lazy: HashSet<usize>,
    placed: HashSet<usize>,
    order: Vec<usize>,
}

impl Placing<'_> {
    fn place(&mut self, at: usize) {
        // What it waits for, before it: without recursion, as views of views may be many.
        let mut waiting = vec![at];
        while let Some(at) = waiting.last().copied() {
            let inputs = self.operations[at].inputs();
            let makers = inputs.filter_map(|tensor| self.makers.get(&tensor.id));
            let before = makers
                .copied()
                .find(|maker| self.lazy.contains(maker) && !self.placed.contains(maker));
            if let Some(before) = before {
                waiting.push(before);
                continue;
            }
            waiting.pop();
            if self.placed.insert(at) {
                self.order.push(at);
            }
        }
    }
}

/// What an operation does, whatever the names of its tensors and the parts that it takes.
fn kind(operation: &OperationIr) -> u64 {
    struct Nameless;
    impl IrVisitorMut for Nameless {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            tensor.id = TensorId::new(0);
            tensor.status = TensorStatus::ReadOnly;
        }

        fn visit_range_mut(&mut self, range: &mut Slice) {
            *range = Slice::new(0, None, range.step);
        }
    }
    let mut operation = operation.clone();
    operation.visit_mut(&mut Nameless);
    hashed(&operation)
}

fn hashed(of: &impl Hash) -> u64 {
    let mut hash = DefaultHasher::new();
    of.hash(&mut hash);
    hash.finish()
}
