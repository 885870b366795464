//! `Autocast::run` at its edges: exceptions from its lists, models of nothing.

use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Bool, FloatDType, Int, Tensor};
use burn_lean::amp::{AmpError, GraphError, Precision};

use crate::run::emulating;
use crate::support::{each_device, on_tracked, values};

/// Half precision in the operations that it can be asked for.
#[test]
fn a_dropout_may_run_in_half_and_has_its_gradients() {
    on_tracked(|device| {
        let model = (
            LinearConfig::new(4, 4).with_bias(false).init(&device),
            DropoutConfig::new(0.5).init(),
        );
        let x = Tensor::<2>::ones([3, 4], &device);
        let autocast = emulating(FloatDType::F16).with_operation("mul", Precision::Half);
        let y = autocast.run(&model, x, |(linear, dropout), x| {
            let y = linear.forward(x);
            (y.clone(), dropout.forward(y))
        });
        let (y, dropped) = y.unwrap();
        // The derivative of a sum of what is 0 or twice as large, to the sum over the inputs of ones.
        let grads = dropped.clone().sum().backward();
        let gradient = values(model.0.weight.grad(&grads).unwrap());
        let (y, dropped) = (values(y), values(dropped));
        for column in 0..4 {
            let kept = (0..3)
                .filter(|row| dropped[4 * row + column] != 0.0)
                .count();
            for row in 0..4 {
                let found = gradient[4 * row + column];
                assert_eq!(found, 2.0 * kept as f32);
            }
        }
        for (y, dropped) in y.iter().zip(dropped) {
            assert!(
                dropped == 0.0 || (dropped - 2.0 * y).abs() < 4e-3,
                "{y}, {dropped}"
            );
        }
    });
}

#[test]
fn a_function_without_parameters_runs_where_its_input_is() {
    each_device(|target| {
        let x = Tensor::<2>::ones([2, 2], &target.device) * 3.0;
        let autocast = emulating(FloatDType::F16);
        let square = |_: &Dropout, x: Tensor<2>| x.clone().matmul(x);
        let dropout = DropoutConfig::new(0.5).init();
        let y = autocast.run(&dropout, x.clone(), square).unwrap();
        assert_eq!(values(y), [18.0; 4]);
        let operations = autocast.explain(&dropout, x, square).unwrap();
        assert_eq!(operations[0].operands, Some(FloatDType::F16));
        // Nothing says where.
        let nothing = autocast.run(&dropout, (), |_, ()| ()).unwrap_err();
        assert_eq!(nothing, AmpError::Graph(GraphError::NoDevice));
        // A region has no device either; it helps where a value is read.
        assert!(!nothing.to_string().contains("AutocastConfig::prepare"));
        let reads = autocast
            .run(
                &dropout,
                Tensor::<2>::ones([2, 2], &target.device),
                |_, x| x.into_scalar::<f32>().to_string(),
            )
            .unwrap_err();
        let region = "`AutocastConfig::prepare` and `Autocast::forward` do without a recording";
        assert!(reads.to_string().ends_with(region), "{reads}");
    });
}

/// BF16 has no `f32::MIN`, with which masks are filled: it would round to an infinity.
#[test]
fn a_mask_filled_with_the_lowest_number_stays_finite() {
    on_tracked(|device| {
        let model = LinearConfig::new(4, 3).with_bias(false).init(&device);
        let x = Tensor::<2>::ones([2, 4], &device);
        let mask = Tensor::<2, Int>::from_data([[0, 0, 1], [0, 1, 0]], &device).equal_elem(1);
        let entropy = |model: &Linear, (x, mask): (Tensor<2>, Tensor<2, Bool>)| {
            let logits = model.forward(x).mask_fill(mask, f32::MIN);
            let log = log_softmax(logits.clone(), 1);
            (logits, (log.clone().exp() * log).sum_dim(1))
        };
        let expected = values(entropy(&model, (x.clone(), mask.clone())).1);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let run = emulating(dtype).run(&model, (x.clone(), mask.clone()), entropy);
            let (logits, found) = run.unwrap();
            assert!(values(logits).iter().all(|value| value.is_finite()));
            for (found, expected) in values(found).iter().zip(&expected) {
                assert!((found - expected).abs() < 0.02, "{found} {expected}");
            }
        }
    });
}
