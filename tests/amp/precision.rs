//! What runs in another precision because somebody says so: in the model, or by the name of an operation.

use burn::module::ParamGroup;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::{Autocast, Precision, full_precision};

use crate::model::Mlp;
use crate::run::emulating;
use crate::support::{farthest, on_tracked, tensor, values, with_numbers};

/// Angles as Llama's code makes them: a product that half precision has no digits for.
#[test]
fn full_precision_keeps_a_product_of_a_run_in_f32() {
    on_tracked(|device| {
        let model = Mlp::new(1, &device);
        let positions = Tensor::<1, Int>::arange(0..2500, &device)
            .float()
            .reshape([2500, 1]);
        let steps = Tensor::<2>::from_floats([[1.0, 0.3, 0.1]], &device);
        let forward = |model: &Mlp, (positions, steps): (Tensor<2>, Tensor<2>)| {
            let angles = full_precision((positions, steps), |(positions, steps)| {
                positions.matmul(steps)
            });
            let x = Tensor::cat(vec![angles.clone().sin(), angles.cos()], 1);
            model.forward(x)
        };
        let input = || (positions.clone(), steps.clone());
        let expected = forward(&model, input());
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let autocast = emulating(dtype);
            let found = autocast.run(&model, input(), forward).unwrap();
            let worst = farthest(&values(found), &values(expected.clone()));
            assert!(worst < 0.05, "{dtype:?}: {worst}");
            let operations = autocast.explain(&model, input(), forward).unwrap();
            let products: Vec<_> = operations
                .iter()
                .filter(|one| one.name == "matmul")
                .collect();
            let [first, others @ ..] = &products[..] else {
                panic!("{operations:?}");
            };
            assert_eq!(first.precision, Precision::Full);
            assert!(others.iter().all(|one| one.precision == Precision::Half));
        }
    });
}

/// A training pass has a softmax in parts.
#[test]
fn a_softmax_and_a_layer_norm_are_named_as_a_whole() {
    let device = Device::flex().autodiff();
    let model = Mlp::new(1, &device);
    let x = || tensor::<2>(5, [7, 6], &device);
    let forward = |model: &Mlp, x: Tensor<2>| softmax(model.forward(x), 1);
    let names = |autocast: &Autocast| -> Vec<(&'static str, Precision)> {
        let operations = autocast.explain(&model, x(), forward).unwrap();
        let after = operations.iter().rev().map(|one| (one.name, one.precision));
        after.take_while(|(name, _)| *name != "add").collect()
    };
    let listed = names(&Autocast::new(FloatDType::BF16));
    assert!(listed.len() > 1, "{listed:?}");
    assert!(
        listed
            .iter()
            .all(|(_, precision)| *precision == Precision::Full),
        "{listed:?}"
    );
    let chosen = Autocast::new(FloatDType::BF16).with_operation("softmax", Precision::Half);
    let found = names(&chosen);
    assert!(
        found
            .iter()
            .all(|(_, precision)| *precision == Precision::Half),
        "{found:?}"
    );
}

/// A difference quotient shows each digit that the backward pass does not have of what goes into `tanh`.
#[test]
fn exceptions_to_f32_give_the_gradients_of_f32() {
    on_tracked(|device| {
        let model = with_numbers(LinearConfig::new(6, 6).init(&device), 2);
        let slope = |model: &Linear, x: Tensor<2>| {
            let at =
                |x: Tensor<2>| model.forward(x.clone()).tanh() + sigmoid(model.forward(x) * 2.0);
            let difference = at(x.clone() + 0.01) - at(x - 0.01);
            (difference * 50.0).square().mean()
        };
        let x = || tensor::<2>(5, [7, 6], &device);
        let gradient = |loss: Tensor<1>| values(model.weight.grad(&loss.backward()).unwrap());
        let expected = gradient(slope(&model, x()));
        let largest = expected.iter().fold(0f32, |most, one| most.max(one.abs()));
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let mut by_name = emulating(dtype);
            for operation in by_name.explain(&model, x(), slope).unwrap() {
                by_name = by_name.with_operation(operation.name, Precision::Full);
            }
            let by_module = emulating(dtype).with_module(ParamGroup::all(), Precision::Full);
            for autocast in [by_name, by_module] {
                let found = gradient(autocast.run(&model, x(), slope).unwrap());
                let worst = farthest(&found, &expected) / largest;
                assert!(worst < 2e-4, "{dtype:?}: {worst}");
            }
        }
    });
}

/// A device that computes in half rounds 0.9999 to 1: of what is clamped there, the arccosine has no gradient.
#[test]
fn bounds_that_half_does_not_have_are_bounds_in_f32() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let model = LinearConfig::new(6, 6).with_bias(false).init(&device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            // What is read and returned in half, but for these operations.
            let of = |forward: fn(Tensor<2>) -> Tensor<2>| {
                let x = tensor::<2>(5, [7, 6], &device);
                let explained = Autocast::new(dtype)
                    .explain(&model, x, |model: &Linear, x| forward(model.forward(x)));
                let operations = explained.unwrap().into_iter();
                let own = operations.filter(|one| {
                    one.name.starts_with("clamp")
                        || one.name.ends_with("_elem")
                        || one.name == "mask_fill"
                });
                own.map(|one| one.precision).collect::<Vec<_>>()
            };
            let all = |found: Vec<Precision>, expected: Precision| {
                assert!(!found.is_empty());
                assert!(
                    found.iter().all(|one| *one == expected),
                    "{dtype:?}, {expected:?}: {found:?}"
                );
            };
            all(of(|x| x.clamp(-0.9999, 0.9999)), Precision::Full);
            all(of(|x| x.clamp_min(1e-3)), Precision::Full);
            all(of(|x| x.clamp_max(0.3)), Precision::Full);
            all(
                of(|x| x.clone().mask_fill(x.lower_elem(0.9999), 0.3)),
                Precision::Full,
            );
            all(of(|x| x.clamp(-3.0, 6.0)), Precision::Widest);
            all(of(|x| x.clamp_min(0.5)), Precision::Widest);
            all(
                of(|x| x.clone().mask_fill(x.equal_elem(0.0), f32::NEG_INFINITY)),
                Precision::Widest,
            );
            all(
                of(|x| x.clone().mask_fill(x.greater_elem(0.0), -1e4)),
                Precision::Widest,
            );
        }
    }
}
