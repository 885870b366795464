//! Models for these tests: what people train, without an edit.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear,
    LinearConfig, Lstm, LstmConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Device, Int, Tensor};

/// Two convolutions with batch normalization, a residual sum, a head.
#[derive(Module, Debug)]
pub(crate) struct ConvNet {
    first: Conv2d,
    first_norm: BatchNorm,
    second: Conv2d,
    second_norm: BatchNorm,
    dropout: Dropout,
    head: Linear,
}

impl ConvNet {
    pub(crate) fn new(device: &Device) -> Self {
        Self::with_dropout(0.0, device)
    }

    pub(crate) fn with_dropout(dropout: f64, device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([2, 4], [3, 3]).init(device),
            first_norm: BatchNormConfig::new(4).init(device),
            second: Conv2dConfig::new([4, 4], [1, 1]).init(device),
            second_norm: BatchNormConfig::new(4).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            head: LinearConfig::new(4, 3).init(device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.first_norm.forward(self.first.forward(x)));
        let y = self.second_norm.forward(self.second.forward(x.clone()));
        let y = relu(x + y).mean_dim(2).mean_dim(3);
        let y = self.dropout.forward(y.flatten::<2>(1, 3));
        self.head.forward(y)
    }

    pub(crate) fn loss(&self, (x, targets): (Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        cross_entropy(self.forward(x), targets)
    }

    pub(crate) fn batch(device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
        (
            super::support::tensor(3, [6, 2, 5, 5], device),
            classes(6, device),
        )
    }
}

/// Tokens into an LSTM into a head.
#[derive(Module, Debug)]
pub(crate) struct Recurrent {
    embedding: Embedding,
    lstm: Lstm,
    head: Linear,
}

impl Recurrent {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(7, 5).init(device),
            lstm: LstmConfig::new(5, 6, true).init(device),
            head: LinearConfig::new(6, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, (tokens, targets): (Tensor<2, Int>, Tensor<1, Int>)) -> Tensor<1> {
        let (_, state) = self.lstm.forward(self.embedding.forward(tokens), None);
        cross_entropy(self.head.forward(state.hidden), targets)
    }

    pub(crate) fn batch(device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
        let tokens = Tensor::<1, Int>::arange(0..24, device).remainder_scalar(7);
        (tokens.reshape([4, 6]), classes(4, device))
    }
}

/// A decoder block with rotary positions, as large language models have it.
#[derive(Module, Debug)]
pub(crate) struct Decoder {
    embedding: Embedding,
    norm: RmsNorm,
    rotary: RotaryEncoding,
    attention: MultiHeadAttention,
    up: Linear,
    head: Linear,
}

impl Decoder {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(7, 8).init(device),
            norm: RmsNormConfig::new(8).init(device),
            rotary: RotaryEncodingConfig::new(16, 8).init(device),
            attention: MultiHeadAttentionConfig::new(8, 2)
                .with_dropout(0.0)
                .init(device),
            up: LinearConfig::new(8, 8).init(device),
            head: LinearConfig::new(8, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, (tokens, targets): (Tensor<2, Int>, Tensor<1, Int>)) -> Tensor<1> {
        let x = self.rotary.forward(self.embedding.forward(tokens));
        let y = self.norm.forward(x.clone());
        let x = x + self.attention.forward(MhaInput::self_attn(y)).context;
        let x = x.clone() + gelu(self.up.forward(x));
        let [batch, _, width] = x.dims();
        let last = x.slice_dim(1, 5..6).reshape([batch, width]);
        cross_entropy(self.head.forward(last), targets)
    }
}

pub(crate) fn classes(count: i64, device: &Device) -> Tensor<1, Int> {
    Tensor::arange(0..count, device).remainder_scalar(3)
}

pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits, targets)
}
