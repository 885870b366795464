//! A small network of convolutions and attention, in terms of Burn alone.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Nothing in it knows about mixed precision, quantization or pruning.
#[derive(Module, Debug)]
pub(crate) struct AttentionNet {
    stem: Conv2d,
    patches: Conv2d,
    norm: LayerNorm,
    attention: MultiHeadAttention,
    head: Linear,
}

/// Channels after the stem.
const CHANNELS: usize = 16;
/// Features of each position that attention sees.
const FEATURES: usize = 32;
/// Positions along each side of the image.
const GRID: usize = 4;

impl AttentionNet {
    /// For images of `side` × `side`, a multiple of 4.
    pub(crate) fn new(side: usize, device: &Device) -> Self {
        let patch = side / GRID;
        let padding = patch - 1;
        Self {
            stem: Conv2dConfig::new([1, CHANNELS], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            patches: Conv2dConfig::new([CHANNELS, FEATURES], [2 * patch - 1, 2 * patch - 1])
                .with_stride([patch, patch])
                .with_padding(PaddingConfig2d::Explicit(
                    padding, padding, padding, padding,
                ))
                .init(device),
            norm: LayerNormConfig::new(FEATURES).init(device),
            attention: MultiHeadAttentionConfig::new(FEATURES, 4)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(GRID * GRID * FEATURES, 10).init(device),
        }
    }

    /// Images `[batch, 1, side, side]` to logits `[batch, 10]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.stem.forward(images));
        let x = relu(self.patches.forward(x));
        let x: Tensor<3> = x.flatten::<3>(2, 3).swap_dims(1, 2);
        let attended = self
            .attention
            .forward(MhaInput::self_attn(self.norm.forward(x.clone())));
        self.head.forward((x + attended.context).flatten(1, 2))
    }
}
