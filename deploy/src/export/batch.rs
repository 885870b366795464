//! What depends on the size of the batch: found by recording the forward pass with two of them.

use std::collections::HashMap;

use burn::backend::ir::{
    BaseOperationIr, IrVisitorMut, OperationIr, TensorId, TensorIr, TensorStatus,
};
use burn::module::Module;
use burn::tensor::{Bool, DType, Int, Shape, Slice, Tensor};
use burn_lean_graph::{Graph, TensorMapper, Tensors, record, signature};

use crate::Dimension;

/// The shapes of all tensors for two sizes of the batch.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    size: usize,
    dimensions: HashMap<TensorId, Vec<Dimension>>,
}

impl Batch {
    /// Records `forward` again, with a batch of another size, and compares the operations.
    ///
    /// The error says why the batch stays fixed.
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
        let larger = inputs.map_tensors(&mut Resize { size: size + 1 });
        let other = record(model, &larger, forward)
            .map_err(|error| format!("the forward pass refuses another batch: {error}"))?;
        let other = other.graph();
        if graph.nodes().len() != other.nodes().len() {
            return Err("the forward pass does something else for another batch".into());
        }
        let mut found = Self {
            size,
            dimensions: HashMap::new(),
        };
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
                let dimensions = found.compare(&tensor.shape, &twin.shape);
                found
                    .dimensions
                    .insert(tensor.id, dimensions.ok_or_else(at)?);
            }
        }
        for (id, data) in graph.constants() {
            if found.depends(id) {
                return Err(format!(
                    "a constant of shape {:?} that the forward pass makes on the host depends on it",
                    data.shape()
                ));
            }
        }
        Ok(found)
    }

    fn compare(&self, shape: &Shape, other: &Shape) -> Option<Vec<Dimension>> {
        let sizes = shape.iter().zip(other.iter());
        sizes
            .map(|(size, other)| match size == other {
                true => Some(Dimension::Fixed(*size)),
                false => {
                    let times = size / self.size;
                    let is_multiple =
                        times * self.size == *size && times * (self.size + 1) == *other;
                    is_multiple.then_some(Dimension::Batch(times))
                }
            })
            .collect()
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
        && let BaseOperationIr::Slice(slice) = base
    {
        for (range, size) in slice.ranges.iter_mut().zip(slice.tensor.shape.iter()) {
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
    fn shape<const D: usize>(&self, mut dims: [usize; D]) -> [usize; D] {
        if let Some(first) = dims.first_mut() {
            *first = self.size;
        }
        dims
    }
}

impl TensorMapper for Resize {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        let on = tensor.clone().without_autodiff();
        Tensor::zeros(self.shape(on.dims()), (&on.device(), on.dtype()))
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        let on = tensor.clone().without_autodiff();
        Tensor::zeros(self.shape(on.dims()), (&on.device(), on.dtype()))
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        let on = tensor.clone().without_autodiff();
        Tensor::<D, Int>::zeros(self.shape(on.dims()), (&on.device(), DType::I32)).bool()
    }
}

/// The inputs on devices without autodiff, so that evaluation is recorded.
pub(crate) fn without_autodiff<I: Tensors>(inputs: &I) -> I {
    struct Inner;
    impl TensorMapper for Inner {
        fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
            tensor.clone().without_autodiff()
        }
        fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
            tensor.clone().without_autodiff()
        }
        fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
            tensor.clone().without_autodiff()
        }
    }
    inputs.map_tensors(&mut Inner)
}
