//! Emulated half precision.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::tensor::{FloatDType, Tensor};
use burn_lean::amp::{Autocast, AutocastConfig, Fallback};

use crate::support::{devices, values};

#[derive(Module, Debug)]
struct Vector {
    values: Param<Tensor<1>>,
}

#[test]
fn emulation_underflows_gradients_as_f16_does() {
    for target in devices() {
        let device = target.device.clone().autodiff();
        let model = Vector {
            values: Param::from_tensor(Tensor::ones([1], &device)),
        };
        let (model, autocast) = AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .prepare(model)
            .unwrap();
        for (factor, expected) in [(2f32.powi(-24), 2f32.powi(-24)), (2f32.powi(-26), 0.0)] {
            let loss = autocast.forward((), |()| model.values.val()).sum() * factor;
            let gradient = model.values.base().grad(&loss.backward()).unwrap();
            assert_eq!(values(gradient), [expected], "{}", target.name);
        }
    }
}

#[test]
fn an_emulated_run_overflows_where_f16_does() {
    for target in devices() {
        // What a GPU makes of a number beyond its range is its own.
        if target.is_gpu() && target.device.supports_dtype(FloatDType::F16) {
            continue;
        }
        let mut model = LinearConfig::new(1, 1)
            .with_bias(false)
            .init(&target.device);
        model.weight = Param::from_tensor(Tensor::full([1, 1], 300.0, &target.device));
        let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        // Products of 65,400, which is no number of F16, and of 65,700.
        let x = Tensor::<2>::from_floats([[218.0], [219.0], [-219.0]], &target.device);
        let y = autocast.run(&model, x, |model, x| model.forward(x));
        let expected = [65_408.0, f32::INFINITY, f32::NEG_INFINITY];
        assert_eq!(values(y.unwrap()), expected, "{}", target.name);
    }
}
