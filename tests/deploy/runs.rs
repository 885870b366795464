//! A forward pass that runs itself in mixed precision or with its quantizers, as a training step does.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, Fallback};
use burn_lean::deploy::{Arithmetic, EngineConfig, Export, Form};
use burn_lean::quant::{QatConfig, QuantizedForward};

use crate::judge::{close, operators};
use crate::support::{on_each, tensor, with_numbers};

fn linear(device: &Device) -> Linear {
    with_numbers(LinearConfig::new(4, 3).init(device), 1)
}

/// Both have the same operators, and give the same numbers.
fn same(export: Export<Tensor<2>>, plain: Export<Tensor<2>>, x: &Tensor<2>) {
    let [found, expected] = [&export, &plain].map(|one| one.to_onnx(Form::Qdq).unwrap());
    assert_eq!(operators(&found), operators(&expected));
    let [found, expected] = [export, plain].map(|one| {
        // The faster one of products in integers and in floats, which do not round inputs, may be either.
        let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let engine = config.compile(one).unwrap();
        engine.run(x).unwrap()
    });
    close(found, expected);
}

#[test]
fn a_pass_in_mixed_precision_is_exported_as_the_plain_one() {
    on_each(|device| {
        let (model, x) = (linear(device), tensor::<2>(2, [5, 4], device));
        let autocast = Autocast::new(FloatDType::BF16).with_fallback(Fallback::Emulate);
        let export = Export::record(&model, &x, |model: &Linear, x| {
            let y = autocast.run(model, x, |model, x| model.forward(x));
            y.unwrap()
        });
        let plain = Export::record(&model, &x, |model: &Linear, x| model.forward(x));
        same(export.unwrap(), plain.unwrap(), &x);
    });
}

#[test]
fn a_pass_with_quantizers_is_exported_with_them() {
    on_each(|device| {
        let (model, x) = (linear(device), tensor::<2>(2, [5, 4], device));
        let model = QatConfig::new().prepare(model).unwrap();
        let quantized = QuantizedForward::new();
        let model = quantized
            .calibrate(model, [x.clone()], |model, x| model.forward(x))
            .unwrap();
        let export = Export::record(&model, &x, |model: &Linear, x| {
            let y = quantized.run(model, x, |model, x| model.forward(x));
            y.unwrap()
        });
        let plain = Export::record(&model, &x, |model: &Linear, x| model.forward(x)).unwrap();
        let written = plain.to_onnx(Form::Qdq).unwrap();
        assert!(operators(&written).contains(&"QuantizeLinear"));
        same(export.unwrap(), plain, &x);
    });
}
