//! What runs in another precision because somebody says so: in the model, or by the name of an operation.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::{Autocast, Precision, full_precision};

use crate::model::Mlp;
use crate::run::emulating;
use crate::support::{farthest, on_tracked, tensor, values};

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
