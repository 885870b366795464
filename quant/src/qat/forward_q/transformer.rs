//! Transformer encoders, with the quantizers of their layers.

use burn::nn::attention::MhaOutput;
use burn::nn::transformer::{
    PositionWiseFeedForward, TransformerEncoder, TransformerEncoderInput as PlainInput,
    TransformerEncoderLayer,
};
use burn::tensor::{Bool, Tensor};

use super::attention::MhaInput;
use crate::{ForwardQ, KvCache};

/// The input of a transformer encoder.
///
/// Like Burn's type of that name, whose fields are private; it converts into it.
#[derive(Debug, Clone)]
pub struct TransformerEncoderInput {
    /// `[batch, seq_length, d_model]`
    pub tensor: Tensor<3>,
    /// `[batch, seq_length]`, true where the sequence is padding.
    pub mask_pad: Option<Tensor<2, Bool>>,
    /// `[batch, seq_length, seq_length]`, true where a position must not see another.
    pub mask_attn: Option<Tensor<3, Bool>>,
}

impl TransformerEncoderInput {
    /// Without masks.
    pub fn new(tensor: Tensor<3>) -> Self {
        Self {
            tensor,
            mask_pad: None,
            mask_attn: None,
        }
    }

    /// With a padding mask.
    #[must_use]
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// With an attention mask.
    #[must_use]
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }
}

impl From<TransformerEncoderInput> for PlainInput {
    fn from(input: TransformerEncoderInput) -> Self {
        let mut plain = Self::new(input.tensor);
        if let Some(mask) = input.mask_pad {
            plain = plain.mask_pad(mask);
        }
        if let Some(mask) = input.mask_attn {
            plain = plain.mask_attn(mask);
        }
        plain
    }
}

impl<const D: usize> ForwardQ<Tensor<D>> for PositionWiseFeedForward {
    type Output = Tensor<D>;

    fn forward_q(&self, input: Tensor<D>) -> Tensor<D> {
        let x = self.linear_inner.forward_q(input);
        let x = self.dropout.forward(self.activation.forward(x));
        self.linear_outer.forward_q(x)
    }
}

/// The input, the padding mask and the attention mask of a layer.
type LayerInput = (Tensor<3>, Option<Tensor<2, Bool>>, Option<Tensor<3, Bool>>);

impl ForwardQ<LayerInput> for TransformerEncoderLayer {
    type Output = Tensor<3>;

    fn forward_q(&self, (x, mask_pad, mask_attn): LayerInput) -> Tensor<3> {
        around(self, x, |x| {
            self.mha.forward_q(MhaInput {
                mask_pad,
                mask_attn,
                ..MhaInput::self_attn(x)
            })
        })
    }
}

/// For positions that follow those of the cache, with masks as [`MultiHeadAttention`] has them.
///
/// [`MultiHeadAttention`]: burn::nn::attention::MultiHeadAttention
impl ForwardQ<(LayerInput, &mut KvCache)> for TransformerEncoderLayer {
    type Output = Tensor<3>;

    fn forward_q(&self, (input, cache): (LayerInput, &mut KvCache)) -> Tensor<3> {
        let (x, mask_pad, mask_attn) = input;
        around(self, x, |x| {
            let input = MhaInput {
                mask_pad,
                mask_attn,
                ..MhaInput::self_attn(x)
            };
            self.mha.forward_q((input, cache))
        })
    }
}

/// A layer with the given attention.
fn around(
    layer: &TransformerEncoderLayer,
    x: Tensor<3>,
    attention: impl FnOnce(Tensor<3>) -> MhaOutput,
) -> Tensor<3> {
    let normed = match layer.norm_first {
        true => layer.norm_2.forward(x.clone()),
        false => x.clone(),
    };
    let x = x + layer.dropout.forward(attention(normed).context);

    let (x, normed) = match layer.norm_first {
        true => (x.clone(), layer.norm_1.forward(x)),
        false => {
            let x = layer.norm_1.forward(x);
            (x.clone(), x)
        }
    };
    let x = x + layer.dropout.forward(layer.pwff.forward_q(normed));
    match layer.norm_first {
        true => x,
        false => layer.norm_2.forward(x),
    }
}

impl ForwardQ<TransformerEncoderInput> for TransformerEncoder {
    type Output = Tensor<3>;

    fn forward_q(&self, input: TransformerEncoderInput) -> Tensor<3> {
        let TransformerEncoderInput {
            tensor,
            mask_pad,
            mask_attn,
        } = input;
        self.layers.iter().fold(tensor, |x, layer| {
            layer.forward_q((x, mask_pad.clone(), mask_attn.clone()))
        })
    }
}

/// For positions that follow those of the caches, one for each layer: the padding mask is
/// `[batch, all positions]`, the attention mask `[batch, new positions, all positions]`. The result is
/// that of the new positions. A single position needs no attention mask.
///
/// ```
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{ForwardQ, KvCache, KvFormat, qat::TransformerEncoderInput};
///
/// let device = Device::flex();
/// let encoder = TransformerEncoderConfig::new(4, 8, 2, 3).init(&device);
/// let mut caches = vec![KvCache::new(KvFormat::Int8); 3];
/// for positions in 1..4 {
///     let token = TransformerEncoderInput::new(Tensor::ones([1, 1, 4], &device));
///     let x = encoder.forward_q((token, &mut caches[..]));
///     assert_eq!((x.dims(), caches[2].positions()), ([1, 1, 4], positions));
/// }
/// ```
impl ForwardQ<(TransformerEncoderInput, &mut [KvCache])> for TransformerEncoder {
    type Output = Tensor<3>;

    fn forward_q(&self, (input, caches): (TransformerEncoderInput, &mut [KvCache])) -> Tensor<3> {
        assert_eq!(caches.len(), self.layers.len(), "a cache for each layer");
        let layers = self.layers.iter().zip(caches);
        layers.fold(input.tensor, |x, (layer, cache)| {
            let input = (x, input.mask_pad.clone(), input.mask_attn.clone());
            layer.forward_q((input, cache))
        })
    }
}
