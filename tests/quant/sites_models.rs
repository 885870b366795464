//! Models for the tests of quantization without edits: each forward pass once as it is, and once
//! with its calls edited.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput as PlainInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig,
    RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::quant::{qat::TransformerEncoderInput, quantize_calls};

/// What is trained: a loss from a batch, with plain calls and with edited ones.
pub(crate) trait Net: Module {
    type Batch: burn_lean::quant::Tensors + Clone;

    fn batch(seed: u64, device: &Device) -> Self::Batch;
    fn loss(&self, batch: Self::Batch) -> Tensor<1>;
    fn edited_loss(&self, batch: Self::Batch) -> Tensor<1>;
}

/// Convolutions with batch normalization and a residual sum.
#[derive(Module, Debug)]
pub(crate) struct ConvNet {
    pub(crate) first: Conv2d,
    pub(crate) first_norm: BatchNorm,
    pub(crate) second: Conv2d,
    pub(crate) second_norm: BatchNorm,
    pub(crate) head: Linear,
}

impl ConvNet {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([2, 4], [3, 3]).init(device),
            first_norm: BatchNormConfig::new(4).init(device),
            second: Conv2dConfig::new([4, 4], [1, 1]).init(device),
            second_norm: BatchNormConfig::new(4).init(device),
            head: LinearConfig::new(4, 3).init(device),
        }
    }

    pub(crate) fn logits(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.first_norm.forward(self.first.forward(x)));
        let y = self.second_norm.forward(self.second.forward(x.clone()));
        let y = relu(x + y).mean_dim(2).mean_dim(3);
        self.head.forward(y.flatten::<2>(1, 3))
    }
}

#[quantize_calls(crate = burn_lean::quant)]
impl ConvNet {
    fn edited_logits(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.first_norm.forward(self.first.forward(x)));
        let y = self.second_norm.forward(self.second.forward(x.clone()));
        let y = relu(x + y).mean_dim(2).mean_dim(3);
        self.head.forward(y.flatten::<2>(1, 3))
    }
}

impl Net for ConvNet {
    type Batch = Tensor<4>;

    fn batch(seed: u64, device: &Device) -> Tensor<4> {
        crate::support::tensor(seed, [6, 2, 5, 5], device)
    }

    fn loss(&self, batch: Tensor<4>) -> Tensor<1> {
        self.logits(batch).square().mean()
    }

    fn edited_loss(&self, batch: Tensor<4>) -> Tensor<1> {
        self.edited_logits(batch).square().mean()
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

    fn scores(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let (_, state) = self.lstm.forward(self.embedding.forward(tokens), None);
        self.head.forward(state.hidden)
    }
}

#[quantize_calls(crate = burn_lean::quant)]
impl Recurrent {
    fn edited_scores(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let (_, state) = self.lstm.forward(self.embedding.forward(tokens), None);
        self.head.forward(state.hidden)
    }
}

impl Net for Recurrent {
    type Batch = Tensor<2, Int>;

    fn batch(seed: u64, device: &Device) -> Tensor<2, Int> {
        let tokens = Tensor::<1, Int>::arange(0..24, device) * (seed as i64 + 3);
        tokens.remainder_scalar(7).reshape([4, 6])
    }

    fn loss(&self, batch: Tensor<2, Int>) -> Tensor<1> {
        self.scores(batch).square().mean()
    }

    fn edited_loss(&self, batch: Tensor<2, Int>) -> Tensor<1> {
        self.edited_scores(batch).square().mean()
    }
}

/// A transformer encoder.
#[derive(Module, Debug)]
pub(crate) struct Encoder {
    layers: TransformerEncoder,
    head: Linear,
}

impl Encoder {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            layers: TransformerEncoderConfig::new(8, 16, 2, 2)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(8, 3).init(device),
        }
    }
}

#[quantize_calls(crate = burn_lean::quant)]
impl Encoder {
    fn edited(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.layers.forward(TransformerEncoderInput::new(x));
        self.head.forward(x)
    }
}

impl Net for Encoder {
    type Batch = Tensor<3>;

    fn batch(seed: u64, device: &Device) -> Tensor<3> {
        crate::support::tensor(seed, [3, 5, 8], device)
    }

    fn loss(&self, batch: Tensor<3>) -> Tensor<1> {
        let x = self.layers.forward(PlainInput::new(batch));
        self.head.forward(x).square().mean()
    }

    fn edited_loss(&self, batch: Tensor<3>) -> Tensor<1> {
        self.edited(batch).square().mean()
    }
}

/// What somebody else wrote: nothing of it can be edited or named from outside.
pub(crate) mod elsewhere {
    use super::*;

    /// A head of attention with rotary positions, a residual sum, and a matrix of its own.
    #[derive(Module, Debug)]
    pub(crate) struct Block {
        norm: RmsNorm,
        rotary: RotaryEncoding,
        wq: Linear,
        wk: Linear,
        wv: Linear,
        mixing: Param<Tensor<2>>,
    }

    impl Block {
        pub(crate) fn new(device: &Device) -> Self {
            let layer = LinearConfig::new(8, 8).with_bias(false);
            Self {
                norm: RmsNormConfig::new(8).init(device),
                rotary: RotaryEncodingConfig::new(16, 8).init(device),
                wq: layer.init(device),
                wk: layer.init(device),
                wv: layer.init(device),
                mixing: Param::from_tensor(Tensor::ones([8, 8], device)),
            }
        }

        pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
            let y = self.norm.forward(x.clone());
            let q = self.rotary.forward(self.wq.forward(y.clone()));
            let k = self.rotary.forward(self.wk.forward(y.clone()));
            let v = self.wv.forward(y);
            let scores = q.matmul(k.swap_dims(1, 2)).div_scalar(8f32.sqrt());
            let context = softmax(scores, 2).matmul(v);
            // Stored `[out, in]`, as PyTorch does.
            let mixing = self.mixing.val().transpose().unsqueeze();
            x + context.matmul(mixing)
        }
    }
}

/// A model around a block of somebody else's.
#[derive(Module, Debug)]
pub(crate) struct Decoder {
    input: Linear,
    block: elsewhere::Block,
    head: Linear,
}

impl Decoder {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(4, 8).init(device),
            block: elsewhere::Block::new(device),
            head: LinearConfig::new(8, 3).init(device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.head.forward(self.block.forward(self.input.forward(x)))
    }

    pub(crate) fn batch(seed: u64, device: &Device) -> Tensor<3> {
        crate::support::tensor(seed, [2, 5, 4], device)
    }
}
