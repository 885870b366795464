//! A transformer encoder over the patches of an image.

use burn::module::{Module, Param};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};

/// Patches on a side of an image.
const PATCHES: usize = 4;
/// Numbers of a token.
const WIDTH: usize = 64;

/// 16 patches, two layers of attention with LayerNorm in front, the mean over patches, a classifier.
#[derive(Module, Debug)]
pub(crate) struct ImageEncoder {
    embed: Linear,
    positions: Param<Tensor<2>>,
    layers: TransformerEncoder,
    head: Linear,
}

impl ImageEncoder {
    /// For images of `side` × `side` with one channel; 4 divides `side`.
    pub(crate) fn new(side: usize, device: &Device) -> Self {
        let patch = side / PATCHES;
        let noise = Distribution::Normal(0.0, 0.02);
        let positions = Tensor::random([PATCHES * PATCHES, WIDTH], noise, device);
        Self {
            embed: LinearConfig::new(patch * patch, WIDTH).init(device),
            positions: Param::from_tensor(positions),
            layers: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            head: LinearConfig::new(WIDTH, 10).init(device),
        }
    }

    /// Images `[batch, 1, side, side]` to logits `[batch, 10]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let [batch, _, side, _] = images.dims();
        let patch = side / PATCHES;
        let patches = images
            .reshape([batch, PATCHES, patch, PATCHES, patch])
            .swap_dims(2, 3)
            .reshape([batch, PATCHES * PATCHES, patch * patch]);
        let tokens = self.embed.forward(patches) + self.positions.val().unsqueeze::<3>();
        let tokens = self.layers.forward(TransformerEncoderInput::new(tokens));
        self.head.forward(tokens.mean_dim(1).flatten::<2>(1, 2))
    }
}
