//! A model of the Llama family from Burn's parts: RMS norms, rotary positions, grouped-query
//! attention, SwiGLU. An ordinary model: nothing in it knows of compression, but that the attribute
//! `quantize_calls` lets a linear layer that carries a quantizer use it.

use std::f32::consts::TAU;

use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
    RotaryEncodingConfig,
};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_lean::quant::quantize_calls;
use burn_lean::quant::{KvCache, KvFormat};

/// Base of the rotations, unless something else is said: that of Llama 1 and 2.
pub(crate) const ROPE_THETA: f32 = 10_000.0;
/// What keeps norms from dividing by 0, likewise.
pub(crate) const NORM_EPSILON: f64 = 1e-5;

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
    /// Base of the rotations.
    pub(crate) rope_theta: f32,
    pub(crate) rope_scaling: Option<RopeScaling>,
    /// What keeps norms from dividing by 0.
    pub(crate) norm_epsilon: f64,
}

/// Slower rotations, for texts longer than a model was first trained on: those of Llama 3.1.
///
/// With the turns `t` that a frequency makes over `positions`, and `s = (t - low) / (high - low)` held
/// within 0 and 1, it becomes `(1 - s) / factor + s` times as large: what turns often stays as it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RopeScaling {
    /// By which slow rotations are divided.
    pub(crate) factor: f32,
    /// Turns up to which a rotation is slow.
    pub(crate) low: f32,
    /// Turns from which a rotation stays as it is.
    pub(crate) high: f32,
    /// Longest sequence of the first training.
    pub(crate) positions: f32,
}

impl RopeScaling {
    /// Angles per position, scaled.
    pub(crate) fn scaled(&self, frequencies: Tensor<1>) -> Tensor<1> {
        let turns = frequencies.clone() * (self.positions / TAU);
        let kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        let slow = frequencies.clone() / self.factor;
        slow * (kept.clone() * -1.0 + 1.0) + frequencies * kept
    }
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

/// Keys and values of the positions so far, of each block.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cache {
    format: KvFormat,
    blocks: Vec<KvCache>,
}

burn_lean::graph::tensors!(Cache { blocks; format });

impl Cache {
    pub(crate) fn new(format: KvFormat) -> Self {
        Self {
            format,
            blocks: Vec::new(),
        }
    }

    /// Bytes of all keys and values.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.iter().map(KvCache::bytes).sum()
    }
}

/// One block by itself, with the rotations that it needs.
#[derive(Module, Debug)]
pub(crate) struct LoneBlock {
    block: Block,
    rotary: RotaryEncoding,
}

impl LoneBlock {
    /// From what arrives at the block to what arrives at the next one, `[batch, positions, width]`.
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let mask = causal(x.dims()[1], 0, &x.device());
        let mut cache = KvCache::default();
        self.block.through(x, &self.rotary, mask, &mut cache)
    }
}

impl Sizes {
    fn linear(&self, from: usize, to: usize, device: &Device) -> Linear {
        LinearConfig::new(from, to).with_bias(false).init(device)
    }

    fn norm(&self, device: &Device) -> RmsNorm {
        RmsNormConfig::new(self.width)
            .with_epsilon(self.norm_epsilon)
            .init(device)
    }

    fn rotary(&self, device: &Device) -> RotaryEncoding {
        let rotary = RotaryEncodingConfig::new(self.positions, self.width / self.heads)
            .with_theta(self.rope_theta);
        match self.rope_scaling {
            Some(scaling) => rotary.init_with_frequency_scaling(|f| scaling.scaled(f), device),
            None => rotary.init(device),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let linear = |from, to| self.linear(from, to, device);
        let norm = || self.norm(device);
        let head = self.width / self.heads;
        Block {
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
        }
    }

    /// One block by itself.
    pub(crate) fn lone_block(&self, device: &Device) -> LoneBlock {
        LoneBlock {
            block: self.block(device),
            rotary: self.rotary(device),
        }
    }

    /// The model without blocks: embedding, the last norm and the head.
    pub(crate) fn ends(&self, device: &Device) -> Llama {
        Self { layers: 0, ..*self }.init(device)
    }

    pub(crate) fn init(&self, device: &Device) -> Llama {
        Llama {
            tok_embeddings: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(burn::nn::Initializer::Normal {
                    mean: 0.0,
                    std: 0.05,
                })
                .init(device),
            layers: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: self.norm(device),
            output: (self.own_head).then(|| self.linear(self.width, self.vocabulary, device)),
            rotary: self.rotary(device),
        }
    }
}

/// Every position sees itself and those before it: `count` of them after `start` others.
fn causal(count: usize, start: usize, device: &Device) -> Option<Tensor<2, Bool>> {
    (count > 1).then(|| Tensor::tril_mask([count, start + count], start as i64, device))
}

#[quantize_calls(crate = burn_lean::quant)]
impl Llama {
    /// Logits `[batch, positions, vocabulary]` of tokens `[batch, positions]`.
    pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.forward_cache(tokens, &mut Cache::default())
    }

    /// The same for tokens that follow those in `cache`.
    pub(crate) fn forward_cache(&self, tokens: Tensor<2, Int>, cache: &mut Cache) -> Tensor<3> {
        let format = cache.format;
        cache
            .blocks
            .resize_with(self.layers.len(), || KvCache::new(format));
        let [_, count] = tokens.dims();
        let start = cache.blocks.first().map_or(0, KvCache::positions);
        let mask = causal(count, start, &tokens.device());
        let mut x = self.embed(tokens);
        for (block, cache) in self.layers.iter().zip(&mut cache.blocks) {
            x = block.through(x, &self.rotary, mask.clone(), cache);
        }
        self.head(x)
    }

    /// What arrives at the first block, `[batch, positions, width]`.
    pub(crate) fn embed(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.tok_embeddings.forward(tokens)
    }

    /// Logits of what comes out of the last block.
    pub(crate) fn head(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.norm.forward(x);
        match &self.output {
            Some(head) => head.forward(x),
            None => x.matmul(self.tok_embeddings.weight.val().transpose().unsqueeze()),
        }
    }
}

impl LoneBlock {
    /// As [`Llama::map_rotated`].
    pub(crate) fn map_rotated(mut self, map: impl Fn(Tensor<2>, usize) -> Tensor<2>) -> Self {
        self.block.map_rotated(&map);
        self
    }
}

impl Llama {
    /// The linear layers that read rotated queries and keys, for checkpoints with another order.
    pub(crate) fn map_rotated(mut self, map: impl Fn(Tensor<2>, usize) -> Tensor<2>) -> Self {
        for block in &mut self.layers {
            block.map_rotated(&map);
        }
        self
    }
}

impl Block {
    fn map_rotated(&mut self, map: &impl Fn(Tensor<2>, usize) -> Tensor<2>) {
        let attention = &mut self.attention;
        let (heads, kv_heads) = (attention.heads, attention.kv_heads);
        for (layer, heads) in [(&mut attention.wq, heads), (&mut attention.wk, kv_heads)] {
            layer.weight = layer.weight.clone().map(|weight| map(weight, heads));
        }
    }

    fn through(
        &self,
        x: Tensor<3>,
        rotary: &RotaryEncoding,
        mask: Option<Tensor<2, Bool>>,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let normed = self.attention_norm.forward(x.clone());
        let x = x + self.attention.attend(normed, rotary, mask, cache);
        x.clone() + self.feed_forward.gated(self.ffn_norm.forward(x))
    }
}

/// Hugging Face rotates the first half of a head with the second, and weights here are in its order; Burn,
/// and Meta, rotate neighbours.
fn in_pairs(x: Tensor<4>) -> Tensor<4> {
    let [batch, heads, count, head] = x.dims();
    x.reshape([batch, heads, count, 2, head / 2])
        .swap_dims(3, 4)
        .reshape([batch, heads, count, head])
}

#[quantize_calls(crate = burn_lean::quant)]
impl Attention {
    fn attend(
        &self,
        x: Tensor<3>,
        rotary: &RotaryEncoding,
        mask: Option<Tensor<2, Bool>>,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        let [batch, count, _] = x.dims();
        let start = cache.positions();
        let split = |x: Tensor<3>, heads: usize| {
            let [_, _, width] = x.dims();
            x.reshape([batch, count, heads, width / heads])
                .swap_dims(1, 2)
        };
        let rotated = |x: Tensor<3>, heads| rotary.apply(in_pairs(split(x, heads)), start);
        let query = rotated(self.wq.forward(x.clone()), self.heads);
        let keys = rotated(self.wk.forward(x.clone()), self.kv_heads);
        let values = split(self.wv.forward(x), self.kv_heads);
        let (keys, values) = cache.extend(keys, values);
        let [_, _, _, head] = query.dims();
        let scores = query.matmul(self.repeated(keys).transpose()) / (head as f64).sqrt();
        let scores = match mask {
            Some(mask) => scores.mask_fill(mask.unsqueeze(), -1e9),
            None => scores,
        };
        let y = softmax(scores, 3).matmul(self.repeated(values));
        let y = y.swap_dims(1, 2).reshape([batch, count, self.heads * head]);
        self.wo.forward(y)
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

#[quantize_calls(crate = burn_lean::quant)]
impl FeedForward {
    fn gated(&self, x: Tensor<3>) -> Tensor<3> {
        self.w2
            .forward(silu(self.w1.forward(x.clone())) * self.w3.forward(x))
    }
}
