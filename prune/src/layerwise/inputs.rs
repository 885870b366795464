//! Inputs as a walk takes them.

use burn::tensor::Device;
use burn_lean_graph::{TensorMapper, as_constants};

/// Tensors without autodiff, on a device.
pub(crate) struct Plain<'a>(pub(crate) Option<&'a Device>);

impl TensorMapper for Plain<'_> {
    burn_lean_graph::every_kind!(|self, tensor| {
        match self.0 {
            Some(device) => as_constants(tensor, device),
            None => tensor.clone().without_autodiff(),
        }
    });
}
