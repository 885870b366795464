//! What depends on the size of the batch: found by recording the forward pass with other sizes.

use std::collections::HashMap;

use burn::backend::ir::{
    BaseOperationIr, IrVisitorMut, ModuleOperationIr, OperationIr, TensorId, TensorIr, TensorStatus,
};
use burn::module::Module;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Shape, Slice, Tensor, TensorData};
use burn_lean_graph::{Graph, Recording, TensorMapper, Tensors, record, signature};

use crate::Dimension;

/// The shapes of all tensors, as they depend on the size of the batch.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    size: usize,
    dimensions: HashMap<TensorId, Vec<Dimension>>,
}

impl Batch {
    /// Records `forward` again, with batches of other sizes, and compares the operations.
    ///
    /// A batch of one may be refused. The error says why the batch stays fixed.
    pub(crate) fn find<M: Module, I: Tensors, O: Tensors>(
        model: &M,
        inputs: &I,
        forward: &impl Fn(&M, I) -> O,
        graph: &Graph,
    ) -> Result<Self, String> {
        let shapes = signature(inputs);
        let size = shapes.first().and_then(|(shape, _)| shape.first().copied());
        let size = size.ok_or("there is no input with an axis")?;
        if shapes.iter().any(|(shape, _)| shape.first() != Some(&size)) {
            return Err("the first axes of the inputs differ".into());
        }
        if size == 0 {
            return Err("the recorded batch is empty".into());
        }
        let mut found = Self {
            size,
            dimensions: HashMap::new(),
        };
        // A size that is halved, or cut off at some number, may be the same for neighbours.
        let resized = |size| {
            let resized = inputs.map_tensors(&mut Resize { size });
            record(model, &resized, forward).map(Recording::fold_rows)
        };
        for size in [size + 1, 2 * size + 3] {
            let other = resized(size)
                .map_err(|error| format!("the forward pass refuses another batch: {error}"))?;
            found.agree(graph, other.graph(), size)?;
        }
        // What refuses a single example has no result that a file could miss.
        if size > 1
            && let Ok(single) = resized(1)
        {
            let agreed = found.agree(graph, single.graph(), 1);
            agreed.map_err(|why| format!("a batch of one is another computation: {why}"))?;
        }
        Ok(found)
    }

    /// Compares the recording with that of a batch of another size.
    fn agree(&mut self, graph: &Graph, other: &Graph, size: usize) -> Result<(), String> {
        let differs = || "the forward pass does something else for another batch".to_string();
        if graph.nodes().len() != other.nodes().len() {
            return Err(differs());
        }
        let mut twins = Twins::given(graph, other).ok_or_else(differs)?;
        for (node, same) in graph.nodes().zip(other.nodes()) {
            let (a, b) = (node.operation(), same.operation());
            let at = || {
                format!(
                    "`{}` of `{}` computes with its size",
                    node.name(),
                    node.module()
                )
            };
            if without_shapes(a) != without_shapes(b) {
                return Err(at());
            }
            let tensors = a.inputs().chain(a.outputs());
            for (tensor, twin) in tensors.zip(b.inputs().chain(b.outputs())) {
                if !twins.pair(tensor.id, twin.id) {
                    return Err(differs());
                }
                let dimensions = self.compare(&tensor.shape, &twin.shape, size);
                let dimensions = dimensions.ok_or_else(at)?;
                let before = self.dimensions.insert(tensor.id, dimensions.clone());
                if before.is_some_and(|before| before != dimensions) {
                    return Err(at());
                }
            }
            if self.is_held(a) {
                return Err(at());
            }
        }
        let mut results = graph.outputs().iter().zip(other.outputs());
        if graph.outputs().len() != other.outputs().len()
            || !results.all(|(a, b)| twins.pair(*a, *b))
        {
            return Err(differs());
        }
        let constants: HashMap<TensorId, &TensorData> = other.constants().collect();
        for (id, data) in graph.constants() {
            let twin = twins.of.get(&id).and_then(|twin| constants.get(twin));
            if !twin.is_some_and(|twin| is_same(data, twin)) {
                return Err(format!(
                    "a constant of shape {:?} that the forward pass makes on the host depends on it",
                    data.shape()
                ));
            }
        }
        Ok(())
    }

    fn compare(&self, shape: &Shape, other: &Shape, batch: usize) -> Option<Vec<Dimension>> {
        let sizes = shape.iter().zip(other.iter());
        sizes
            .map(|(size, other)| match size == other {
                true => Some(Dimension::Fixed(*size)),
                false => {
                    let times = size / self.size;
                    let is_multiple = times * self.size == *size && times * batch == *other;
                    is_multiple.then_some(Dimension::Batch(times))
                }
            })
            .collect()
    }

    /// Whether the file would hold a size of the batch as a number: that of a causal mask, or of windows.
    fn is_held(&self, operation: &OperationIr) -> bool {
        use ModuleOperationIr::*;
        let OperationIr::Module(module) = operation else {
            return false;
        };
        let depends = |tensor: &TensorIr, axis: usize| {
            matches!(self.dimensions(tensor).get(axis), Some(Dimension::Batch(_)))
        };
        let pooled = |x: &TensorIr, size: &[usize]| {
            let windows = size.iter().any(|size| *size != 1);
            windows && (2..x.shape.num_dims()).any(|axis| depends(x, axis))
        };
        match module {
            Attention(o) => {
                let axis = o.query.shape.num_dims() - 2;
                o.options.is_causal && (depends(&o.query, axis) || depends(&o.key, axis))
            }
            AdaptiveAvgPool1d(o) => pooled(&o.x, &[o.output_size]),
            AdaptiveAvgPool2d(o) => pooled(&o.x, &o.output_size),
            AdaptiveAvgPool3d(o) => pooled(&o.x, &o.output_size),
            _ => false,
        }
    }

    /// Whether the shape of a tensor depends on the batch.
    pub(crate) fn depends(&self, id: TensorId) -> bool {
        let dimensions = self.dimensions.get(&id);
        dimensions.is_some_and(|sizes| sizes.iter().any(|size| matches!(size, Dimension::Batch(_))))
    }

    pub(crate) fn dimensions(&self, tensor: &TensorIr) -> Vec<Dimension> {
        let fixed = || {
            tensor
                .shape
                .iter()
                .map(|size| Dimension::Fixed(*size))
                .collect()
        };
        self.dimensions
            .get(&tensor.id)
            .cloned()
            .unwrap_or_else(fixed)
    }

    /// The shape of an input.
    pub(crate) fn input(&self, shape: &[usize]) -> Vec<Dimension> {
        let mut sizes: Vec<_> = shape.iter().map(|size| Dimension::Fixed(*size)).collect();
        if let Some(first) = sizes.first_mut() {
            *first = Dimension::Batch(1);
        }
        sizes
    }
}

/// Which tensor of one recording is which of another.
#[derive(Default)]
struct Twins {
    of: HashMap<TensorId, TensorId>,
    back: HashMap<TensorId, TensorId>,
}

impl Twins {
    /// The inputs and parameters of two recordings; `None` where they read other ones.
    fn given(graph: &Graph, other: &Graph) -> Option<Self> {
        let mut twins = Self::default();
        let inputs = graph.inputs().iter().zip(other.inputs());
        let mut are = inputs.fold(true, |are, (a, b)| twins.pair(*a, *b) && are);
        are &= graph.inputs().len() == other.inputs().len();
        are &= graph.parameters().len() == other.parameters().len();
        for (a, b) in graph.parameters().iter().zip(other.parameters()) {
            are &= a.path == b.path && twins.pair(a.tensor, b.tensor);
        }
        are.then_some(twins)
    }

    /// Whether these can be the same tensor, which they are from now on.
    fn pair(&mut self, a: TensorId, b: TensorId) -> bool {
        *self.of.entry(a).or_insert(b) == b && *self.back.entry(b).or_insert(a) == a
    }
}

fn is_same(data: &TensorData, other: &TensorData) -> bool {
    data.shape() == other.shape()
        && data.dtype() == other.dtype()
        && data.as_bytes() == other.as_bytes()
}

/// What an operation does, whatever the names and sizes of its tensors.
fn without_shapes(operation: &OperationIr) -> OperationIr {
    struct Anonymous;
    impl IrVisitorMut for Anonymous {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            tensor.id = TensorId::new(0);
            tensor.shape = Shape::from(vec![1; tensor.shape.num_dims()]);
            tensor.status = TensorStatus::ReadOnly;
        }
    }
    let mut operation = operation.clone();
    if let OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) =
        &mut operation
        && let Some((ranges, tensor)) = match base {
            BaseOperationIr::Slice(o) => Some((&mut o.ranges, &o.tensor)),
            BaseOperationIr::SliceAssign(o) => Some((&mut o.ranges, &o.tensor)),
            _ => None,
        }
    {
        for (range, size) in ranges.iter_mut().zip(tensor.shape.iter()) {
            if is_whole(range, *size) {
                *range = Slice::new(0, None, 1);
            }
        }
    }
    operation.visit_mut(&mut Anonymous);
    operation
}

/// Whether a range takes all of an axis.
pub(crate) fn is_whole(range: &Slice, size: usize) -> bool {
    range.step == 1 && range.to_range(size) == (0..size)
}

/// Inputs of another size along their first axis, without values of interest.
struct Resize {
    size: usize,
}

impl Resize {
    /// One number in this shape: the recorder looks at shape and dtype alone.
    fn of_one<const D: usize, K: Basic>(
        &self,
        mut shape: [usize; D],
        zeros: impl Fn([usize; D]) -> Tensor<D, K>,
    ) -> Tensor<D, K> {
        if let Some(first) = shape.first_mut() {
            *first = self.size;
        }
        match shape.contains(&0) {
            // Burn does not expand to nothing.
            true => zeros(shape),
            false => zeros([1; D]).expand(shape),
        }
    }
}

impl TensorMapper for Resize {
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

/// The inputs on devices without autodiff, so that evaluation is recorded.
pub(crate) fn without_autodiff<I: Tensors>(inputs: &I) -> I {
    struct Inner;
    impl TensorMapper for Inner {
        burn_lean_graph::every_kind!(|self, tensor| tensor.clone().without_autodiff());
    }
    inputs.map_tensors(&mut Inner)
}
