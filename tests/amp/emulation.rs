//! Emulated half precision.

use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_lean::amp::{AutocastConfig, Fallback};

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
