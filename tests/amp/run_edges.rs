//! `Autocast::run` at its edges: exceptions from its lists, models of nothing.

use burn::module::Initializer;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::module::attention;
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
        // Nor does it help where the pass would fail anyway.
        let x = Tensor::<2>::ones([2, 2], &target.device);
        let fails = autocast.run(&dropout, x, |_, x| x.reshape([3, 5]));
        let fails = fails.unwrap_err();
        assert_matches!(fails, AmpError::Graph(GraphError::Forward { .. }));
        assert!(!fails.to_string().contains("AutocastConfig::prepare"));
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

/// Burn composes it of a quotient that is rounded to a whole number: 2,858 of 2,857.14 in F16, an infinity of 81,081.
#[test]
fn a_remainder_is_smaller_than_its_divisor() {
    on_tracked(|device| {
        let config = LinearConfig::new(1, 1).with_bias(false);
        let model: Linear = config.with_initializer(Initializer::Ones).init(&device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            for (x, divisor) in [(2000f32, 0.7f32), (30_000.0, 0.37)] {
                let x = Tensor::<2>::full([1, 1], x, &device);
                let found = emulating(dtype).run(&model, x, move |model: &Linear, x| {
                    let x = model.forward(x);
                    let y = x.clone().remainder_scalar(divisor);
                    (x.fmod_scalar(divisor), y)
                });
                let (truncated, floored) = found.unwrap();
                for y in [values(truncated)[0], values(floored)[0]] {
                    assert!((0.0..divisor).contains(&y), "{dtype:?}, {divisor}: {y}");
                }
            }
        }
    });
}

/// As in F32, where a row of finite logits has no place to look at that is better than others.
#[test]
fn an_attention_that_a_finite_bias_masks_everywhere_averages() {
    each_device(|target| {
        let device = &target.device;
        let model = LinearConfig::new(1, 1).init(device);
        let query = Tensor::<4>::ones([1, 1, 1, 4], device);
        // Logits of -40.
        let key = Tensor::<4>::full([1, 1, 2, 4], -20.0, device);
        let value = Tensor::<4>::from_floats([[[[1.0; 4], [3.0; 4]]]], device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            for (bias, expected) in [
                ([-1e9, -1e9], 2f32),
                ([f32::MIN, f32::MIN], 2.0),
                ([0.0, f32::MIN], 1.0),
                ([f32::NEG_INFINITY, 0.0], 3.0),
            ] {
                // As it is, and cut out of a longer one.
                let bare = Tensor::<4>::from_floats([[[bias]]], device);
                let longer = Tensor::cat(vec![bare.clone(), bare.clone()], 3);
                for of_keys in [bare, longer] {
                    let input = (query.clone(), key.clone(), value.clone(), of_keys);
                    let found =
                        emulating(dtype).run(&model, input, |_: &Linear, (q, k, v, bias)| {
                            let bias = match bias.dims()[3] {
                                2 => bias,
                                _ => bias.slice([0..1, 0..1, 0..1, 0..2]),
                            };
                            attention(q, k, v, None, Some(bias), Default::default())
                        });
                    assert_eq!(values(found.unwrap()), [expected; 4], "{dtype:?}, {bias:?}");
                }
            }
        }
    });
}
