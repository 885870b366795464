//! Where `Autocast::run` puts its casts.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, Fallback, autocast::AssignedOperation};

use crate::support::{each_device, tensor, with_numbers};

/// A norm, a cut at zero, a product; the input arrives over a residual sum, too.
#[derive(Module, Debug)]
struct Net {
    norm: BatchNorm,
    linear: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            norm: BatchNormConfig::new(6).init(device),
            linear: LinearConfig::new(6, 6).init(device),
        };
        with_numbers(net, 3)
    }

    /// Only the product reads what was cut.
    fn chain(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(relu(self.norm.forward(x)))
    }

    /// A sum reads it, too.
    fn residual(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.norm.forward(x));
        x.clone() + self.linear.forward(x)
    }
}

fn explain(device: &Device, forward: fn(&Net, Tensor<2>) -> Tensor<2>) -> Vec<AssignedOperation> {
    let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
    let model = Net::new(&device.clone().autodiff());
    let x = tensor::<2>(5, [7, 6], &device.clone().autodiff());
    autocast.explain(&model, x, forward).unwrap()
}

fn named<'a>(operations: &'a [AssignedOperation], name: &str) -> &'a AssignedOperation {
    let found = operations.iter().find(|operation| operation.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {operations:?}"))
}

#[test]
fn what_is_cut_off_on_its_way_to_a_product_is_half_before() {
    each_device(|target| {
        let operations = explain(&target.device, Net::chain);
        let cut = named(&operations, "relu");
        assert_eq!(cut.operands, Some(FloatDType::F16));
        assert_eq!(cut.result, Some(DType::F16));
    });
}

#[test]
fn what_a_sum_reads_too_stays_as_it_comes() {
    each_device(|target| {
        let operations = explain(&target.device, Net::residual);
        let cut = named(&operations, "relu");
        assert_eq!((cut.operands, cut.result), (None, Some(DType::F32)));
    });
}

#[test]
fn a_product_that_is_computed_in_f32_is_not_rounded_for_a_reader_in_f32() {
    let device = Device::flex();
    let operations = explain(&device, Net::chain);
    let product = named(&operations, "matmul");
    assert_eq!(product.operands, Some(FloatDType::F16));
    // The bias is a master weight.
    assert_eq!(product.result, Some(DType::F32));

    let autocast = Autocast::new(FloatDType::F16);
    let (a, b) = (1024.0_f32, 1.0_f32 / 1024.0);
    let x = Tensor::<2>::from_floats([[a, b]], &device);
    let model = with_numbers(LinearConfig::new(2, 1).init(&device), 1);
    let model = Linear {
        weight: model
            .weight
            .map(|_| Tensor::from_floats([[1.0], [1.0]], &device)),
        bias: model.bias.map(|bias| bias.map(|bias| bias.zeros_like())),
    };
    let y = autocast.run(&model, x, |model, x| model.forward(x));
    // F16 has no number between 1,024 and 1,025.
    assert_eq!(y.unwrap().into_scalar::<f32>(), a + b);
}
