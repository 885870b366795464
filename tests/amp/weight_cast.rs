//! A trained weight is cast once in a region, whatever happens there.

use burn::backend::TensorMetadata;
use burn::module::{Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{Autocast, AutocastConfig, Fallback, TensorMapper, Tensors, full_precision};

use crate::support::{each_device, values};

#[derive(Module, Debug)]
struct Vector {
    weight: Param<Tensor<1>>,
}

fn prepared(value: f32, dtype: FloatDType, device: &Device) -> (Vector, Autocast) {
    let weight = Tensor::full([1], value, &device.clone().autodiff());
    let model = Vector {
        weight: Param::from_tensor(weight),
    };
    AutocastConfig::new(dtype)
        .with_fallback(Fallback::Emulate)
        .prepare(model)
        .unwrap()
}

/// The gradient of the loss for the weight.
fn gradient(model: &Vector, loss: Tensor<1>) -> f32 {
    let gradient = model.weight.base().grad(&loss.backward()).unwrap();
    assert_eq!(gradient.dtype(), DType::F32);
    values(gradient)[0]
}

/// Whether nothing else holds the numbers of this tensor.
fn is_alone(tensor: Tensor<1>) -> bool {
    tensor.into_dispatch().can_mut()
}

#[test]
fn all_uses_in_a_region_share_one_copy() {
    each_device(|target| {
        // The others do not tell, or not at once, who else holds a tensor.
        if target.name != "flex" {
            return;
        }
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let (model, autocast) = prepared(1.0, dtype, &target.device);
            let uses = || {
                autocast.forward((), |()| {
                    let first = model.weight.val();
                    // Not in the way: other regions inside.
                    full_precision((), |()| assert_eq!(model.weight.val().dtype(), DType::F32));
                    let Escaped(second) = autocast.forward((), |()| Escaped(model.weight.val()));
                    // Out of the region as they are: a cast back would copy the numbers.
                    (Escaped(first), Escaped(second))
                })
            };
            let (Escaped(first), _second) = uses();
            assert!(!is_alone(first), "{dtype:?}");
            // And the region itself keeps none when it has ended.
            let (Escaped(first), second) = uses();
            drop(second);
            assert!(is_alone(first), "{dtype:?}");
            let (Escaped(first), _) = (uses().0, uses().1);
            assert!(is_alone(first), "{dtype:?}");
        }
    });
}

/// A tensor that leaves a region without a cast.
struct Escaped(Tensor<1>);

impl Tensors for Escaped {
    fn map_tensors<T: TensorMapper>(&self, _mapper: &mut T) -> Self {
        Self(self.0.clone())
    }
}

#[test]
fn the_gradients_of_all_uses_are_summed_in_f32() {
    // The sums are no numbers of F16 or BF16.
    for (dtype, large, small) in [
        (FloatDType::F16, 2048.0, 1.0),
        (FloatDType::F16, 40_000.0, 40_000.0),
        (FloatDType::F16, 30_000.0, 1.0),
        (FloatDType::BF16, 256.0, 1.0),
        (FloatDType::F32, 2048.0, 1.0),
    ] {
        each_device(|target| {
            let (model, autocast) = prepared(1.0, dtype, &target.device);
            let weights = autocast.forward((), |()| (model.weight.val(), model.weight.val()));
            let found = gradient(&model, weights.0 * large + weights.1 * small);
            assert_eq!(found, large + small, "{dtype:?}");
        });
    }
}

#[test]
fn steps_inside_of_a_region_use_the_new_weight() {
    each_device(|target| {
        let (mut model, autocast) = prepared(1.0, FloatDType::F16, &target.device);
        let mut optim = SgdConfig::new().init();
        let seen = autocast.forward((), |()| {
            let mut seen = Vec::new();
            for _ in 0..3 {
                let weight = model.weight.val();
                seen.extend(values(weight.clone()));
                let loss = full_precision(weight, |weight| weight);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = optim.step(0.25, model.clone(), grads);
            }
            seen
        });
        assert_eq!(seen, [1.0, 0.75, 0.5]);
    });
}

#[test]
fn a_second_backward_pass_inside_of_a_region_is_possible() {
    each_device(|target| {
        let (model, autocast) = prepared(1.0, FloatDType::F16, &target.device);
        autocast.forward((), |()| {
            for factor in [3.0, 5.0] {
                let loss = full_precision(model.weight.val() * factor, |loss| loss);
                assert_eq!(gradient(&model, loss), factor);
            }
        });
    });
}

#[test]
fn clones_with_other_values_are_not_mixed_up() {
    each_device(|target| {
        let (model, autocast) = prepared(1.0, FloatDType::F16, &target.device);
        let mut average = model.clone();
        average.weight = average
            .weight
            .map(|weight| (weight * 4.0).detach().require_grad());
        assert_eq!(average.weight.id, model.weight.id);
        let (a, b) = autocast.forward((), |()| (model.weight.val(), average.weight.val()));
        assert_eq!(values(a), [1.0]);
        assert_eq!(values(b), [4.0]);
    });
}

#[test]
fn a_half_model_computes_what_the_prepared_one_does_without_a_cast() {
    use crate::model::{Mlp, bits};
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let config = AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        let prepare = |seed| config.prepare(Mlp::new(seed, &device)).unwrap();
        let (model, autocast) = prepare(1);
        let before = bits(&model);
        let x = crate::support::tensor::<2>(3, [2, 6], &target.device);
        let expected = autocast.forward(x.clone(), |x| model.valid().forward(x));

        let (shipped, _) = config.materialize_half(model.clone()).unwrap();
        let half = match autocast.is_emulated() {
            true => DType::F32,
            false => DType::F16,
        };
        assert_eq!(shipped.first.weight.base().dtype(), half);
        assert!(burn_lean::reparam::attached(&shipped).is_empty());
        let found = autocast.forward(x.clone(), |x| shipped.forward(x));
        assert_eq!(values(found), values(expected.clone()));
        assert_eq!(bits(&model), before);

        // And by its record, or by that of the master weights.
        for record in [shipped.into_record(), model.clone().into_record()] {
            let (other, autocast) = prepare(2);
            let (loaded, _) = config.materialize_half(other).unwrap();
            let loaded = loaded.try_load_record(record).unwrap();
            assert_eq!(loaded.first.weight.base().dtype(), half);
            if !autocast.is_emulated() {
                let found = autocast.forward(x.clone(), |x| loaded.forward(x));
                assert_eq!(values(found), values(expected.clone()));
            }
        }
    });
}
