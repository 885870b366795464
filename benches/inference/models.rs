//! The models of the table. Only those that are prepared for quantization notice the attributes; ResNet8 has
//! none.

use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::amp::full_precision;
use burn_lean::quant::{
    ForwardQ, QuantError, QuantizedForward, qat::TransformerEncoderInput, quantize_calls,
};

use crate::Deployed;
use crate::harness::ConvNet;
use crate::support::ResNet8;

/// Square layers of a width with ReLU between them.
#[derive(Module, Debug)]
pub(crate) struct Mlp<const WIDTH: usize> {
    layers: Vec<Linear>,
}

impl<const WIDTH: usize> Mlp<WIDTH> {
    pub(crate) fn new(layers: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            layers: (0..layers).map(layer).collect(),
        }
    }
}

impl<const WIDTH: usize> Deployed for Mlp<WIDTH> {
    const SAMPLE: [usize; 3] = [1, 1, WIDTH];
    const BATCHES: &[usize] = match WIDTH {
        4096 => &[1, 32, 256],
        _ => &[1, 32],
    };

    fn run(&self, x: Tensor<4>) -> Tensor<2> {
        let mut x = x.flatten::<2>(1, 3);
        for (index, layer) in self.layers.iter().enumerate() {
            if index > 0 {
                x = relu(x);
            }
            x = layer.forward_q(x);
        }
        x
    }
}

/// Two layers of a transformer encoder of width 128, on 32 tokens.
#[derive(Module, Debug)]
pub(crate) struct Encoder {
    encoder: TransformerEncoder,
    head: Linear,
}

#[quantize_calls(crate = burn_lean::quant)]
impl Encoder {
    pub(crate) fn new(device: &Device) -> Self {
        let config = TransformerEncoderConfig::new(128, 512, 4, 2).with_dropout(0.0);
        Self {
            encoder: config.init(device),
            head: LinearConfig::new(128, 10).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let [batch, _, width] = x.dims();
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        self.head.forward(x.mean_dim(1).reshape([batch, width]))
    }
}

impl Deployed for Encoder {
    const SAMPLE: [usize; 3] = [1, 32, 128];

    fn run(&self, x: Tensor<4>) -> Tensor<2> {
        self.forward(x.flatten(1, 2))
    }
}

/// An LSTM of 128 units on 20 steps.
#[derive(Module, Debug)]
pub(crate) struct Recurrent {
    lstm: Lstm,
    head: Linear,
}

#[quantize_calls(crate = burn_lean::quant)]
impl Recurrent {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            lstm: LstmConfig::new(64, 128, true).init(device),
            head: LinearConfig::new(128, 10).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let hidden = full_precision(x, |x| {
            let (_, state) = self.lstm.forward(x, None);
            state.hidden
        });
        self.head.forward(hidden)
    }
}

impl Deployed for Recurrent {
    const SAMPLE: [usize; 3] = [1, 20, 64];

    fn run(&self, x: Tensor<4>) -> Tensor<2> {
        self.forward(x.flatten(1, 2))
    }
}

impl Deployed for ConvNet {
    const SAMPLE: [usize; 3] = [3, 32, 32];

    fn run(&self, x: Tensor<4>) -> Tensor<2> {
        self.forward(x)
    }
}

impl Deployed for ResNet8 {
    const SAMPLE: [usize; 3] = [3, 32, 32];
    const CALLS_QUANTIZERS: bool = false;

    fn run(&self, x: Tensor<4>) -> Tensor<2> {
        self.forward(x)
    }

    /// Nothing in it knows of quantization.
    fn quantized(
        &self,
        recorded: &QuantizedForward,
        x: Tensor<4>,
    ) -> Result<Tensor<2>, QuantError> {
        recorded.run(self, x, |model, x| model.forward(x))
    }
}
