//! Multi-head attention, with both of its products quantized.

use burn::nn::Linear;
use burn::nn::attention::{MhaInput as PlainInput, MhaOutput, MultiHeadAttention};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{Bool, Tensor};

use crate::module::weight::optional;
use crate::{ForwardQ, KvCache, WeightQuantizer};

/// The input of an attention.
///
/// Like Burn's type of that name, whose fields are private; it converts into it.
#[derive(Debug, Clone)]
pub struct MhaInput {
    /// `[batch, seq_length_1, d_model]`
    pub query: Tensor<3>,
    /// `[batch, seq_length_2, d_model]`
    pub key: Tensor<3>,
    /// `[batch, seq_length_2, d_model]`
    pub value: Tensor<3>,
    /// `[batch, seq_length_2]`, true where keys are padding.
    pub mask_pad: Option<Tensor<2, Bool>>,
    /// `[batch, seq_length_1, seq_length_2]`, true where a query must not see a key.
    pub mask_attn: Option<Tensor<3, Bool>>,
}

impl MhaInput {
    /// Queries, keys and values from one tensor.
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Without masks.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            query,
            key,
            value,
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

impl From<MhaInput> for PlainInput {
    fn from(input: MhaInput) -> Self {
        let mut plain = Self::new(input.query, input.key, input.value);
        if let Some(mask) = input.mask_pad {
            plain = plain.mask_pad(mask);
        }
        if let Some(mask) = input.mask_attn {
            plain = plain.mask_attn(mask);
        }
        plain
    }
}

/// softmax(q·kᵀ / √d) · v, where q, k, v and the softmax are quantized, between four linear layers
/// with theirs.
impl ForwardQ<MhaInput> for MultiHeadAttention {
    type Output = MhaOutput;

    fn forward_q(&self, input: MhaInput) -> MhaOutput {
        let prepared = |layer: &Linear| WeightQuantizer::of(&layer.weight).is_some();
        let layers = [&self.query, &self.key, &self.value, &self.output];
        if !layers.into_iter().any(prepared) {
            return self.forward(input.into());
        }
        let kept = keys_and_values(self, input.key, input.value);
        attend(self, input.query, kept, input.mask_pad, input.mask_attn)
    }
}

/// The same for positions that follow those of the cache, which they join: keys and values are of the
/// new positions, the padding mask is `[batch, all positions]`, the attention mask
/// `[batch, new positions, all positions]`. The result is that of the new positions.
///
/// Burn's `forward_cache` takes the whole sequence again, of which it computes the last position, and
/// returns the whole.
///
/// ```
/// use burn::nn::attention::MultiHeadAttentionConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{ForwardQ, KvCache, KvFormat, qat::MhaInput};
///
/// let device = Device::flex();
/// let attention = MultiHeadAttentionConfig::new(4, 2).init(&device);
/// let token = || MhaInput::self_attn(Tensor::<3>::ones([1, 1, 4], &device));
/// let mut cache = KvCache::new(KvFormat::Int8);
/// attention.forward_q((token(), &mut cache));
/// let output = attention.forward_q((token(), &mut cache));
/// assert_eq!(output.context.dims(), [1, 1, 4]);
/// assert_eq!((output.weights.dims(), cache.positions()), ([1, 2, 1, 2], 2));
/// ```
impl ForwardQ<(MhaInput, &mut KvCache)> for MultiHeadAttention {
    type Output = MhaOutput;

    fn forward_q(&self, (input, cache): (MhaInput, &mut KvCache)) -> MhaOutput {
        let (key, value) = keys_and_values(self, input.key, input.value);
        let kept = cache.extend(key, value);
        attend(self, input.query, kept, input.mask_pad, input.mask_attn)
    }
}

/// What a layer makes of `x`, `[batch, heads, length, features]`.
fn heads(attention: &MultiHeadAttention, layer: &Linear, x: Tensor<3>) -> Tensor<4> {
    let [batch, length, _] = x.dims();
    let x = layer.forward_q(x);
    x.reshape([batch, length, attention.n_heads, attention.d_k])
        .swap_dims(1, 2)
}

pub(super) fn keys_and_values(
    attention: &MultiHeadAttention,
    key: Tensor<3>,
    value: Tensor<3>,
) -> (Tensor<4>, Tensor<4>) {
    let lengths = [&key, &value].map(|x| x.dims()[1]);
    assert_eq!(lengths[0], lengths[1], "lengths of keys and values");
    let key = heads(attention, &attention.key, key);
    (key, heads(attention, &attention.value, value))
}

/// What queries find in keys and values of `[batch, heads, length, features]`.
pub(super) fn attend(
    attention: &MultiHeadAttention,
    query: Tensor<3>,
    (key, value): (Tensor<4>, Tensor<4>),
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
) -> MhaOutput {
    let [batch, length, _] = query.dims();
    // As the layer itself: one example would be repeated for all others.
    let batches = [&key, &value].map(|x| x.dims()[0]);
    assert_eq!(batches, [batch; 2], "batches of keys and values");
    let query = heads(attention, &attention.query, query);
    let scores = query
        .matmul(key.transpose())
        .div_scalar((attention.d_k as f32).sqrt());
    let scores = masked(scores, mask_pad, mask_attn, attention.min_float);
    let weights = match attention.quiet_softmax {
        true => quiet_softmax(scores, 3),
        false => softmax(scores, 3),
    };
    let quantizers = WeightQuantizer::of(&attention.query.weight);
    let rounding = quantizers.and_then(|quantizers| quantizers.attention.as_ref());
    // Before the dropout, whose factor would widen the range in training.
    let weights = attention.dropout.forward(optional(rounding, weights));

    let context = weights.clone().matmul(value).swap_dims(1, 2);
    let context = context.reshape([batch, length, attention.d_model]);
    MhaOutput {
        weights,
        context: attention.output.forward_q(context),
    }
}

fn masked(
    mut scores: Tensor<4>,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
    min_float: f64,
) -> Tensor<4> {
    if let Some(mask) = mask_pad {
        let [batch, keys] = mask.dims();
        scores = scores.mask_fill(mask.reshape([batch, 1, 1, keys]), min_float);
    }
    if let Some(mask) = mask_attn {
        let [batch, queries, keys] = mask.dims();
        scores = scores.mask_fill(mask.reshape([batch, 1, queries, keys]), min_float);
    }
    scores
}
