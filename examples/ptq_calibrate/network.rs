//! A network with its quantizers, its loss, its statistics.

use std::error::Error;

use burn::tensor::{Device, Tensor};
use burn_lean::quant::{QuantError, QuantizedForward};

use crate::support::{self, Batch, Images, Network};

/// Logits with the quantizers that the model carries, if any.
pub(crate) fn quantized<M: Network>(model: &M, images: Tensor<4>) -> Result<Tensor<2>, QuantError> {
    QuantizedForward::new().run(model, images, M::logits)
}

/// Mean cross-entropy, on the model's device.
pub(crate) fn loss<M: Network>(model: &M, batch: &Batch) -> Tensor<1> {
    let device = model.devices().remove(0);
    let logits = model.logits(batch.images.clone().to_device(&device));
    support::cross_entropy(logits, batch.labels.clone().to_device(&device))
}

/// The model with BatchNorm statistics averaged over the images, moved and mirrored at random, as those
/// that networks for CIFAR-10 are trained with.
pub(crate) fn normalized<M: Network>(
    model: M,
    images: &Images,
    device: &Device,
) -> Result<M, Box<dyn Error>> {
    let moved = images.take(5000).augmented();
    Ok(support::recalibrated(model, M::logits, &moved, device)?)
}
