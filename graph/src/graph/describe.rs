//! Who reads what, under which name, and when for the last time.

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, IrVisitorMut, NumericOperationIr, OperationIr, TensorId,
    TensorIr, TensorStatus,
};
use burn::tensor::Distribution;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::composite::Composites;
use super::kept::Kept;
use super::{Graph, Lifetime, Uploaded};

/// Notes who reads what, and when for the last time.
pub(crate) fn describe(graph: &mut Graph) {
    graph.kept = Kept::default();
    graph.uploaded = Uploaded::default();
    let updates = graph.parameters.iter().filter_map(|one| one.update);
    graph.results = graph.outputs.iter().copied().chain(updates).collect();
    graph.reads = reads(graph);
    graph.lifetimes = lifetimes(graph);
    graph.masks = masks(graph);
    graph.magnified = magnified(graph);
    graph.readers.clear();
    for (index, operation) in graph.operations.iter().enumerate() {
        for id in operands(graph, operation) {
            graph.readers.entry(id).or_default().push(index);
        }
    }
    graph.composites = Composites::of(graph);
}

/// Gives tensors other names; says of all that they can be read only, since sharing a result makes
/// what Burn noted about its last reader wrong.
struct Rename<'a>(&'a HashMap<TensorId, TensorId>);

impl IrVisitorMut for Rename<'_> {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        if let Some(id) = self.0.get(&tensor.id) {
            tensor.id = *id;
        }
        tensor.status = TensorStatus::ReadOnly;
    }
}

/// Gives the tensors of an operation other names.
pub(crate) fn rename(operation: &mut OperationIr, names: &HashMap<TensorId, TensorId>) {
    operation.visit_mut(&mut Rename(names));
}

/// What an operation of the graph reads.
pub(crate) fn operands(graph: &Graph, operation: &OperationIr) -> Vec<TensorId> {
    match graph.batch_norm(operation) {
        Some(norm) => vec![norm.x.id, norm.gamma.id, norm.beta.id],
        None => operation.inputs().map(|tensor| tensor.id).collect(),
    }
}

/// The parameters that each operation reads, through views and casts.
fn reads(graph: &Graph) -> Vec<Vec<usize>> {
    let mut origin: HashMap<TensorId, usize> = graph
        .parameters
        .iter()
        .enumerate()
        .map(|(index, parameter)| (parameter.tensor, index))
        .collect();
    let mut reads = Vec::with_capacity(graph.operations.len());
    for operation in &graph.operations {
        let mut found: Vec<usize> = operands(graph, operation)
            .iter()
            .filter_map(|id| origin.get(id).copied())
            .collect();
        found.dedup();
        if let Some(parameter) = shown(graph, operation, &found) {
            for output in operation.outputs() {
                origin.insert(output.id, parameter);
            }
        }
        reads.push(found);
    }
    reads
}

/// The parameter that the result of an operation counts as, for what reads it, where the operation reads
/// `parameters`: that of which it makes a view or a cast.
pub(crate) fn shown(graph: &Graph, operation: &OperationIr, parameters: &[usize]) -> Option<usize> {
    let [parameter] = parameters else {
        return None;
    };
    let is_view = matches!(
        operation,
        OperationIr::BaseFloat(
            BaseOperationIr::Reshape(_)
                | BaseOperationIr::SwapDims(_)
                | BaseOperationIr::Permute(_)
                | BaseOperationIr::Expand(_)
                | BaseOperationIr::Slice(_)
                | BaseOperationIr::Cast(_)
        )
    );
    let stands_for_it =
        is_view || graph.hook_of(operation).is_some() || graph.noted_cast(operation).is_some();
    stands_for_it.then_some(*parameter)
}

/// The tensors of zeros and ones that are drawn.
fn masks(graph: &Graph) -> HashSet<TensorId> {
    let drawn = graph
        .operations
        .iter()
        .filter_map(|operation| match operation {
            OperationIr::Float(_, FloatOperationIr::Random(random)) => match random.distribution {
                Distribution::Bernoulli(_) => Some(random.out.id),
                _ => None,
            },
            _ => None,
        });
    drawn.collect()
}

/// What goes into a logarithm, a denominator, a root or a power, also behind arithmetic element by
/// element: `log σ(x)`, `log(1 − tanh² x)`.
///
/// There a derivative that vanishes is multiplied with one that grows as fast, so that its relative error
/// counts.
fn magnified(graph: &Graph) -> HashSet<TensorId> {
    use FloatOperationIr as Float;
    use NumericOperationIr as Numeric;
    let mut found = HashSet::default();
    for operation in graph.operations.iter().rev() {
        let leads = operation.outputs().any(|made| found.contains(&made.id));
        let reads = match operation {
            OperationIr::Float(
                _,
                Float::Log(_)
                | Float::Log1p(_)
                | Float::Recip(_)
                | Float::Sqrt(_)
                | Float::Powf(_)
                | Float::PowfScalar(_)
                | Float::ArcTanh(_),
            ) => true,
            OperationIr::NumericFloat(_, Numeric::Div(div)) => {
                found.insert(div.rhs.id);
                leads
            }
            OperationIr::NumericFloat(
                _,
                Numeric::Sum(_)
                | Numeric::SumDim(_)
                | Numeric::SumDims(_)
                | Numeric::Mean(_)
                | Numeric::MeanDim(_),
            ) => false,
            OperationIr::NumericFloat(..) | OperationIr::BaseFloat(_) => leads,
            _ => false,
        };
        if reads {
            found.extend(operation.inputs().map(|read| read.id));
        }
    }
    found
}

/// When each tensor is read for the last time.
fn lifetimes(graph: &Graph) -> Vec<Lifetime> {
    let mut seen = graph.results.clone();
    let mut lifetimes = vec![Lifetime::default(); graph.operations.len()];
    for (operation, lifetime) in graph.operations.iter().zip(&mut lifetimes).rev() {
        let ids = operands(graph, operation);
        for id in &ids {
            if seen.insert(*id) {
                lifetime.freed.push(*id);
                if ids.iter().filter(|other| *other == id).count() == 1 {
                    lifetime.moved.insert(*id);
                }
            }
        }
        // What is made and never read, one of two results say, goes at once.
        for output in operation.outputs() {
            if seen.insert(output.id) {
                lifetime.freed.push(output.id);
            }
        }
    }
    lifetimes
}
