//! The network of the random configurations.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

use crate::hostile::Kind;

/// Three layers, `[n, 8]` to `[n, 4]`.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) layers: Vec<Linear>,
}

impl Net {
    /// With weights of this kind.
    pub(crate) fn of(kind: Kind, seed: u64, device: &Device) -> Self {
        let layer = |index: u64, [from, to]: [usize; 2]| {
            let mut linear = LinearConfig::new(from, to).init(device);
            let value = kind.tensor::<2>(seed + 10 + index, [from, to], device);
            linear.weight = Param::from_tensor(value);
            let bias = Kind::Ordinary.tensor::<1>(seed + 20 + index, [to], device);
            linear.bias = Some(Param::from_tensor(bias));
            linear
        };
        Self {
            layers: vec![layer(0, [8, 12]), layer(1, [12, 6]), layer(2, [6, 4])],
        }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (last, before) = self.layers.split_last().expect("three layers");
        let x = before.iter().fold(x, |x, layer| relu(layer.forward(x)));
        last.forward(x)
    }
}
