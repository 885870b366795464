//! The sequence-to-sequence model of the example, in plain Burn.

use burn::module::{Initializer, Module};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, Int, Tensor};

/// All weights begin uniformly within ± this.
const INIT: f64 = 0.05;

/// An encoder LSTM, a decoder LSTM that begins where it ends, and attention between the two.
#[derive(Module, Debug)]
pub(super) struct Translator {
    source: Embedding,
    target: Embedding,
    encoder: Lstm,
    decoder: Lstm,
    query: Linear,
    combine: Linear,
    output: Linear,
}

impl Translator {
    /// For `tokens` different tokens, with LSTMs of `hidden` features.
    pub(super) fn new(tokens: usize, hidden: usize, device: &Device) -> Self {
        let init = Initializer::Uniform {
            min: -INIT,
            max: INIT,
        };
        let embedding = |tokens| {
            EmbeddingConfig::new(tokens, hidden)
                .with_initializer(init.clone())
                .init(device)
        };
        let linear = |from, to| {
            LinearConfig::new(from, to)
                .with_initializer(init.clone())
                .init(device)
        };
        let lstm = || Lstm {
            input: linear(hidden, 4 * hidden),
            recurrent: linear(hidden, 4 * hidden),
        };
        Self {
            source: embedding(tokens),
            target: embedding(tokens + 1),
            encoder: lstm(),
            decoder: lstm(),
            query: linear(hidden, hidden),
            combine: linear(2 * hidden, hidden),
            output: linear(hidden, tokens),
        }
    }

    /// Tokens `[batch, length]`, twice, to logits `[batch · length, vocabulary]`.
    pub(super) fn forward(&self, source: Tensor<2, Int>, shifted: Tensor<2, Int>) -> Tensor<2> {
        let device = &source.device();
        let source = self.source.forward(source);
        let [n, _, hidden] = source.dims();
        // In the dtype of the region. `burn::nn::Lstm` begins with F32 zeros and so cannot run in
        // half precision; that is why this example has its own.
        let zeros = Tensor::zeros([n, hidden], (device, source.dtype()));
        let (encoded, state) = self.encoder.forward(source, [zeros.clone(), zeros]);
        let (decoded, _) = self.decoder.forward(self.target.forward(shifted), state);

        let scores = self
            .query
            .forward(decoded.clone())
            .matmul(encoded.clone().transpose())
            .div_scalar((hidden as f64).sqrt());
        let context = softmax(scores, 2).matmul(encoded);
        let combined = self
            .combine
            .forward(Tensor::cat(vec![decoded, context], 2))
            .tanh();
        self.output.forward(combined).flatten(0, 1)
    }
}

/// A long short-term memory of linear layers, which runs in any dtype.
#[derive(Module, Debug)]
struct Lstm {
    input: Linear,
    recurrent: Linear,
}

impl Lstm {
    /// Inputs `[batch, length, features]` and the state (hidden, cell), each `[batch, features]`,
    /// to all hidden states `[batch, length, features]` and the last state.
    fn forward(&self, inputs: Tensor<3>, state: [Tensor<2>; 2]) -> (Tensor<3>, [Tensor<2>; 2]) {
        let [mut hidden, mut cell] = state;
        let length = inputs.dims()[1];
        let inputs = self.input.forward(inputs);
        let mut all = Vec::with_capacity(length);
        for step in 0..length {
            let input: Tensor<2> = inputs.clone().narrow(1, step, 1).squeeze_dim(1);
            let gates = input + self.recurrent.forward(hidden);
            let [write, forget, read, new]: [Tensor<2>; 4] =
                gates.chunk(4, 1).try_into().expect("four gates");
            cell = sigmoid(forget) * cell + sigmoid(write) * new.tanh();
            hidden = sigmoid(read) * cell.clone().tanh();
            all.push(hidden.clone());
        }
        (Tensor::stack(all, 1), [hidden, cell])
    }
}
