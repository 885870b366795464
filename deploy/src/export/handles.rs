//! The tensors of inputs, where they are.

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Int, Tensor};
use burn_lean_graph::{TensorMapper, Tensors};

/// The tensors of a value where they are.
pub(crate) fn handles<I: Tensors>(inputs: &I) -> Vec<DispatchTensor> {
    let mut handles = Handles(Vec::new());
    let _ = inputs.map_tensors(&mut handles);
    handles.0
}

struct Handles(Vec<DispatchTensor>);

impl TensorMapper for Handles {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        self.0
            .push(tensor.clone().without_autodiff().into_dispatch());
        tensor.clone()
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        self.0
            .push(tensor.clone().without_autodiff().into_dispatch());
        tensor.clone()
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.0
            .push(tensor.clone().without_autodiff().into_dispatch());
        tensor.clone()
    }
}
