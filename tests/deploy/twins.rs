//! Layers whose codes are equal and whose scales are not.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{
    ActivationQuantization, Arithmetic, Backend, DynamicGrid, EngineConfig, Export, Quantization,
};
use burn_lean::quant::NumberFormat;

use crate::engine::{GRID, codes};
use crate::support::{tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Twins {
    a: Linear,
    b: Linear,
}

impl Twins {
    /// The weights of the second are twice those of the first.
    fn new(inputs: usize, outputs: usize, device: &Device) -> Self {
        let config = LinearConfig::new(inputs, outputs).with_bias(false);
        let a: Linear = with_numbers(config.init(device), 3);
        let mut b = config.init(device);
        b.weight = Param::from_tensor(a.weight.val() * 2.0);
        Self { a, b }
    }

    fn forward(&self, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        (self.a.forward(x.clone()), self.b.forward(x))
    }
}

/// So few codes that a file could hold them once.
#[test]
fn two_layers_of_the_same_codes_keep_their_own_scales() {
    let device = Device::flex();
    let own = EngineConfig::new()
        .with_arithmetic(Arithmetic::Integer)
        .with_backend(Some(Backend::Own));
    for (inputs, outputs) in [(8, 8), (1, 16)] {
        let model = Twins::new(inputs, outputs, &device);
        let [a, b] = [&model.a, &model.b]
            .map(|layer| codes(&layer.weight.val(), NumberFormat::int8().narrow()));
        assert_eq!(a.codes(), b.codes());
        let x = tensor::<2>(4, [3, inputs], &device);
        for how in [
            None,
            Some(ActivationQuantization::Static(GRID)),
            Some(ActivationQuantization::Dynamic(DynamicGrid::uint8())),
        ] {
            let mut quantization = Quantization::none()
                .with_weight("a.weight", a.clone())
                .with_weight("b.weight", b.clone());
            for path in ["a.weight", "b.weight"] {
                if let Some(how) = how {
                    quantization = quantization.with_input(path, how);
                }
            }
            let export = Export::record(&model, &x, Twins::forward).unwrap();
            let engine = own.compile(export.with_quantization(quantization));
            let (of_a, of_b) = engine.unwrap().run(&x).unwrap();
            assert_eq!(values(of_b), values(of_a * 2.0), "{inputs} {how:?}");
        }
    }
}
