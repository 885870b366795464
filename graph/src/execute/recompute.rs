//! Cheap operations that are computed again in the backward pass, not kept.

use burn::backend::{DispatchDevice, DispatchTensor};
use burn::tensor::{Device, Tensor};

/// Has Burn's autodiff recompute single operations, whatever the device's own strategy is.
///
/// A tensor carries the strategy by which operations on it are prepared; nothing else of it depends
/// on that. So operands are marked before an operation, and its results unmarked.
#[derive(Debug)]
pub(crate) struct Recompute {
    /// What tensors of the execution carry, and what marks them; both of one type that Burn does
    /// not name for others. `None` without autodiff.
    marks: Option<[DispatchTensor; 2]>,
}

impl Recompute {
    pub(crate) fn on(device: &DispatchDevice) -> Self {
        let marks = matches!(device, DispatchDevice::Autodiff(_)).then(|| {
            let device = Device::new(device.clone());
            let on = |device: &Device| Tensor::<1>::empty([1], device).into_dispatch();
            [
                on(&device),
                on(&device.clone().inner().autodiff().gradient_checkpointing()),
            ]
        });
        Self { marks }
    }

    /// An operand of an operation that is to be recomputed.
    pub(crate) fn mark(&self, operand: &mut DispatchTensor) {
        if let Some([plain, marked]) = &self.marks
            && operand.autodiff == plain.autodiff
        {
            operand.autodiff = marked.autodiff;
        }
    }

    /// A result of it.
    pub(crate) fn unmark(&self, result: &mut DispatchTensor) {
        if let Some([plain, marked]) = &self.marks
            && result.autodiff == marked.autodiff
        {
            result.autodiff = plain.autodiff;
        }
    }
}
