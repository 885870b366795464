//! Inputs and outputs on the device where they are needed, and waiting until they are there.

use burn::tensor::{Device, Tensor};
use burn_lean_graph::{TensorMapper, Tensors};

/// The value as constants on a device; on an autodiff device, as a loader there makes them.
pub(crate) fn on_device<V: Tensors>(value: &V, device: &Device) -> V {
    value.map_tensors(&mut OnDevice {
        inner: device.clone().without_autodiff(),
        device,
    })
}

struct OnDevice<'a> {
    inner: Device,
    device: &'a Device,
}

impl TensorMapper for OnDevice<'_> {
    burn_lean_graph::every_kind!(|self, tensor| {
        let moved = Tensor::to_device(tensor.clone().without_autodiff(), &self.inner);
        match self.device.gradient_checkpointing_strategy() {
            Some(strategy) => moved
                .autodiff()
                .with_gradient_checkpointing_strategy(strategy),
            None => moved,
        }
    });
}

/// Waits for the device: the numbers are there when they are read.
pub(crate) struct Finish;

impl TensorMapper for Finish {
    burn_lean_graph::every_kind!(|self, tensor| {
        let _ = tensor.to_data();
        tensor.clone()
    });
}
