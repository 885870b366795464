//! A model of the Llama family from Burn's parts: RMS norms, rotary positions, grouped-query
//! attention, SwiGLU. An ordinary model: nothing in it knows of compression.

use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
    RotaryEncodingConfig,
};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor};

/// Sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) vocabulary: usize,
    pub(crate) width: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    /// Heads of keys and values, each of which serves `heads / kv_heads` heads.
    pub(crate) kv_heads: usize,
    /// Longest sequence.
    pub(crate) positions: usize,
    /// Whether the head is a matrix of its own, or the embedding.
    pub(crate) own_head: bool,
}

#[derive(Module, Debug)]
pub(crate) struct Llama {
    tok_embeddings: Embedding,
    layers: Vec<Block>,
    norm: RmsNorm,
    output: Option<Linear>,
    rotary: RotaryEncoding,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    ffn_norm: RmsNorm,
    feed_forward: FeedForward,
}

#[derive(Module, Debug)]
struct Attention {
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    heads: usize,
    kv_heads: usize,
}

#[derive(Module, Debug)]
struct FeedForward {
    w1: Linear,
    w2: Linear,
    w3: Linear,
}

/// Keys and values of the positions so far, of each block: `[batch, kv_heads, positions, head]`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cache {
    blocks: Vec<(Tensor<4>, Tensor<4>)>,
    positions: usize,
}

impl Sizes {
    pub(crate) fn init(&self, device: &Device) -> Llama {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let norm = || {
            RmsNormConfig::new(self.width)
                .with_epsilon(1e-5)
                .init(device)
        };
        let head = self.width / self.heads;
        let block = |_| Block {
            attention_norm: norm(),
            attention: Attention {
                wq: linear(self.width, self.heads * head),
                wk: linear(self.width, self.kv_heads * head),
                wv: linear(self.width, self.kv_heads * head),
                wo: linear(self.heads * head, self.width),
                heads: self.heads,
                kv_heads: self.kv_heads,
            },
            ffn_norm: norm(),
            feed_forward: FeedForward {
                w1: linear(self.width, self.hidden),
                w2: linear(self.hidden, self.width),
                w3: linear(self.width, self.hidden),
            },
        };
        Llama {
            tok_embeddings: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(burn::nn::Initializer::Normal {
                    mean: 0.0,
                    std: 0.05,
                })
                .init(device),
            layers: (0..self.layers).map(block).collect(),
            norm: norm(),
            output: self.own_head.then(|| linear(self.width, self.vocabulary)),
            rotary: RotaryEncodingConfig::new(self.positions, head).init(device),
        }
    }
}

impl Llama {
    /// Logits `[batch, positions, vocabulary]` of tokens `[batch, positions]`.
    pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.forward_cache(tokens, &mut Cache::default())
    }

    /// The same for tokens that follow those in `cache`.
    pub(crate) fn forward_cache(&self, tokens: Tensor<2, Int>, cache: &mut Cache) -> Tensor<3> {
        let [_, count] = tokens.dims();
        let start = cache.positions;
        cache.positions += count;
        // Every position sees itself and those before it.
        let device = tokens.device();
        let mask = (count > 1)
            .then(|| Tensor::<2, Bool>::tril_mask([count, start + count], start as i64, &device));
        let mut x = self.tok_embeddings.forward(tokens);
        let mut blocks = std::mem::take(&mut cache.blocks).into_iter();
        for block in &self.layers {
            let (y, keys, values) = block.attention.forward(
                block.attention_norm.forward(x.clone()),
                &self.rotary,
                start,
                mask.clone(),
                blocks.next(),
            );
            cache.blocks.push((keys, values));
            x = x + y;
            x = x.clone() + block.feed_forward.forward(block.ffn_norm.forward(x));
        }
        let x = self.norm.forward(x);
        match &self.output {
            Some(head) => head.forward(x),
            None => x.matmul(self.tok_embeddings.weight.val().transpose().unsqueeze()),
        }
    }

    /// The linear layers that read rotated queries and keys, for checkpoints with another order.
    pub(crate) fn map_rotated(mut self, map: impl Fn(Tensor<2>, usize) -> Tensor<2>) -> Self {
        for block in &mut self.layers {
            let attention = &mut block.attention;
            let (heads, kv_heads) = (attention.heads, attention.kv_heads);
            for (layer, heads) in [(&mut attention.wq, heads), (&mut attention.wk, kv_heads)] {
                layer.weight = layer.weight.clone().map(|weight| map(weight, heads));
            }
        }
        self
    }
}

impl Attention {
    fn forward(
        &self,
        x: Tensor<3>,
        rotary: &RotaryEncoding,
        start: usize,
        mask: Option<Tensor<2, Bool>>,
        before: Option<(Tensor<4>, Tensor<4>)>,
    ) -> (Tensor<3>, Tensor<4>, Tensor<4>) {
        let [batch, count, _] = x.dims();
        let split = |x: Tensor<3>, heads: usize| {
            let [_, _, width] = x.dims();
            x.reshape([batch, count, heads, width / heads])
                .swap_dims(1, 2)
        };
        let query = rotary.apply(split(self.wq.forward(x.clone()), self.heads), start);
        let mut keys = rotary.apply(split(self.wk.forward(x.clone()), self.kv_heads), start);
        let mut values = split(self.wv.forward(x), self.kv_heads);
        if let Some((old_keys, old_values)) = before {
            keys = Tensor::cat(vec![old_keys, keys], 2);
            values = Tensor::cat(vec![old_values, values], 2);
        }
        let [_, _, _, head] = query.dims();
        let scores = query.matmul(self.repeated(keys.clone()).transpose()) / (head as f64).sqrt();
        let scores = match mask {
            Some(mask) => scores.mask_fill(mask.unsqueeze(), -1e9),
            None => scores,
        };
        let y = softmax(scores, 3).matmul(self.repeated(values.clone()));
        let y = y.swap_dims(1, 2).reshape([batch, count, self.heads * head]);
        (self.wo.forward(y), keys, values)
    }

    /// One head of keys or values for each head.
    fn repeated(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, kv_heads, count, head] = x.dims();
        let times = self.heads / kv_heads;
        x.unsqueeze_dim::<5>(2)
            .repeat_dim(2, times)
            .reshape([batch, self.heads, count, head])
    }
}

impl FeedForward {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.w2
            .forward(silu(self.w1.forward(x.clone())) * self.w3.forward(x))
    }
}
