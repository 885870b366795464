//! Inputs and outputs on the device where they are needed, and waiting until they are there.

use burn::tensor::Device;
use burn_lean_graph::{TensorMapper, Tensors, as_constants};

/// The value as constants on a device; on an autodiff device, as a loader there makes them.
pub(crate) fn on_device<V: Tensors>(value: &V, device: &Device) -> V {
    value.map_tensors(&mut OnDevice(device))
}

struct OnDevice<'a>(&'a Device);

impl TensorMapper for OnDevice<'_> {
    burn_lean_graph::every_kind!(|self, tensor| {
        let moved = as_constants(tensor, self.0);
        match self.0.gradient_checkpointing_strategy() {
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
