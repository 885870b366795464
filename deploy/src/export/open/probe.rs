//! The forward pass recorded with other sizes, and compared with the one that is exported.

use std::collections::HashMap;

use burn::backend::ir::{
    BaseOperationIr, IrVisitorMut, ModuleOperationIr, NumericOperationIr, OperationIr, ScalarIr,
    ScalarOpIr, TensorId, TensorIr, TensorStatus,
};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Shape, Slice, Tensor, TensorData};
use burn_lean_graph::{Graph, LoopPart, Node, TensorMapper, Tensors};

use crate::export::lower::module_of;

/// What a recording has for the tensors and operations of the exported one.
#[derive(Debug, Default)]
pub(super) struct Sample {
    pub(super) shapes: HashMap<TensorId, Vec<usize>>,
    /// The sizes that operations have as numbers, by their positions.
    pub(super) numbers: HashMap<usize, Vec<usize>>,
    /// The whole numbers that operations have, by their positions.
    pub(super) scalars: HashMap<usize, i64>,
    /// Lists of whole numbers that the forward pass makes on the host, where they are other ones.
    pub(super) counted: HashMap<TensorId, Vec<i64>>,
}

impl Sample {
    /// The exported recording itself.
    pub(super) fn of(graph: &Graph, inputs: &[Vec<usize>]) -> Self {
        let mut found = Self::default();
        found.note_inputs(graph, inputs);
        // A result may be one of these, which no operation reads.
        let constants = graph.constants();
        let constants = constants.map(|(id, data)| (id, data.shape().to_vec()));
        let parameters = graph.parameters().iter();
        let parameters = parameters.map(|one| (one.tensor, one.shape.clone()));
        found.shapes.extend(constants.chain(parameters));
        for node in graph.nodes() {
            let operation = node.operation();
            found.note_numbers(node, operation);
            for tensor in operation.inputs().chain(operation.outputs()) {
                found.shapes.insert(tensor.id, tensor.shape.to_vec());
            }
        }
        found
    }

    /// A recording with inputs of other shapes: from the results back, each tensor has to come of the
    /// same operation. Several tensors may be one in it: equal views of a constant are shared.
    ///
    /// The error says what it does otherwise.
    pub(super) fn compare(
        graph: &Graph,
        other: &Graph,
        inputs: &[Vec<usize>],
    ) -> Result<Self, String> {
        let mut found = Self::default();
        found.note_inputs(graph, inputs);
        let mut twins = given(graph, other).ok_or("it reads other parameters")?;
        let (makers, others) = (makers(graph), makers(other));
        if graph.outputs().len() != other.outputs().len() {
            return Err("it has other results".into());
        }
        let results = graph.outputs().iter().zip(other.outputs());
        let mut pairs: Vec<(TensorId, TensorId)> = results.map(|(a, b)| (*a, *b)).collect();
        while let Some((id, twin)) = pairs.pop() {
            if let Some(known) = twins.get(&id) {
                match *known == twin {
                    true => continue,
                    false => return Err("operations read other tensors".into()),
                }
            }
            let (node, same) = match (makers.get(&id), others.get(&twin)) {
                (Some(node), Some(same)) => (*node, same.operation()),
                (None, None) => {
                    twins.insert(id, twin);
                    continue;
                }
                _ => return Err("operations read other tensors".into()),
            };
            let operation = node.operation();
            if without_sizes(operation) != without_sizes(same) {
                let (name, module) = (node.name(), module_of(graph, node));
                return Err(format!("`{name}` of {module} computes with its size"));
            }
            found.note_numbers(node, same);
            for (tensor, twin) in operation.outputs().zip(same.outputs()) {
                twins.insert(tensor.id, twin.id);
                found.shapes.insert(tensor.id, twin.shape.to_vec());
            }
            // Another result of the same operation.
            if twins.get(&id) != Some(&twin) {
                return Err("operations read other tensors".into());
            }
            for (tensor, twin) in operation.inputs().zip(same.inputs()) {
                found.shapes.insert(tensor.id, twin.shape.to_vec());
                pairs.push((tensor.id, twin.id));
            }
        }
        let constants: HashMap<TensorId, &TensorData> = other.constants().collect();
        for (id, data) in graph.constants() {
            let twin = twins.get(&id).and_then(|twin| constants.get(twin));
            let shape = twin.map(|twin| (id, twin.shape().to_vec()));
            found.shapes.extend(shape);
            if twin.is_some_and(|twin| is_same(data, twin)) {
                continue;
            }
            let numbers = whole_numbers(data).and(twin.and_then(|twin| whole_numbers(twin)));
            let numbers = numbers.ok_or_else(|| made_on_the_host(graph, id, data))?;
            found.counted.insert(id, numbers);
        }
        Ok(found)
    }

    /// Whether no size has run below 0: Burn counts windows without a look at it, and does not panic in
    /// every build.
    pub(super) fn is_possible(&self) -> bool {
        let mut sizes = self.shapes.values().flatten();
        sizes.all(|size| u32::try_from(*size).is_ok())
    }

    fn note_inputs(&mut self, graph: &Graph, inputs: &[Vec<usize>]) {
        let ids = graph.inputs().iter().copied();
        self.shapes.extend(ids.zip(inputs.iter().cloned()));
    }

    fn note_numbers(&mut self, node: Node<'_>, operation: &OperationIr) {
        if let Some(number) = scalar_of(&mut operation.clone()).and_then(|o| whole(&o.rhs)) {
            self.scalars.insert(node.index(), number);
        }
        if let Some(LoopPart::Take { start, .. }) = LoopPart::of(operation) {
            self.numbers.insert(node.index(), vec![start]);
        }
        let (OperationIr::BaseFloat(base)
        | OperationIr::BaseInt(base)
        | OperationIr::BaseBool(base)) = operation
        else {
            return;
        };
        let numbers = match base {
            BaseOperationIr::Slice(o) => bounds(&o.ranges, &o.tensor),
            BaseOperationIr::SliceAssign(o) => bounds(&o.ranges, &o.tensor),
            BaseOperationIr::RepeatDim(o) => vec![o.times],
            _ => return,
        };
        self.numbers.insert(node.index(), numbers);
    }
}

/// Where each range starts and ends.
fn bounds(ranges: &[Slice], tensor: &TensorIr) -> Vec<usize> {
    let taken = ranges.iter().zip(tensor.shape.iter());
    let taken = taken.map(|(range, size)| range.to_range(*size));
    taken.flat_map(|range| [range.start, range.end]).collect()
}

/// The inputs and parameters of another recording; `None` where it reads other ones.
fn given(graph: &Graph, other: &Graph) -> Option<HashMap<TensorId, TensorId>> {
    let (ours, theirs) = (graph.parameters(), other.parameters());
    let same = graph.inputs().len() == other.inputs().len()
        && ours.len() == theirs.len()
        && ours.iter().zip(theirs).all(|(a, b)| a.path == b.path);
    let inputs = graph.inputs().iter().copied();
    let inputs = inputs.zip(other.inputs().iter().copied());
    let parameters = ours.iter().zip(theirs).map(|(a, b)| (a.tensor, b.tensor));
    same.then(|| inputs.chain(parameters).collect())
}

/// Which operation makes which tensor.
fn makers(graph: &Graph) -> HashMap<TensorId, Node<'_>> {
    let makes = |node: Node<'_>| -> Vec<TensorId> {
        let outputs = node.operation().outputs();
        outputs.map(|tensor| tensor.id).collect()
    };
    let nodes = graph.nodes();
    let made = nodes.flat_map(|node| makes(node).into_iter().map(move |id| (id, node)));
    made.collect()
}

/// What is said of a recording that does something else, with how many operations it has.
pub(super) fn with_counts(why: String, graph: &Graph, other: &Graph) -> String {
    let (ours, theirs) = (graph.nodes().len(), other.nodes().len());
    match ours == theirs {
        true => why,
        false => format!(
            "{why}; there are {theirs} operations instead of {ours}, as a loop over it makes them. Loops \
             stay open whose steps do the same, read of what is before the last step alone, and were \
             recorded three times or more"
        ),
    }
}

/// What is said of a constant that another size changes.
pub(super) fn made_on_the_host(graph: &Graph, id: TensorId, data: &TensorData) -> String {
    let reads = |node: &Node<'_>| node.operation().inputs().any(|input| input.id == id);
    let read = graph.nodes().find(reads).map(|node| {
        let (name, module) = (node.name(), module_of(graph, node));
        format!(", read by `{name}` of {module}")
    });
    format!(
        "a constant of shape {:?} that the forward pass makes on the host depends on it{}",
        data.shape(),
        read.unwrap_or_default()
    )
}

fn is_same(data: &TensorData, other: &TensorData) -> bool {
    data.shape() == other.shape()
        && data.dtype() == other.dtype()
        && data.as_bytes() == other.as_bytes()
}

/// The numbers of a list of integers.
pub(super) fn whole_numbers(data: &TensorData) -> Option<Vec<i64>> {
    let is_whole = data.dtype().is_int() || data.dtype().is_uint();
    (is_whole && data.shape().num_dims() == 1).then(|| data.iter::<i64>().collect())
}

/// The operation, if it has a number that may be a size.
fn scalar_of(operation: &mut OperationIr) -> Option<&mut ScalarOpIr> {
    use NumericOperationIr::*;
    match operation {
        OperationIr::NumericFloat(_, numeric) | OperationIr::NumericInt(_, numeric) => {
            match numeric {
                AddScalar(o) | SubScalar(o) | MulScalar(o) | DivScalar(o) | RemScalar(o)
                | GreaterElem(o) | GreaterEqualElem(o) | LowerElem(o) | LowerEqualElem(o) => {
                    Some(o)
                }
                _ => None,
            }
        }
        OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) => match base {
            BaseOperationIr::EqualElem(o) | BaseOperationIr::NotEqualElem(o) => Some(o),
            _ => None,
        },
        _ => None,
    }
}

/// A whole number that a float of 64 bits holds, too.
fn whole(scalar: &ScalarIr) -> Option<i64> {
    const LARGEST: i64 = 1 << f64::MANTISSA_DIGITS;
    let number = match *scalar {
        ScalarIr::Int(number) => number,
        ScalarIr::UInt(number) => i64::try_from(number).ok()?,
        // Beyond what is looked at next a cast is as good as any.
        ScalarIr::Float(number) => (number.fract() == 0.0).then_some(number as i64)?,
        ScalarIr::Bool(_) => return None,
    };
    (-LARGEST..=LARGEST).contains(&number).then_some(number)
}

/// What an operation does, whatever the names and sizes of its tensors.
fn without_sizes(operation: &OperationIr) -> OperationIr {
    struct Anonymous;
    impl IrVisitorMut for Anonymous {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            tensor.id = TensorId::new(0);
            tensor.shape = Shape::from(vec![1; tensor.shape.num_dims()]);
            tensor.status = TensorStatus::ReadOnly;
        }

        fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
            // Not a number is not what it is itself.
            if matches!(scalar, ScalarIr::Float(number) if number.is_nan()) {
                *scalar = ScalarIr::Bool(true);
            }
        }

        fn visit_range_mut(&mut self, range: &mut Slice) {
            *range = Slice::new(0, None, range.step);
        }
    }
    let mut operation = operation.clone();
    match &mut operation {
        OperationIr::BaseFloat(BaseOperationIr::RepeatDim(o))
        | OperationIr::BaseInt(BaseOperationIr::RepeatDim(o))
        | OperationIr::BaseBool(BaseOperationIr::RepeatDim(o)) => o.times = 1,
        // It is that of the result.
        OperationIr::Module(ModuleOperationIr::Interpolate(o)) => o.output_size = [1, 1],
        _ => {}
    }
    if let Some(o) = scalar_of(&mut operation)
        && whole(&o.rhs).is_some()
    {
        o.rhs = ScalarIr::Int(0);
    }
    LoopPart::start_at(&mut operation, 0);
    operation.visit_mut(&mut Anonymous);
    operation
}

/// Inputs of other shapes, without values of interest.
pub(super) fn resized<I: Tensors>(inputs: &I, shapes: &[Vec<usize>]) -> I {
    inputs.map_tensors(&mut Resize {
        shapes: shapes.iter(),
    })
}

struct Resize<'a> {
    shapes: std::slice::Iter<'a, Vec<usize>>,
}

impl Resize<'_> {
    /// One number in the next shape: the recorder looks at shape and dtype alone.
    fn of_one<const D: usize, K: Basic>(
        &mut self,
        shape: [usize; D],
        zeros: impl Fn([usize; D]) -> Tensor<D, K>,
    ) -> Tensor<D, K> {
        let next = self.shapes.next();
        let shape = next
            .and_then(|next| next[..].try_into().ok())
            .unwrap_or(shape);
        match shape.contains(&0) {
            // Burn does not expand to nothing.
            true => zeros(shape),
            false => zeros([1; D]).expand(shape),
        }
    }
}

impl TensorMapper for Resize<'_> {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        let on = tensor.clone().without_autodiff();
        let zeros = |shape| Tensor::<D>::zeros(shape, (&on.device(), on.dtype()));
        self.of_one(on.dims(), zeros)
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        let on = tensor.clone().without_autodiff();
        let zeros = |shape| Tensor::<D, Int>::zeros(shape, (&on.device(), on.dtype()));
        self.of_one(on.dims(), zeros)
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        let on = tensor.clone().without_autodiff();
        let zeros = |shape| Tensor::<D, Int>::zeros(shape, (&on.device(), DType::I32)).bool();
        self.of_one(on.dims(), zeros)
    }
}
