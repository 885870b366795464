//! Classifiers of images from a checkpoint, or from a plain training loop.

use std::path::Path;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::{
    FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore,
};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_lean::prune::{PruneError, recompute_batch_norm};
use burn_lean::reparam::Rejected;

use super::{AttentionNet, Images, MlpNet, ResNet20, progress};

/// Images of a step.
const BATCH: usize = 32;

/// Mean cross-entropy.
pub(crate) fn cross_entropy(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, labels)
}

/// With BatchNorm statistics measured anew on images as they are trained with, 5,000 at most.
pub(crate) fn recalibrated<M: Module>(
    model: M,
    forward: impl Fn(&M, Tensor<4>) -> Tensor<2>,
    images: &Images,
    device: &Device,
) -> Result<M, Rejected<M, PruneError>> {
    let batches = images.shuffled(0, 500, device).take(10);
    let look = |model: &M, images: &Tensor<4>| forward(model, images.clone());
    recompute_batch_norm(model, look, batches.map(|batch| batch.images))
}

/// A classifier of images.
pub(crate) trait Network: Module + 'static {
    const HAS_BATCH_NORM: bool;

    /// Images `[batch, channels, side, side]` to logits `[batch, 10]`.
    fn logits(&self, images: Tensor<4>) -> Tensor<2>;
}

impl Network for AttentionNet {
    const HAS_BATCH_NORM: bool = false;

    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward(images)
    }
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

/// Trains on the autodiff device of `model` with AdamW, from a rate of 0.003 down to zero along half a
/// cosine.
pub(crate) fn train<M: Module>(
    mut model: M,
    forward: &impl Fn(&M, Tensor<4>) -> Tensor<2>,
    images: &Images,
    epochs: usize,
    seed: u64,
) -> M {
    let device = model.devices().remove(0);
    let mut optimizer = AdamWConfig::new().init();
    let steps = epochs * images.len().div_ceil(BATCH);
    let bar = progress(steps, "training");
    for epoch in 0..epochs as u64 {
        for batch in images.shuffled(seed.wrapping_add(epoch), BATCH, &device) {
            let loss = cross_entropy(forward(&model, batch.images), batch.labels);
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            let progress = bar.position() as f64 / steps as f64;
            let rate = 0.5 * 3e-3 * (1.0 + (std::f64::consts::PI * progress).cos());
            model = optimizer.step(rate, model, gradients);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    model
}

/// Loads a checkpoint with PyTorch's names and layouts, in F32 whatever it is in.
pub(crate) fn load<M: Module + 'static>(mut model: M, path: &Path) -> Result<M, String> {
    // What is missing or does not fit is told here, in a line.
    let mut store = SafetensorsStore::from_file(path)
        .allow_partial(true)
        .validate(false)
        .with_from_adapter(PyTorchToBurnAdapter.chain(FloatCastAdapter::to(DType::F32)))
        .with_key_remapping(r"downsample\.0\.", "downsample.conv.")
        .with_key_remapping(r"downsample\.1\.", "downsample.norm.");
    let failed = |reason: String| Err(format!("cannot load {}: {reason}", path.display()));
    let loaded = match model.load_from(&mut store) {
        Ok(loaded) => loaded,
        Err(error) => return failed(error.to_string()),
    };
    let more = |count: usize| match count {
        0 | 1 => String::new(),
        count => format!(", and {} more", count - 1),
    };
    if let Some(error) = loaded.errors.first() {
        let count = more(loaded.errors.len());
        return failed(format!("{error}{count}; is it of another model?"));
    }
    match loaded.missing.first() {
        None => Ok(model),
        Some((name, _)) => {
            let count = more(loaded.missing.len());
            failed(format!(
                "it has no `{name}`{count}; is it of another model?"
            ))
        }
    }
}
