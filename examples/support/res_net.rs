//! ResNet20 for CIFAR-10 ([He et al., 2015](https://arxiv.org/abs/1512.03385)), with projections
//! where the shape changes; fields are named as in PyTorch's checkpoints.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

#[derive(Module, Debug)]
pub(crate) struct ResNet20 {
    conv1: Conv2d,
    bn1: BatchNorm,
    layer1: Vec<Block>,
    layer2: Vec<Block>,
    layer3: Vec<Block>,
    fc: Linear,
}

#[derive(Module, Debug)]
struct Block {
    conv1: Conv2d,
    bn1: BatchNorm,
    conv2: Conv2d,
    bn2: BatchNorm,
    downsample: Option<Downsample>,
}

/// `downsample.0` and `downsample.1` in PyTorch.
#[derive(Module, Debug)]
struct Downsample {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ResNet20 {
    pub(crate) fn new(device: &Device) -> Self {
        let layer = |from, to, stride| {
            vec![
                Block::new(from, to, stride, device),
                Block::new(to, to, 1, device),
                Block::new(to, to, 1, device),
            ]
        };
        Self {
            conv1: conv(3, 16, 3, 1, device),
            bn1: BatchNormConfig::new(16).init(device),
            layer1: layer(16, 16, 1),
            layer2: layer(16, 32, 2),
            layer3: layer(32, 64, 2),
            fc: LinearConfig::new(64, 10).init(device),
        }
    }

    /// Images `[batch, 3, 32, 32]` to logits `[batch, 10]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = relu(self.bn1.forward(self.conv1.forward(images)));
        for block in self.layer1.iter().chain(&self.layer2).chain(&self.layer3) {
            x = block.forward(x);
        }
        let [batch, channels, height, width] = x.dims();
        let pooled = x.reshape([batch, channels, height * width]).mean_dim(2);
        self.fc.forward(pooled.reshape([batch, channels]))
    }
}

impl Block {
    fn new(from: usize, to: usize, stride: usize, device: &Device) -> Self {
        let norm = || BatchNormConfig::new(to).init(device);
        Self {
            conv1: conv(from, to, 3, stride, device),
            bn1: norm(),
            conv2: conv(to, to, 3, 1, device),
            bn2: norm(),
            downsample: (from != to).then(|| Downsample {
                conv: conv(from, to, 1, stride, device),
                norm: norm(),
            }),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let shortcut = match &self.downsample {
            Some(down) => down.norm.forward(down.conv.forward(x.clone())),
            None => x.clone(),
        };
        let x = relu(self.bn1.forward(self.conv1.forward(x)));
        let x = self.bn2.forward(self.conv2.forward(x));
        relu(x + shortcut)
    }
}

/// A convolution without bias that keeps the size, up to its stride.
fn conv(from: usize, to: usize, kernel: usize, stride: usize, device: &Device) -> Conv2d {
    let padding = kernel / 2;
    Conv2dConfig::new([from, to], [kernel, kernel])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(
            padding, padding, padding, padding,
        ))
        .with_bias(false)
        .init(device)
}
