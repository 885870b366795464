//! Inputs as a walk takes them.

use burn::tensor::{Bool, Device, Int, Tensor};
use burn_lean_graph::TensorMapper;

/// Tensors without autodiff, on a device.
pub(crate) struct Plain<'a>(pub(crate) Option<&'a Device>);

impl TensorMapper for Plain<'_> {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        let tensor = tensor.clone().without_autodiff();
        match self.0 {
            Some(device) if tensor.device() != *device => tensor.to_device(device),
            _ => tensor,
        }
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        let tensor = tensor.clone().without_autodiff();
        match self.0 {
            Some(device) if tensor.device() != *device => tensor.to_device(device),
            _ => tensor,
        }
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        let tensor = tensor.clone().without_autodiff();
        match self.0 {
            Some(device) if tensor.device() != *device => tensor.to_device(device),
            _ => tensor,
        }
    }
}
