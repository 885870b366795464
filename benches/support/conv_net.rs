//! The convolutional network of the benchmarks, of two sizes.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Tensor};
use burn_lean::quant::quantize_calls;

/// Two convolutions of 3×3 with 32 and 64 channels (large: 128 and 256) with pooling, and a linear
/// layer, on images of 3×32×32 (3×64×64), batch 16 (64).
#[derive(Module, Debug)]
pub(crate) struct ConvNet {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    head: Linear,
}

// Only a model that is prepared for quantization notices the attribute.
#[quantize_calls(crate = burn_lean::quant)]
impl ConvNet {
    pub(crate) fn new(large: bool, device: &Device) -> Self {
        let (a, b, side) = if large { (128, 256, 64) } else { (32, 64, 32) };
        let convolution = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        Self {
            first: convolution(3, a),
            second: convolution(a, b),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            head: LinearConfig::new(b * side * side / 16, 10).init(device),
        }
    }

    /// Random images.
    pub(crate) fn input(large: bool, device: &Device) -> Tensor<4> {
        let shape = match large {
            true => [64, 3, 64, 64],
            false => [16, 3, 32, 32],
        };
        Tensor::random(shape, Distribution::Default, device)
    }

    /// Images to logits `[batch, 10]`.
    pub(crate) fn forward(&self, input: Tensor<4>) -> Tensor<2> {
        let x = self.pool.forward(relu(self.first.forward(input)));
        let x = self.pool.forward(relu(self.second.forward(x)));
        self.head.forward(x.flatten(1, 3))
    }
}
