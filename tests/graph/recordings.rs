//! What is remembered of forward passes between steps.

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{Bool, Device, Tensor};
use burn_lean::graph::{
    AsRecorded, GraphError, Recordings, Verified, record, record_with_backward,
};

use crate::support::{devices, tensor, values};

fn linear(device: &Device) -> Linear {
    LinearConfig::new(3, 3).init(device)
}

/// One that was kept without a look at its gradients is not given to a clone that looks.
#[test]
fn a_kept_recording_does_not_hide_a_stopped_gradient() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let forward = |model: &Linear, x: Tensor<2>| {
        let y = model.forward(x);
        y.clone() * y.detach()
    };
    let mut recordings = Recordings::default();
    recordings.caches = true;
    let mut trusting = recordings.clone();
    trusting.verifies = false;
    let place = Location::caller();
    assert!(trusting.recording(&model, &x, forward, place, 0).is_ok());
    let error = recordings.recording(&model, &x, forward, place, 0);
    let error = error.map(|_| ()).unwrap_err();
    assert_matches!(error, GraphError::StopsGradients { .. });
}

/// A term of the loss that begins at nothing: its gradients are looked at when it is there.
#[test]
fn a_stopped_gradient_that_appears_later_is_found() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let forward = |model: &Linear, (x, weight): (Tensor<2>, f64)| {
        let y = model.forward(x);
        let target = y.clone().detach();
        y.clone().square().mean() + (y * target).mean() * weight
    };
    for caches in [false, true] {
        let mut recordings = Recordings::default();
        recordings.caches = caches;
        let place = Location::caller();
        let at = |weight: f64| {
            let found = recordings.recording(&model, &(x.clone(), weight), forward, place, 0);
            found.map(|_| ())
        };
        for _ in 0..3 {
            assert_eq!(at(0.0), Ok(()));
        }
        // Seen in this step, compared in the next.
        assert_eq!(at(0.5), Ok(()));
        assert_matches!(at(0.6), Err(GraphError::StopsGradients { .. }));
    }
}

fn is_stopped<T>(found: Result<T, GraphError>) -> bool {
    matches!(found, Err(GraphError::StopsGradients { .. }))
}

/// A term whose weight is one of many numbers of its size, and begins at 0.
#[test]
fn a_late_weight_is_told_from_numbers_of_its_size() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let recordings = Recordings::default();
    let place = Location::caller();
    let at = |weight: f64| {
        let forward = move |model: &Linear, x: Tensor<2>| {
            let y = model.forward(x) * 1.1;
            let target = y.clone().detach() * 1.2;
            y.clone().square().mean() * 1.3 + (y - target).square().mean() * weight
        };
        recordings.recording(&model, &x, forward, place, 0)
    };
    for _ in 0..3 {
        assert!(at(0.0).is_ok());
    }
    // Seen in this step, compared in the next.
    assert!(at(1.0).is_ok());
    assert!(is_stopped(at(1.0)));
}

/// What hides a term in the first step, although it is there: no example is masked, a constant is zero.
#[test]
fn a_mask_of_nothing_and_a_constant_of_zero_hide_no_stopped_gradient() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [4, 3], &device);
    let nothing = Tensor::<1, Bool>::full([4], false, &device);
    let place = Location::caller();
    let masked = |model: &Linear, (x, mask): (Tensor<2>, Tensor<1, Bool>)| {
        let y = model.forward(x);
        let aside = (y.clone() * y.clone().detach())
            .sum_dim(1)
            .squeeze_dim::<1>(1);
        y.square().mean() + aside.mask_fill(mask.bool_not(), 0.0).mean()
    };
    let input = (x.clone(), nothing);
    assert!(is_stopped(
        Recordings::default().recording(&model, &input, masked, place, 0)
    ));
    let weighted = |model: &Linear, x: Tensor<2>| {
        let weight = Tensor::<1>::from_floats([0.0], &x.device());
        let y = model.forward(x);
        y.clone().square().mean() + (y.clone() * y.detach()).mean() * weight
    };
    assert!(is_stopped(
        Recordings::default().recording(&model, &x, weighted, place, 0)
    ));
}

/// Of no examples all gradients are zero, whatever is stopped.
#[test]
fn a_first_batch_without_examples_hides_no_stopped_gradient() {
    // GPU backends have no kernels over no elements.
    for target in devices().into_iter().filter(|target| !target.is_gpu()) {
        let device = target.device.autodiff();
        let model = linear(&device);
        let forward = |model: &Linear, x: Tensor<2>| {
            let y = model.forward(x);
            (y.clone() * y.detach()).sum()
        };
        for caches in [false, true] {
            let mut recordings = Recordings::default();
            recordings.caches = caches;
            let place = Location::caller();
            let of_rows = |rows: usize| {
                let x = Tensor::<2>::ones([rows, 3], &device);
                recordings.recording(&model, &x, forward, place, 0)
            };
            let empty = of_rows(0).map(|_| ());
            if target.name == "ndarray" {
                // Burn's product there divides by the number of rows.
                assert_matches!(empty, Err(GraphError::Panics { .. }));
            } else {
                assert_eq!(empty, Ok(()), "{}", target.name);
            }
            assert!(is_stopped(of_rows(4)), "{}", target.name);
        }
    }
}

/// That of Burn on flex panics where a sum starts behind the end of nothing, as in a concatenation.
#[test]
fn a_forward_pass_of_no_examples_runs_where_its_backward_pass_panics() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = Tensor::<2>::ones([0, 3], &device);
    let forward = |model: &Linear, x: Tensor<2>| {
        let bias = model.bias.as_ref().unwrap().val().unsqueeze::<2>();
        Tensor::cat(vec![x.clone(), model.forward(x) + bias], 1).sum()
    };
    let recording = record_with_backward(&model, &x, forward).unwrap();
    let found = recording.verify_gradients(&model, &x);
    assert_eq!(found, Ok(Verified::NoElements));
    let recordings = Recordings::default();
    let place = Location::caller();
    for _ in 0..2 {
        let recording = recordings.recording(&model, &x, forward, place, 0);
        let sum = recording.unwrap().execute(&model, &x, &AsRecorded);
        assert_eq!(values(sum.unwrap()), [0.0]);
    }
    // Of some examples it is compared.
    let x = Tensor::<2>::ones([2, 3], &device);
    let recording = record_with_backward(&model, &x, forward).unwrap();
    let found = recording.verify_gradients(&model, &x);
    assert_eq!(found, Ok(Verified::Same));
}

/// A padding mask of a batch without padding: with all of a row masked there is no softmax.
#[test]
fn a_mask_that_cannot_be_another_is_left_as_it_is() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [4, 3], &device);
    let padding = Tensor::<2, Bool>::full([4, 1], false, &device);
    let forward = |model: &Linear, (x, padding): (Tensor<2>, Tensor<2, Bool>)| {
        let scores = model
            .forward(x)
            .mask_fill(padding.expand([4, 3]), f32::NEG_INFINITY);
        burn::tensor::activation::softmax(scores, 1).square().mean()
    };
    let place = Location::caller();
    let recordings = Recordings::default();
    let found = recordings.recording(&model, &(x, padding), forward, place, 0);
    assert!(found.is_ok(), "{:?}", found.err());
}

/// A term that a number brings in, which a kept recording does not show.
#[test]
fn a_pass_is_looked_at_again_and_again() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    for caches in [false, true] {
        // A share of the gradients that is small at first, and a branch.
        for branches in [false, true] {
            let mut recordings = Recordings::default();
            recordings.caches = caches;
            let place = Location::caller();
            let factor = Cell::new(1.0);
            let mut refused = None;
            for step in 1..=16 {
                factor.set(if step < 5 { 1.0 } else { 0.0 });
                let (branch, weight) = match branches {
                    true => (factor.get() == 0.0, 1.0),
                    false => (true, 1e-5),
                };
                let forward = |model: &Linear, (x, most): (Tensor<2>, Tensor<1>)| {
                    let y = model.forward(x);
                    let target = if branch {
                        y.clone().detach()
                    } else {
                        y.clone()
                    };
                    let aside = (y.clone() * target).mean() * weight;
                    y.square().mean() * most + aside
                };
                let most = match branches {
                    true => 1.0,
                    false => factor.get() as f32 + 1e-5,
                };
                let most = Tensor::<1>::from_floats([most], &device);
                let found = recordings.recording(&model, &(x.clone(), most), forward, place, 0);
                if is_stopped(found) {
                    refused = Some(step);
                    break;
                }
            }
            assert_eq!(refused, Some(8), "caches: {caches}, branches: {branches}");
        }
    }
}

/// A closure type of several functions.
#[test]
fn functions_behind_one_pointer_are_told_apart() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    type Loss = fn(&Linear, Tensor<2>) -> Tensor<1>;
    let squares: Loss = |model, x| model.forward(x).square().mean();
    let sizes: Loss = |model, x| model.forward(x).abs().mean();
    let stopped: Loss = |model, x| {
        let y = model.forward(x);
        (y.clone().exp() * y.detach()).mean()
    };
    let mut recordings = Recordings::default();
    recordings.caches = true;
    let place = Location::caller();
    let loss = |forward: Loss| {
        let recording = recordings.recording(&model, &x, forward, place, 0)?;
        let loss = recording.execute(&model, &x, &AsRecorded)?;
        Ok::<f32, GraphError>(loss.into_scalar())
    };
    for _ in 0..3 {
        for forward in [squares, sizes] {
            let expected: f32 = forward(&model, x.clone()).into_scalar();
            let found = loss(forward).unwrap();
            assert!(
                (found - expected).abs() < 1e-6 * expected,
                "{found} {expected}"
            );
        }
    }
    let all = [loss(stopped), loss(stopped)];
    let refused = all.iter().filter(|found| found.is_err()).count();
    assert!(refused >= 1, "{all:?}");
}

/// What a kept recording has, and what the model does by now.
#[test]
fn a_change_of_what_is_computed_is_seen() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [4, 3], &device);
    type Change = fn(Tensor<2>, usize) -> Tensor<2>;
    let changes: [(&str, Change); 4] = [
        ("the axis of a flip", |y, step| {
            y.flip([(step / 8) as isize])
        }),
        ("the start of a slice", |y, step| {
            y.slice([step / 8..step / 8 + 2])
        }),
        ("the order of a difference", |y, step| match step < 8 {
            true => y.clone() - y.square(),
            false => y.clone().square() - y,
        }),
        ("the width of noise", |y, step| {
            let noise = burn::tensor::Distribution::Normal(0.0, 1.0 + (step / 8) as f64);
            y.clone() + y.random_like(noise)
        }),
    ];
    for (name, change) in changes {
        let mut recordings = Recordings::default();
        recordings.caches = true;
        let place = Location::caller();
        let recorded = Cell::new(0);
        for step in 1..=12 {
            let forward = |model: &Linear, x: Tensor<2>| {
                recorded.set(recorded.get() + 1);
                change(model.forward(x), step)
            };
            recordings.recording(&model, &x, forward, place, 0).unwrap();
        }
        // At the first use, the second, the fourth, and from the 8th on in each.
        assert_eq!(recorded.get(), 8, "{name}");
    }
}

/// Roots of negative numbers: what makes gradients infinite for good is not looked at in every step.
#[test]
fn gradients_that_stay_infinite_are_looked_at_less_and_less() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [4, 3], &device);
    let mut recordings = Recordings::default();
    recordings.caches = true;
    let place = Location::caller();
    let recorded = Cell::new(0);
    for _ in 1..=64 {
        let forward = |model: &Linear, x: Tensor<2>| {
            recorded.set(recorded.get() + 1);
            (model.forward(x) - 1e6).sqrt().mean()
        };
        recordings.recording(&model, &x, forward, place, 0).unwrap();
    }
    // Four steps, then the 8th, the 16th, the 32nd and the 64th.
    assert_eq!(recorded.get(), 8);
}

/// Each has the plain tensors of the model: of many lengths, as often.
#[test]
fn recordings_of_what_turns_out_to_change_are_let_go() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let mut recordings = Recordings::default();
    recordings.caches = true;
    let place = Location::caller();
    let factor = Cell::new(2.0);
    let of = |length: usize| {
        let x = tensor::<2>(1, [length, 3], &device);
        let forward = |model: &Linear, x: Tensor<2>| model.forward(x) * factor.get();
        let found = recordings.recording(&model, &x, forward, place, 0);
        Arc::downgrade(&found.unwrap())
    };
    let kept: Vec<_> = (1..=6).map(&of).collect();
    assert!(kept.iter().all(|one| one.strong_count() == 1));
    factor.set(3.0);
    of(1);
    assert!(kept.iter().all(|one| one.strong_count() == 0));
}

/// A pool records places where gradients are looked for, and none where they are not.
#[test]
fn a_recording_that_still_holds_is_kept() {
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let x = tensor::<2>(1, [4, 3], &device);
    for verifies in [true, false] {
        let mut recordings = Recordings::default();
        recordings.caches = true;
        recordings.verifies = verifies;
        let place = Location::caller();
        let recorded = Cell::new(0);
        for _ in 1..=20 {
            let forward = |model: &Linear, x: Tensor<2>| {
                recorded.set(recorded.get() + 1);
                let y = model.forward(x).reshape([1, 1, 12]);
                let pooled = burn::tensor::module::max_pool1d(y, MaxPoolOptions::new([2]));
                pooled.max_dim(2).square().mean()
            };
            recordings.recording(&model, &x, forward, place, 0).unwrap();
        }
        // At the first use, the second, the fourth, the 8th and the 16th; what a look without gradients shows is
        // another pool, whose gradients are compared in the step after.
        let expected = if verifies { 9 } else { 5 };
        assert_eq!(recorded.get(), expected, "verifies: {verifies}");
    }
}

/// A result and the gradients of the model's weight, where it trains.
fn of_step(model: &Linear, loss: Tensor<1>) -> Vec<f32> {
    let mut found = values(loss.clone());
    if loss.is_autodiff() {
        let grads = loss.backward();
        found.extend(values(model.weight.grad(&grads).unwrap()));
    }
    found
}

/// With a mask and numbers of its own, which stay on a device between the steps.
fn with_constants(model: &Linear, x: Tensor<2>) -> Tensor<1> {
    let device = x.device();
    let factors = tensor::<2>(7, [2, 3], &device);
    let mask = Tensor::<2, Bool>::from_data([[true, false, false], [false, true, false]], &device);
    let y = model.forward(x) * factors.clone() + factors;
    y.mask_fill(mask, 0.5).square().mean()
}

/// Devices that are equal to Burn, with and without autodiff, and devices that are not.
#[test]
fn a_kept_recording_gives_the_same_on_each_device_and_in_each_step() {
    let mut places = Vec::new();
    for target in devices() {
        let trained = target.device.clone().autodiff();
        places.push(trained.clone());
        places.push(trained.gradient_checkpointing());
        places.push(target.device);
    }
    let steps: Vec<(Linear, Tensor<2>)> = places
        .iter()
        .map(|device| (linear(device), tensor::<2>(1, [2, 3], device)))
        .collect();
    let expected: Vec<Vec<f32>> = steps
        .iter()
        .map(|(model, x)| {
            let fresh = record(model, x, with_constants).unwrap();
            of_step(model, fresh.execute(model, x, &AsRecorded).unwrap())
        })
        .collect();
    let mut recordings = Recordings::default();
    recordings.caches = true;
    let place = Location::caller();
    // One recording for all, which is executed here and there, and one for each.
    let (model, x) = &steps[0];
    let one = record(model, x, with_constants).unwrap();
    for round in 0..6 {
        for (((model, x), expected), device) in steps.iter().zip(&expected).zip(&places) {
            let own = recordings.recording(model, x, with_constants, place, 0);
            let own = own.unwrap();
            for _ in 0..3 {
                let loss = own.execute(model, x, &AsRecorded).unwrap();
                assert_eq!(of_step(model, loss), *expected, "round {round}, {device:?}");
            }
            for _ in 0..3 {
                let loss = one.execute(model, x, &AsRecorded).unwrap();
                assert_eq!(loss.is_autodiff(), device.is_autodiff());
                assert_eq!(of_step(model, loss), *expected, "round {round}, {device:?}");
            }
        }
    }
}
