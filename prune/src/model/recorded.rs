//! A loss as a list of operations.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_lean_graph::{GraphError, Recording, record};

use crate::Batch;

/// Records the loss of `model`, which is in evaluation mode, on `batch`; nothing is computed. What
/// the batch holds becomes part of the recording.
pub(crate) fn record_loss<M: Module, B: Batch>(
    model: &M,
    loss: &dyn Fn(&M, &B) -> Tensor<1>,
    batch: &B,
) -> Result<Recording<Tensor<1>>, GraphError> {
    record(model, &(), |model: &M, ()| {
        let device = model.devices().into_iter().next();
        let device = device.expect("a model without a device is not recorded");
        loss(model, &batch.clone().to_device(&device))
    })
}
