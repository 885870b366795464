//! The image classifier of MLPerf Tiny, ResNet8 for CIFAR-10
//! ([Banbury et al., 2021](https://arxiv.org/abs/2106.07597)); fields are named as in its
//! checkpoint. Images have pixels from 0 to 255.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

#[derive(Module, Debug)]
pub(crate) struct ResNet8 {
    conv1: Conv2d,
    bn1: BatchNorm,
    block1: Block,
    block2: Block,
    block3: Block,
    fc: Linear,
}

#[derive(Module, Debug)]
struct Block {
    conv1: Conv2d,
    bn1: BatchNorm,
    conv2: Conv2d,
    bn2: BatchNorm,
    shortcut: Option<Conv2d>,
}

impl ResNet8 {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            conv1: conv(3, 16, 3, 1, device),
            bn1: norm(16, device),
            block1: Block::new(16, 16, 1, device),
            block2: Block::new(16, 32, 2, device),
            block3: Block::new(32, 64, 2, device),
            fc: LinearConfig::new(64, 10).init(device),
        }
    }

    /// Images `[batch, 3, 32, 32]` to logits `[batch, 10]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.bn1.forward(self.conv1.forward(images)));
        let x = self
            .block3
            .forward(self.block2.forward(self.block1.forward(x)));
        let [batch, channels, height, width] = x.dims();
        let pooled = x.reshape([batch, channels, height * width]).mean_dim(2);
        self.fc.forward(pooled.reshape([batch, channels]))
    }
}

impl Block {
    fn new(from: usize, to: usize, stride: usize, device: &Device) -> Self {
        Self {
            conv1: conv(from, to, 3, stride, device),
            bn1: norm(to, device),
            conv2: conv(to, to, 3, 1, device),
            bn2: norm(to, device),
            shortcut: (from != to).then(|| conv(from, to, 1, stride, device)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let shortcut = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x.clone()),
            None => x.clone(),
        };
        let x = relu(self.bn1.forward(self.conv1.forward(x)));
        let x = self.bn2.forward(self.conv2.forward(x));
        relu(x + shortcut)
    }
}

/// With TensorFlow's `SAME` padding of an even size: what does not divide comes after.
fn conv(from: usize, to: usize, kernel: usize, stride: usize, device: &Device) -> Conv2d {
    let (before, after) = match (kernel, stride) {
        (1, _) => (0, 0),
        (_, 1) => (1, 1),
        _ => (0, 1),
    };
    Conv2dConfig::new([from, to], [kernel, kernel])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(before, before, after, after))
        .init(device)
}

fn norm(channels: usize, device: &Device) -> BatchNorm {
    BatchNormConfig::new(channels)
        .with_epsilon(1e-3)
        .with_momentum(0.01)
        .init(device)
}
