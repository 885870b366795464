//! Transformer decoders, with the quantizers of their layers.

use burn::nn::LayerNorm;
use burn::nn::attention::{MhaOutput, MultiHeadAttention};
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderInput as PlainInput, TransformerDecoderLayer,
};
use burn::tensor::{Bool, Tensor};
use burn_lean_graph::tensors;

use super::attention::{MhaInput, attend, keys_and_values};
use crate::{ForwardQ, KvCache, KvFormat};

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
        around(
            self,
            input,
            |input| self.self_attn.forward_q(input),
            |input| self.cross_attn.forward_q(input),
        )
    }
}

/// What a layer of a decoder keeps between positions.
#[derive(Debug, Clone, Default)]
pub struct DecoderCache {
    /// Of the target's positions so far.
    pub target: KvCache,
    /// Of the memory: computed once, and read from then on.
    pub memory: KvCache,
}

tensors!(DecoderCache { target, memory });

impl DecoderCache {
    /// Nothing yet.
    pub fn new(format: KvFormat) -> Self {
        Self {
            target: KvCache::new(format),
            memory: KvCache::new(format),
        }
    }
}

/// For positions that follow those of the cache, with the same memory at each call; masks of the target
/// are `[batch, all positions]` and `[batch, new positions, all positions]`, that of new positions and
/// memory `[batch, new positions, memory_length]`.
impl ForwardQ<(TransformerDecoderInput, &mut DecoderCache)> for TransformerDecoderLayer {
    type Output = TransformerDecoderInput;

    fn forward_q(
        &self,
        (input, cache): (TransformerDecoderInput, &mut DecoderCache),
    ) -> TransformerDecoderInput {
        let DecoderCache { target, memory } = cache;
        around(
            self,
            input,
            |input| self.self_attn.forward_q((input, target)),
            |input| to_memory(&self.cross_attn, input, memory),
        )
    }
}

/// Attention to a memory whose keys and values are computed once.
fn to_memory(attention: &MultiHeadAttention, input: MhaInput, cache: &mut KvCache) -> MhaOutput {
    let positions = input.key.dims()[1];
    let kept = match cache.read() {
        Some(kept) => kept,
        None => {
            let (key, value) = keys_and_values(attention, input.key, input.value);
            cache.extend(key, value)
        }
    };
    assert_eq!(positions, cache.positions(), "the memory of the cache");
    attend(
        attention,
        input.query,
        kept,
        input.mask_pad,
        input.mask_attn,
    )
}

/// A layer with the given attentions to the target and to the memory.
fn around(
    layer: &TransformerDecoderLayer,
    input: TransformerDecoderInput,
    to_target: impl FnOnce(MhaInput) -> MhaOutput,
    to_memory: impl FnOnce(MhaInput) -> MhaOutput,
) -> TransformerDecoderInput {
    let x = input.target.clone();
    let normed = match layer.norm_first {
        true => layer.norm_3.forward(x.clone()),
        false => x.clone(),
    };
    let attention = to_target(MhaInput {
        mask_pad: input.target_mask_pad.clone(),
        mask_attn: input.target_mask_attn.clone(),
        ..MhaInput::self_attn(normed)
    });
    let x = x + layer.dropout.forward(attention.context);

    let after_or_before = |x: Tensor<3>, norm: &LayerNorm| match layer.norm_first {
        true => (x.clone(), norm.forward(x)),
        false => {
            let x = norm.forward(x);
            (x.clone(), x)
        }
    };
    let (x, normed) = after_or_before(x, &layer.norm_1);
    let memory = input.memory.clone();
    let attention = to_memory(MhaInput {
        mask_pad: input.memory_mask_pad.clone(),
        mask_attn: input.memory_mask_attn.clone(),
        ..MhaInput::new(normed, memory.clone(), memory)
    });
    let x = x + layer.dropout.forward(attention.context);

    let (x, normed) = after_or_before(x, &layer.norm_2);
    let x = x + layer.dropout.forward(layer.pwff.forward_q(normed));
    let target = match layer.norm_first {
        true => x,
        false => layer.norm_3.forward(x),
    };
    TransformerDecoderInput { target, ..input }
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

/// For positions that follow those of the caches, one for each layer, with masks as the layers have
/// them. The result is that of the new positions.
impl ForwardQ<(TransformerDecoderInput, &mut [DecoderCache])> for TransformerDecoder {
    type Output = Tensor<3>;

    fn forward_q(
        &self,
        (input, caches): (TransformerDecoderInput, &mut [DecoderCache]),
    ) -> Tensor<3> {
        assert_eq!(caches.len(), self.layers.len(), "a cache for each layer");
        let layers = self.layers.iter().zip(caches);
        layers
            .fold(input, |input, (layer, cache)| {
                layer.forward_q((input, cache))
            })
            .target
    }
}
