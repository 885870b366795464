//! What `Autocast::run` remembers of forward passes: which gradients they stop, and recordings.

use std::cell::Cell;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{AmpError, Autocast, Fallback, GraphError, calibrate_scale, materialize_half};

use crate::model::Mlp;
use crate::support::{each_device, on_tracked, tensor, values, with_numbers};

fn is_stopped(error: &AmpError) -> bool {
    matches!(error, AmpError::Graph(GraphError::StopsGradients { .. }))
}

#[test]
fn a_detach_behind_a_flag_of_the_input_is_seen_where_the_flag_changes() {
    let device = Device::flex().autodiff();
    let model = Mlp::new(1, &device);
    let autocast = Autocast::new(FloatDType::BF16);
    let x = || tensor::<2>(5, [7, 6], &device);
    let backbone = |freeze: bool| {
        autocast.run(&model, (x(), freeze), |model, (x, freeze)| {
            let h = model.first.forward(x);
            let h = if freeze { h.detach() } else { h };
            model.second.forward(h).sum()
        })
    };
    assert!(backbone(false).is_ok());
    let error = backbone(true).unwrap_err();
    assert!(is_stopped(&error), "{error}");
    assert!(backbone(false).is_ok());
    for detached in [true, false, true, false] {
        let y = autocast.run(&model, (x(), detached), |model, (x, detached)| {
            let y = model.forward(x);
            if detached { y.detach() } else { y }
        });
        assert_eq!(y.unwrap().is_tracked(), !detached);
    }
}

/// Two layers, the first of which may be cut off.
#[derive(Module, Debug)]
struct Cut {
    first: Linear,
    second: Linear,
    #[module(skip)]
    is_cut: bool,
}

#[test]
fn a_detach_of_a_second_model_at_the_same_place_is_seen() {
    on_tracked(|device| {
        let autocast = Autocast::new(FloatDType::BF16).with_fallback(Fallback::Emulate);
        for is_cut in [false, true, false] {
            let linear = || LinearConfig::new(3, 3).init(&device);
            let model = Cut {
                first: linear(),
                second: linear(),
                is_cut,
            };
            let x = tensor::<2>(5, [4, 3], &device);
            let loss = autocast.run(&with_numbers(model, 1), x, |model, x| {
                let h = model.first.forward(x);
                let h = if model.is_cut { h.detach() } else { h };
                model.second.forward(h).square().mean()
            });
            assert_eq!(loss.is_err_and(|error| is_stopped(&error)), is_cut);
        }
    });
}

/// A head that is run on the features of an encoder outside, and an input of a frozen model.
#[test]
fn a_detach_that_only_an_input_feels_is_seen() {
    on_tracked(|device| {
        let model = Mlp::new(1, &device);
        for model in [model.clone(), model.no_grad()] {
            let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
            let features = tensor::<2>(5, [7, 6], &device).require_grad();
            let run = |freeze: bool| {
                autocast.run(&model, (features.clone(), freeze), |model, (x, freeze)| {
                    let aside = if freeze {
                        x.clone().detach()
                    } else {
                        x.clone()
                    };
                    (model.forward(x) + model.forward(aside)).sum()
                })
            };
            let error = run(true).unwrap_err();
            assert!(is_stopped(&error), "{error}");
            assert_says!(error, "`input 0`");
            let found = features.grad(&run(false).unwrap().backward()).unwrap();
            let loss = model.forward(features.clone()).sum() * 2.0;
            let expected = features.grad(&loss.backward()).unwrap();
            let (found, expected) = (values(found), values(expected));
            let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(largest > 0.0);
            assert_near!(found.iter(), &expected, 0.01 * largest);
        }
    });
}

#[test]
fn results_that_are_detached_stay_so_where_their_number_changes() {
    let device = Device::flex().autodiff();
    let model = Mlp::new(1, &device);
    for cached in [false, true] {
        let autocast = Autocast::new(FloatDType::BF16);
        let autocast = match cached {
            true => autocast.cached(),
            false => autocast,
        };
        for rows in [2, 3, 1, 3] {
            let x = tensor::<2>(5, [rows, 6], &device);
            let results = autocast.run(&model, x, |model, x| {
                let y = model.forward(x);
                // All rows, and each by itself for somebody who looks.
                let row = |row: usize| y.clone().slice([row..row + 1]).detach();
                let mut results: Vec<Tensor<2>> = (0..y.dims()[0]).map(row).collect();
                results.push(y);
                results
            });
            let results = results.unwrap();
            let tracked: Vec<bool> = results.iter().map(|one| one.is_tracked()).collect();
            let mut expected = vec![false; rows];
            expected.push(true);
            assert_eq!(tracked, expected, "{rows} rows");
        }
    }
}

/// A second loss that begins after some steps, with operations that are known by then.
#[test]
fn a_result_that_begins_as_a_constant_has_its_gradient_later() {
    let device = Device::flex().autodiff();
    let model = Mlp::new(1, &device);
    let ways = [(false, true), (true, true), (false, false), (true, false)];
    for (cached, verified) in ways {
        let mut autocast = Autocast::new(FloatDType::BF16);
        if cached {
            autocast = autocast.cached();
        }
        if !verified {
            autocast = autocast.without_verification();
        }
        for step in [0, 0, 1, 2, 0, 3, 0] {
            let x = tensor::<2>(5, [7, 6], &device);
            let losses = autocast.run(&model, (x, step), |model, (x, step)| {
                let first = model.forward(x.clone()).square().mean();
                let second = match step {
                    0 => Tensor::<1>::zeros([1], &x.device()),
                    _ => model.forward(x.neg()).square().mean(),
                };
                (first.clone(), second, first.detach())
            });
            let (first, second, shown) = losses.unwrap();
            let tracked = [&first, &second, &shown].map(Tensor::is_tracked);
            let expected = [true, step > 0, false];
            assert_eq!(
                tracked, expected,
                "step {step}, cached {cached}, verified {verified}"
            );
        }
    }
}

#[test]
fn a_frozen_target_may_be_detached_until_it_trains() {
    on_tracked(|device| {
        let (student, teacher) = (Mlp::new(1, &device), Mlp::new(5, &device));
        for cached in [false, true] {
            let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
            let autocast = match cached {
                true => autocast.cached(),
                false => autocast,
            };
            let loss = |model: &(Mlp, Mlp)| {
                let x = tensor::<2>(5, [7, 6], &device);
                autocast.run(model, x, |model, x: Tensor<2>| {
                    let wanted = model.1.forward(x.clone()).detach();
                    (model.0.forward(x) - wanted).square().mean()
                })
            };
            let pair = (student.clone(), teacher.clone().freeze());
            let grads = GradientsParams::from_grads(loss(&pair).unwrap().backward(), &pair);
            assert_eq!(grads.len(), 4);
            let error = loss(&(student.clone(), teacher.clone())).unwrap_err();
            assert!(is_stopped(&error), "{error}");
        }
    });
}

#[test]
fn a_loss_scale_for_no_gradients_is_an_error_and_no_panic() {
    each_device(|target| {
        let frozen = Mlp::new(1, &target.device.clone().autodiff()).freeze();
        for model in [Mlp::new(1, &target.device), frozen] {
            let calibrated = calibrate_scale(&model, FloatDType::F16, |model| {
                let x = tensor::<2>(5, [7, 6], &model.first.weight.device());
                model.forward(x).mean()
            });
            assert_eq!(calibrated.unwrap_err(), AmpError::NoGradients);
        }
    });
}

#[test]
fn a_kept_recording_is_for_parameters_of_its_shapes_and_dtypes() {
    let model = Mlp::new(1, &Device::flex());
    let mut smaller = model.clone();
    smaller.first.weight = smaller
        .first
        .weight
        .map(|weight| weight.slice([0..6, 0..4]));
    let bias = smaller.first.bias.take().unwrap();
    smaller.first.bias = Some(bias.map(|bias| bias.slice([0..4])));
    smaller.second.weight = smaller
        .second
        .weight
        .map(|weight| weight.slice([0..4, 0..3]));
    let (half, _) = materialize_half(model.clone(), FloatDType::BF16).unwrap();
    let run = |autocast: &Autocast, model: &Mlp| {
        // Weights in half take inputs in half.
        let dtype = model.first.weight.val().dtype();
        let x = tensor::<2>(5, [7, 6], &Device::flex()).cast(dtype);
        values(autocast.run(model, x, |model, x| model.forward(x)).unwrap())
    };
    let cached = Autocast::new(FloatDType::BF16).cached();
    for model in [&model, &smaller, &half, &model] {
        let expected = run(&Autocast::new(FloatDType::BF16), model);
        assert_eq!(run(&cached, model), expected);
    }
}

#[test]
fn the_recordings_that_were_used_last_are_kept() {
    let model = Mlp::new(1, &Device::flex());
    let autocast = Autocast::new(FloatDType::BF16).cached();
    let count = Cell::new(0);
    let records = |batch: usize| {
        let before = count.get();
        let x = tensor::<2>(5, [batch, 6], &Device::flex());
        let y = autocast.run(&model, x, |model, x| {
            count.set(count.get() + 1);
            model.forward(x)
        });
        assert_eq!(y.unwrap().dims(), [batch, 3]);
        count.get() > before
    };
    assert!(records(1));
    // With the 65th shape the one goes that was not used for longest.
    for batch in 2..=65 {
        assert!(records(batch));
        // At the second use, the fourth and so on it is made once more.
        assert_eq!(records(1), batch.is_power_of_two());
    }
    for batch in [3, 65] {
        assert_eq!([records(batch), records(batch)], [true, false]);
    }
    // As if it had never been there.
    assert_eq!([records(2), records(2), records(2)], [true, true, false]);
}

/// A layer and the features that it is compared with, which are no parameter.
#[derive(Module, Debug)]
struct Contrast {
    layer: Linear,
    queue: Tensor<2>,
}

/// Values of one closure may be several functions, if it captures a pointer to one.
#[test]
fn a_kept_recording_of_another_captured_function_is_kept_no_more() {
    on_tracked(|device| {
        let layer = Mlp::new(1, &device).first;
        let half = Autocast::new(FloatDType::BF16)
            .with_fallback(Fallback::Emulate)
            .cached();
        let x = tensor::<2>(5, [7, 6], &device);
        let run = |last: fn(Tensor<2>) -> Tensor<2>| {
            let forward = |layer: &Linear, x| last(layer.forward(x));
            values(half.run(&layer, x.clone(), forward).unwrap())
        };
        let plain = run(|x| x);
        let negated: Vec<f32> = plain.iter().map(|value| -value).collect();
        assert_eq!(run(|x| x.neg()), negated);
        assert_eq!(run(|x| x), plain);
    });
}

/// Integers are of the device's own type.
#[test]
#[allow(deprecated)]
fn a_kept_recording_is_for_its_device() {
    let half = Autocast::new(FloatDType::BF16)
        .with_fallback(Fallback::Emulate)
        .cached();
    let layer = Mlp::new(1, &Device::flex()).first;
    let x = tensor::<2>(5, [7, 6], &Device::flex());
    for device in [Device::flex(), Device::ndarray()] {
        let (layer, x) = (
            layer.clone().to_device(&device),
            x.clone().to_device(&device),
        );
        let forward = |layer: &Linear, x: Tensor<2>| layer.forward(x).argmax(1);
        let found = half.run(&layer, x.clone(), forward).unwrap();
        assert_eq!(found.dtype(), forward(&layer, x).dtype());
    }
}

#[test]
fn a_kept_recording_whose_constants_change_is_kept_no_more() {
    on_tracked(|device| {
        let layer = Mlp::new(1, &device).first;
        let half = Autocast::new(FloatDType::BF16)
            .with_fallback(Fallback::Emulate)
            .cached();
        let count = Cell::new(0);
        let x = tensor::<2>(5, [7, 6], &device);
        let run = |autocast: &Autocast, model: &Contrast| {
            let loss = autocast.run(model, x.clone(), |model, x| {
                count.set(count.get() + 1);
                let similar = model
                    .layer
                    .forward(x)
                    .matmul(model.queue.clone().transpose());
                similar.square().mean()
            });
            values(loss.unwrap())[0]
        };
        let mut recorded = Vec::new();
        for step in 1..=12 {
            let model = Contrast {
                layer: layer.clone(),
                queue: tensor::<2>(step, [4, 8], &device),
            };
            let before = count.get();
            let found = run(&half, &model);
            recorded.push(count.get() > before);
            if step >= 2 {
                let similar = model.layer.forward(x.clone());
                let similar = similar.matmul(model.queue.clone().transpose());
                let expected = values(similar.square().mean())[0];
                assert!(
                    (found - expected).abs() < 0.02 * expected,
                    "{found} for {expected}"
                );
            }
        }
        // Always, since the second use showed other features.
        assert_eq!(recorded, [true; 12]);
    });
}
