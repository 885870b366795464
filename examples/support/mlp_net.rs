//! The multilayer perceptron of the pruning example.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor};

/// Three linear layers without biases: the MLPNet of the pruning literature at 784-40-20-10.
#[derive(Module, Debug)]
pub(crate) struct MlpNet {
    fc1: Linear,
    fc2: Linear,
    fc3: Linear,
}

impl MlpNet {
    /// Fraction of the weights that are zero in the forward pass.
    pub(crate) fn zeros(&self) -> f64 {
        let weights = [&self.fc1, &self.fc2, &self.fc3].map(|layer| {
            let weight = layer.weight.val();
            match weight.dtype() {
                DType::QFloat(_) => weight.dequantize(),
                _ => weight,
            }
        });
        let weights = weights.map(|weight| weight.into_data());
        let all: usize = weights.iter().map(|weight| weight.num_elements()).sum();
        let zeros = weights.iter().flat_map(|weight| weight.iter::<f32>());
        zeros.filter(|weight| *weight == 0.0).count() as f64 / all as f64
    }
}

impl MlpNet {
    /// For images of `side` × `side`.
    pub(crate) fn new(side: usize, device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        Self {
            fc1: linear(side * side, 40),
            fc2: linear(40, 20),
            fc3: linear(20, 10),
        }
    }

    /// Images `[batch, 1, side, side]` to logits `[batch, 10]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.fc1.forward(images.flatten(1, 3)));
        self.fc3.forward(relu(self.fc2.forward(x)))
    }
}
