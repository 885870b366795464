//! Inputs as a walk takes them.

use burn::tensor::Device;
use burn_lean_graph::TensorMapper;

/// Tensors without autodiff, on a device.
pub(crate) struct Plain<'a>(pub(crate) Option<&'a Device>);

impl TensorMapper for Plain<'_> {
    burn_lean_graph::every_kind!(|self, tensor| {
        let tensor = tensor.clone().without_autodiff();
        match self.0 {
            Some(device) if tensor.device() != *device => tensor.to_device(device),
            _ => tensor,
        }
    });
}
