//! Multi-head attention, with both of its products quantized.

use burn::nn::Linear;
use burn::nn::attention::{MhaInput as PlainInput, MhaOutput, MultiHeadAttention};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{Bool, Tensor};

use crate::module::weight::optional;
use crate::{ForwardQ, WeightQuantizer};

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
        let [batch, seq_length, _] = input.query.dims();
        let [of_keys, keys, _] = input.key.dims();
        let [of_values, values, _] = input.value.dims();
        // As the layer itself: one example would be repeated for all others.
        assert_eq!(
            [of_keys, of_values],
            [batch; 2],
            "batches of keys and values"
        );
        assert_eq!(keys, values, "lengths of keys and values");
        let heads = |layer: &Linear, x: Tensor<3>| {
            let [batch, seq_length, _] = x.dims();
            let x = layer.forward_q(x);
            x.reshape([batch, seq_length, self.n_heads, self.d_k])
                .swap_dims(1, 2)
        };
        let query = heads(&self.query, input.query);
        let key = heads(&self.key, input.key);
        let value = heads(&self.value, input.value);

        let scores = query
            .matmul(key.transpose())
            .div_scalar((self.d_k as f32).sqrt());
        let scores = masked(scores, input.mask_pad, input.mask_attn, self.min_float);
        let weights = match self.quiet_softmax {
            true => quiet_softmax(scores, 3),
            false => softmax(scores, 3),
        };
        let quantizers = WeightQuantizer::of(&self.query.weight);
        let attention = quantizers.and_then(|quantizers| quantizers.attention.as_ref());
        // Before the dropout, whose factor would widen the range in training.
        let weights = self.dropout.forward(optional(attention, weights));

        let context = weights.clone().matmul(value);
        let context = context
            .swap_dims(1, 2)
            .reshape([batch, seq_length, self.d_model]);
        MhaOutput {
            weights,
            context: self.output.forward_q(context),
        }
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
