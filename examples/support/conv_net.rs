//! The network that most examples train: an ordinary Burn model.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Two convolutions and a linear layer.
#[derive(Module, Debug)]
pub(crate) struct ConvNet {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    head: Linear,
}

impl ConvNet {
    pub(crate) fn new(side: usize, device: &Device) -> Self {
        let conv = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        Self {
            first: conv(1, 16),
            second: conv(16, 32),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            head: LinearConfig::new(32 * (side / 4).pow(2), 10).init(device),
        }
    }

    /// Images `[batch, 1, side, side]` to logits `[batch, 10]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.pool.forward(relu(self.first.forward(images)));
        let x = self.pool.forward(relu(self.second.forward(x)));
        self.head.forward(x.flatten(1, 3))
    }
}
