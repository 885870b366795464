//! What the study does with a network: its loss, its accuracy, its statistics.

use burn::tensor::{Device, Tensor};
use burn_lean::prune::{self, PruneError};

use crate::support::{self, Batch, ImageSet, Network};

impl prune::Batch for Batch {
    fn examples(&self) -> usize {
        self.labels.dims()[0]
    }

    fn slice(&self, examples: std::ops::Range<usize>) -> Self {
        Self {
            images: prune::Batch::slice(&self.images, examples.clone()),
            labels: prune::Batch::slice(&self.labels, examples),
        }
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            images: self.images.to_device(device),
            labels: self.labels.to_device(device),
        }
    }
}

/// Mean cross-entropy.
pub(crate) fn loss<M: Network>(model: &M, batch: &Batch) -> Tensor<1> {
    let logits = model.logits(batch.images.clone());
    support::cross_entropy(logits, batch.labels.clone())
}

/// Test accuracy [%].
pub(crate) fn accuracy<M: Network>(model: &M, images: &ImageSet, device: &Device) -> f64 {
    let model = model.valid();
    support::accuracy(&images.test, device, |images| model.logits(images))
}

/// The model with BatchNorm statistics averaged over training images, augmented if they are.
pub(crate) fn normalized<M: Network>(
    model: M,
    images: &ImageSet,
    device: &Device,
) -> Result<M, PruneError> {
    Ok(support::recalibrated(
        model,
        M::logits,
        &images.train,
        device,
    )?)
}
