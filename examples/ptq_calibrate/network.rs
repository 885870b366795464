//! Networks that can be loaded and trained.

use std::error::Error;
use std::path::Path;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::{ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::prune::recompute_batch_norm;
use burn_lean::quant::{QuantError, QuantizedForward};

use crate::support::{self, Batch, Images, MlpNet, ResNet20};

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

/// Logits with the quantizers that the model carries, if any.
pub(crate) fn quantized<M: Network>(model: &M, images: Tensor<4>) -> Result<Tensor<2>, QuantError> {
    QuantizedForward::new().run(model, images, M::logits)
}

/// Mean cross-entropy, on the model's device.
pub(crate) fn loss<M: Network>(model: &M, batch: &Batch) -> Tensor<1> {
    let device = model.devices().remove(0);
    let logits = model.logits(batch.images.clone().to_device(&device));
    cross_entropy(logits, batch.labels.clone().to_device(&device))
}

pub(crate) fn cross_entropy(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits, labels)
}

/// Loads a checkpoint with PyTorch's names and layouts.
pub(crate) fn load<M: Module>(mut model: M, path: &Path) -> Result<M, Box<dyn Error>> {
    let mut store = SafetensorsStore::from_file(path)
        .with_from_adapter(PyTorchToBurnAdapter)
        .with_key_remapping(r"downsample\.0\.", "downsample.conv.")
        .with_key_remapping(r"downsample\.1\.", "downsample.norm.");
    model
        .load_from(&mut store)
        .map_err(|error| format!("cannot load {}: {error}", path.display()))?;
    Ok(model)
}

/// The model with BatchNorm statistics averaged over the images.
pub(crate) fn normalized<M: Network>(
    model: M,
    images: &Images,
    device: &Device,
) -> Result<M, Box<dyn Error>> {
    Ok(recompute_batch_norm(
        model,
        |model, images: &Tensor<4>| model.logits(images.clone()),
        images.ordered(500, device).map(|batch| batch.images),
    )?)
}

/// Trains with AdamW; its rate falls to zero along a cosine.
pub(crate) fn train<M: Network>(
    mut model: M,
    images: &Images,
    epochs: usize,
    seed: u64,
) -> Result<M, Box<dyn Error>> {
    const BATCH_SIZE: usize = 32;
    let device = model.devices().remove(0);
    let mut optim = AdamWConfig::new().init();
    let steps = epochs * images.len().div_ceil(BATCH_SIZE);
    let bar = support::progress(steps, "training");
    let mut step = 0;
    for epoch in 0..epochs as u64 {
        for batch in images.shuffled(seed.wrapping_add(epoch), BATCH_SIZE, &device) {
            let grads = GradientsParams::from_grads(loss(&model, &batch).backward(), &model);
            let progress = step as f64 / steps as f64;
            let rate = 3e-3 * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
            model = optim.step(rate, model, grads);
            step += 1;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(model)
}
