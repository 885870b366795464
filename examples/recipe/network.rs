//! The networks that the example can train.

use std::path::Path;

use burn::module::Module;
use burn::store::{ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::Tensor;

use crate::support::{AttentionNet, MlpNet, ResNet20};

/// A classifier of images.
pub(crate) trait Network: Module + 'static {
    /// Images `[batch, channels, side, side]` to logits `[batch, 10]`.
    fn logits(&self, images: Tensor<4>) -> Tensor<2>;
}

impl Network for AttentionNet {
    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward(images)
    }
}

impl Network for MlpNet {
    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward(images)
    }
}

impl Network for ResNet20 {
    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward(images)
    }
}

/// Loads a checkpoint with PyTorch's names and layouts.
pub(crate) fn load<M: Network>(mut model: M, path: &Path) -> Result<M, String> {
    let mut store = SafetensorsStore::from_file(path)
        .with_from_adapter(PyTorchToBurnAdapter)
        .with_key_remapping(r"downsample\.0\.", "downsample.conv.")
        .with_key_remapping(r"downsample\.1\.", "downsample.norm.");
    match model.load_from(&mut store) {
        Ok(_) => Ok(model),
        Err(error) => Err(format!("cannot load {}: {error}", path.display())),
    }
}
