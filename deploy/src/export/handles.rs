//! The tensors of inputs, where they are.

use burn::backend::DispatchTensor;
use burn_lean_graph::{TensorMapper, Tensors};

/// The tensors of a value where they are.
pub(crate) fn handles<I: Tensors>(inputs: &I) -> Vec<DispatchTensor> {
    let mut handles = Handles(Vec::new());
    let _ = inputs.map_tensors(&mut handles);
    handles.0
}

struct Handles(Vec<DispatchTensor>);

impl TensorMapper for Handles {
    burn_lean_graph::every_kind!(|self, tensor| {
        let here = tensor.clone().without_autodiff();
        self.0.push(here.into_dispatch());
        tensor.clone()
    });
}
