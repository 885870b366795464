//! Transformer decoders, with the quantizers of their layers.

use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderInput as PlainInput, TransformerDecoderLayer,
};
use burn::tensor::{Bool, Tensor};

use super::attention::MhaInput;
use crate::ForwardQ;

/// The input of a transformer decoder.
///
/// Like Burn's type of that name, whose fields are private; it converts into it.
#[derive(Debug, Clone)]
pub struct TransformerDecoderInput {
    /// `[batch, target_length, d_model]`
    pub target: Tensor<3>,
    /// `[batch, target_length]`, true where the target is padding.
    pub target_mask_pad: Option<Tensor<2, Bool>>,
    /// `[batch, target_length, target_length]`, true where a position must not see another.
    pub target_mask_attn: Option<Tensor<3, Bool>>,
    /// What an encoder made of the source: `[batch, memory_length, d_model]`.
    pub memory: Tensor<3>,
    /// `[batch, memory_length]`, true where the memory is padding.
    pub memory_mask_pad: Option<Tensor<2, Bool>>,
    /// `[batch, target_length, memory_length]`, true where the target must not see the memory.
    pub memory_mask_attn: Option<Tensor<3, Bool>>,
}

impl TransformerDecoderInput {
    /// Without masks.
    pub fn new(target: Tensor<3>, memory: Tensor<3>) -> Self {
        Self {
            target,
            target_mask_pad: None,
            target_mask_attn: None,
            memory,
            memory_mask_pad: None,
            memory_mask_attn: None,
        }
    }

    /// With a padding mask of the target.
    #[must_use]
    pub fn target_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.target_mask_pad = Some(mask_pad);
        self
    }

    /// With an attention mask of the target.
    #[must_use]
    pub fn target_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.target_mask_attn = Some(mask_attn);
        self
    }

    /// With a padding mask of the memory.
    #[must_use]
    pub fn memory_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.memory_mask_pad = Some(mask_pad);
        self
    }

    /// With an attention mask of the memory.
    #[must_use]
    pub fn memory_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.memory_mask_attn = Some(mask_attn);
        self
    }
}

impl From<TransformerDecoderInput> for PlainInput {
    fn from(input: TransformerDecoderInput) -> Self {
        let mut plain = Self::new(input.target, input.memory);
        if let Some(mask) = input.target_mask_pad {
            plain = plain.target_mask_pad(mask);
        }
        if let Some(mask) = input.target_mask_attn {
            plain = plain.target_mask_attn(mask);
        }
        if let Some(mask) = input.memory_mask_pad {
            plain = plain.memory_mask_pad(mask);
        }
        if let Some(mask) = input.memory_mask_attn {
            plain = plain.memory_mask_attn(mask);
        }
        plain
    }
}

/// Gives the input of the next layer, as Burn's does: the same with another target.
impl ForwardQ<TransformerDecoderInput> for TransformerDecoderLayer {
    type Output = TransformerDecoderInput;

    fn forward_q(&self, input: TransformerDecoderInput) -> TransformerDecoderInput {
        let x = input.target.clone();
        let normed = match self.norm_first {
            true => self.norm_3.forward(x.clone()),
            false => x.clone(),
        };
        let attention = self.self_attn.forward_q(MhaInput {
            mask_pad: input.target_mask_pad.clone(),
            mask_attn: input.target_mask_attn.clone(),
            ..MhaInput::self_attn(normed)
        });
        let x = x + self.dropout.forward(attention.context);

        let after_or_before = |x: Tensor<3>, norm: &burn::nn::LayerNorm| match self.norm_first {
            true => (x.clone(), norm.forward(x)),
            false => {
                let x = norm.forward(x);
                (x.clone(), x)
            }
        };
        let (x, normed) = after_or_before(x, &self.norm_1);
        let memory = input.memory.clone();
        let attention = self.cross_attn.forward_q(MhaInput {
            mask_pad: input.memory_mask_pad.clone(),
            mask_attn: input.memory_mask_attn.clone(),
            ..MhaInput::new(normed, memory.clone(), memory)
        });
        let x = x + self.dropout.forward(attention.context);

        let (x, normed) = after_or_before(x, &self.norm_2);
        let x = x + self.dropout.forward(self.pwff.forward_q(normed));
        let target = match self.norm_first {
            true => x,
            false => self.norm_3.forward(x),
        };
        TransformerDecoderInput { target, ..input }
    }
}

impl ForwardQ<TransformerDecoderInput> for TransformerDecoder {
    type Output = Tensor<3>;

    fn forward_q(&self, input: TransformerDecoderInput) -> Tensor<3> {
        let layers = self.layers.iter();
        layers
            .fold(input, |input, layer| layer.forward_q(input))
            .target
    }
}
