//! An input as an evaluation gets it.

use burn::tensor::Tensor;
use burn_lean_graph::{TensorMapper, Tensors};

/// The value with its tensors off the autodiff device, so that what is recorded with a model that is
/// [`valid`](burn::module::Module::valid) is an evaluation.
pub(crate) fn evaluated<I: Tensors>(input: &I) -> I {
    input.map_tensors(&mut Plain)
}

struct Plain;

impl TensorMapper for Plain {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        tensor.clone().without_autodiff()
    }
}
