//! The network of most tests.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::ForwardQ;

use super::{values, with_numbers};

/// Two linear layers, a rectifier between them.
#[derive(Module, Debug)]
pub(crate) struct Perceptron {
    pub(crate) first: Linear,
    pub(crate) second: Linear,
}

impl Perceptron {
    /// Of so many inputs, hidden units and outputs, [`with_numbers`] of a seed.
    pub(crate) fn new([inputs, hidden, outputs]: [usize; 3], seed: u64, device: &Device) -> Self {
        let net = Self {
            first: LinearConfig::new(inputs, hidden).init(device),
            second: LinearConfig::new(hidden, outputs).init(device),
        };
        with_numbers(net, seed)
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(x)))
    }

    /// With the quantizers that it carries.
    pub(crate) fn forward_q(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward_q(relu(self.first.forward_q(x)))
    }

    /// The effective weights of both layers.
    pub(crate) fn weights(&self) -> Vec<f32> {
        [&self.first, &self.second]
            .map(|layer| values(layer.weight.val()))
            .concat()
    }

    /// How many of them are zero.
    pub(crate) fn zeros(&self) -> usize {
        self.weights().iter().filter(|w| **w == 0.0).count()
    }
}
