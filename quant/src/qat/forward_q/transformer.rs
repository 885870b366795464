//! Transformer encoders, with the quantizers of their layers.

use burn::nn::transformer::{
    PositionWiseFeedForward, TransformerEncoder, TransformerEncoderInput as PlainInput,
    TransformerEncoderLayer,
};
use burn::tensor::{Bool, Tensor};

use super::attention::MhaInput;
use crate::ForwardQ;

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
        let normed = match self.norm_first {
            true => self.norm_2.forward(x.clone()),
            false => x.clone(),
        };
        let attention = self.mha.forward_q(MhaInput {
            mask_pad,
            mask_attn,
            ..MhaInput::self_attn(normed)
        });
        let x = x + self.dropout.forward(attention.context);

        let (x, normed) = match self.norm_first {
            true => (x.clone(), self.norm_1.forward(x)),
            false => {
                let x = self.norm_1.forward(x);
                (x.clone(), x)
            }
        };
        let x = x + self.dropout.forward(self.pwff.forward_q(normed));
        match self.norm_first {
            true => x,
            false => self.norm_2.forward(x),
        }
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
