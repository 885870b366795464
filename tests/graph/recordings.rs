//! What is remembered of forward passes between steps.

use std::panic::Location;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::graph::{AsRecorded, GraphError, Recordings};

use crate::support::tensor;

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
    assert!(
        matches!(error, GraphError::StopsGradients { .. }),
        "{error}"
    );
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
        let error = at(0.6).unwrap_err();
        assert!(
            matches!(error, GraphError::StopsGradients { .. }),
            "{error}"
        );
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
