//! Networks that can be loaded, trained and measured.

use std::error::Error;
use std::path::Path;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::{ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{self, PruneError, recompute_batch_norm};

use crate::LOOK;
use crate::options::Cli;
use crate::support::{self, Batch, ImageSet, MlpNet, ResNet20};

/// A classifier of images.
pub(crate) trait Network: Module + 'static {
    const HAS_BATCH_NORM: bool;

    /// Images `[batch, channels, side, side]` to logits `[batch, 10]`.
    fn logits(&self, images: Tensor<4>) -> Tensor<2>;
}

impl Network for MlpNet {
    const HAS_BATCH_NORM: bool = false;

    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward(images)
    }
}

impl Network for ResNet20 {
    const HAS_BATCH_NORM: bool = true;

    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward(images)
    }
}

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
    let cross_entropy = CrossEntropyLossConfig::new().init(&logits.device());
    cross_entropy.forward(logits, batch.labels.clone())
}

/// Test accuracy [%].
pub(crate) fn accuracy<M: Network>(model: &M, images: &ImageSet, device: &Device) -> f64 {
    let model = model.valid();
    support::accuracy(&images.test, device, |images| model.logits(images))
}

/// Batches that are enough for BatchNorm statistics.
const BATCH_NORM_BATCHES: usize = 10;

/// The model with BatchNorm statistics averaged over training images, augmented if they are.
pub(crate) fn normalized<M: Network>(
    model: M,
    images: &ImageSet,
    device: &Device,
) -> Result<M, PruneError> {
    let batches = images
        .train
        .shuffled(0, LOOK, device)
        .take(BATCH_NORM_BATCHES);
    Ok(recompute_batch_norm(
        model,
        |model, batch: &Batch| model.logits(batch.images.clone()),
        batches,
    )?)
}

/// Loads a checkpoint with PyTorch's names and layouts.
pub(crate) fn load<M: Network>(mut model: M, path: &Path) -> Result<M, Box<dyn Error>> {
    let mut store = SafetensorsStore::from_file(path)
        .with_from_adapter(PyTorchToBurnAdapter)
        .with_key_remapping(r"downsample\.0\.", "downsample.conv.")
        .with_key_remapping(r"downsample\.1\.", "downsample.norm.");
    model
        .load_from(&mut store)
        .map_err(|error| format!("cannot load {}: {error}", path.display()))?;
    Ok(model)
}

/// Trains with AdamW.
pub(crate) fn train<M: Network>(
    model: M,
    images: &ImageSet,
    cli: &Cli,
    device: &Device,
) -> Result<M, Box<dyn Error>> {
    epochs(model, images, cli, cli.epochs, device, "training")
}

/// Trains on, from the full learning rate down again.
pub(crate) fn fine_tune<M: Network>(
    model: M,
    images: &ImageSet,
    cli: &Cli,
    count: usize,
    device: &Device,
) -> Result<M, Box<dyn Error>> {
    epochs(model, images, cli, count, device, "fine-tuning")
}

fn epochs<M: Network>(
    mut model: M,
    images: &ImageSet,
    cli: &Cli,
    count: usize,
    device: &Device,
    what: &'static str,
) -> Result<M, Box<dyn Error>> {
    const BATCH: usize = 32;
    let mut optim = AdamWConfig::new().init();
    let device = device.clone().autodiff();
    let steps = count * images.train.len().div_ceil(BATCH);
    let bar = support::progress(steps, what);
    let mut step = 0;
    for epoch in 0..count as u64 {
        for batch in images
            .train
            .shuffled(cli.seed.wrapping_add(epoch), BATCH, &device)
        {
            let grads = loss(&model, &batch).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            // Half a cosine down to zero.
            let progress = step as f64 / steps as f64;
            let rate = 0.5 * cli.learning_rate * (1.0 + (std::f64::consts::PI * progress).cos());
            model = optim.step(rate, model, grads);
            step += 1;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(model)
}
