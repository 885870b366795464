//! Several devices in one process.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, GradScaler, GradScalerConfig, LossScale, SkipCause, calibrate_scale,
    inspect_gradients,
};

use crate::model::{bits, gradients, loss, prepared};
use crate::support::{Target, devices, with_numbers};

fn scaler() -> GradScaler {
    GradScalerConfig::new(LossScale::Static(1024.0))
        .with_max_norm(Some(0.5))
        .init()
        .unwrap()
}

/// Flex and ndarray are everywhere; others as the tests find them.
#[allow(deprecated)] // ndarray is supported as long as Burn has it.
fn pairs() -> Vec<[Device; 2]> {
    let first = [Device::flex(), Device::ndarray()];
    let others = devices().into_iter().filter(Target::is_gpu);
    others
        .map(|target| [target.device, Device::flex()])
        .chain([first])
        .collect()
}

#[test]
fn losses_of_two_devices_are_scaled_and_reported_by_one_scaler() {
    for [first, second] in pairs() {
        let mut scaler = scaler();
        let (model, autocast) = prepared(1, FloatDType::F16, &first);
        let (other, other_autocast) = prepared(2, FloatDType::F16, &second);
        let grads = gradients(&model, &autocast, &mut scaler, 0, 1.0).unwrap();
        let other_loss = loss(&other, &other_autocast, 0, 1.0);
        let expected = [loss(&model, &autocast, 0, 1.0), other_loss.clone()]
            .map(|loss| loss.into_scalar::<f32>());
        let other_grads = scaler.scale(other_loss).unwrap().backward();
        let other_grads = GradientsParams::from_grads(other_grads, &other);
        let (before, other_before) = (bits(&model), bits(&other));

        let mut optims = [SgdConfig::new().init(), SgdConfig::new().init()];
        let unscaled = scaler.unscale(&model, grads).unwrap();
        let other_unscaled = scaler.unscale(&other, other_grads).unwrap();
        let model = scaler.apply(&mut optims[0], 0.1, model, unscaled).unwrap();
        let found = scaler.report().unwrap().loss.unwrap();
        assert!((found - (expected[0] + expected[1]) / 2.0).abs() < 1e-6);
        let other = scaler
            .apply(&mut optims[1], 0.1, other, other_unscaled)
            .unwrap();
        scaler.update().unwrap();
        assert_ne!(bits(&model), before);
        assert_ne!(bits(&other), other_before);
    }
}

/// A model whose halves are on two devices.
#[derive(Module, Debug)]
struct Split {
    first: Linear,
    second: Linear,
}

impl Split {
    fn new([first, second]: &[Device; 2]) -> Self {
        let linear = |device: &Device| LinearConfig::new(3, 3).init(&device.clone().autodiff());
        let model = Self {
            first: linear(first),
            second: linear(second),
        };
        with_numbers(model, 1)
    }

    /// The gradients: Burn's tape is of one backend, so each half has a loss of its own.
    fn gradients(&self, factor: f32) -> GradientsParams {
        let mut grads = GradientsParams::new();
        for half in [&self.first, &self.second] {
            let x = Tensor::<2>::ones([2, 3], &half.weight.base().device());
            let of_half = half.forward(x * factor).square().mean().backward();
            let of_half = GradientsParams::from_grads(of_half, half);
            grads.register::<2>(half.weight.id, of_half.get(half.weight.id).unwrap());
        }
        grads
    }
}

#[test]
fn gradients_on_two_devices_are_inspected_stepped_and_reported() {
    for devices in pairs() {
        let model = Split::new(&devices);
        let found = inspect_gradients(&model, &model.gradients(f32::INFINITY)).unwrap();
        let paths: Vec<_> = found.iter().map(|found| found.path.as_str()).collect();
        assert_eq!(paths, ["first.weight", "second.weight"]);
        assert!(found.iter().all(|found| found.non_finite == 9), "{found:?}");
        // A loss that reaches none of the gradients' devices is refused, not a panic.
        let error = calibrate_scale(&model, FloatDType::F16, |_| {
            Tensor::ones([1], &devices[1].clone().autodiff()).require_grad()
        });
        assert_eq!(error.unwrap_err(), AmpError::NoGradients);

        let mut scaler = scaler();
        let mut optim = SgdConfig::new().init();
        let before = bits(&model);
        let grads = model.gradients(1.0);
        let model = scaler.step(&mut optim, 0.1, model, grads).unwrap();
        assert!(!scaler.report().unwrap().skipped);
        let after = bits(&model);
        assert_ne!(after, before);

        let grads = model.gradients(f32::INFINITY);
        let model = scaler.step(&mut optim, 0.1, model, grads).unwrap();
        assert_eq!(bits(&model), after);
        let overflow = scaler.report().unwrap().overflow.clone().unwrap();
        let details = overflow.inspect().unwrap();
        let paths: Vec<_> = details.iter().map(|found| found.path.as_str()).collect();
        assert_eq!(paths, ["first.weight", "second.weight"]);
        assert!(details.iter().all(|found| found.non_finite == 9));
    }
}

/// Each replica has gradients of its own, as where they are exchanged after unscaling.
#[test]
fn replicas_that_agree_on_found_inf_skip_the_same_steps() {
    for [first, second] in pairs() {
        let config = GradScalerConfig::for_dtype(FloatDType::F16);
        let mut scalers = [config.init().unwrap(), config.init().unwrap()];
        let mut models = [
            prepared(1, FloatDType::F16, &first),
            prepared(1, FloatDType::F16, &second),
        ];
        let mut optims = [SgdConfig::new().init(), SgdConfig::new().init()];
        for factors in [
            [1.0, 1.0],
            [f32::INFINITY, 1.0],
            [1.0, f32::NAN],
            [1.0, 1.0],
        ] {
            let before = models.each_ref().map(|(model, _)| bits(model));
            let mut unscaled = Vec::new();
            let mut found = Vec::new();
            for ((scaler, (model, autocast)), factor) in
                scalers.iter_mut().zip(&models).zip(factors)
            {
                let grads = gradients(model, autocast, scaler, 0, factor).unwrap();
                let one = scaler.unscale(model, grads).unwrap();
                found.push(scaler.found_inf(model, &one).unwrap());
                unscaled.push(one);
            }
            assert_eq!(found, factors.map(|factor| !factor.is_finite()));
            let any = found.contains(&true);
            for (index, one) in unscaled.into_iter().enumerate() {
                let (model, autocast) = models[index].clone();
                let one = one.with_found_inf(any);
                let (scaler, optim) = (&mut scalers[index], &mut optims[index]);
                let model = scaler.apply(optim, 0.1, model, one).unwrap();
                scaler.update().unwrap();
                let report = scaler.report().unwrap();
                assert_eq!(report.skipped, any);
                let other = report.overflow.as_ref().is_some_and(|overflow| {
                    overflow.cause == SkipCause::OtherReplica && overflow.first().is_none()
                });
                assert_eq!(other, any && !found[index]);
                models[index] = (model, autocast);
            }
            let after = models.each_ref().map(|(model, _)| bits(model));
            assert_eq!(after == before, any);
        }
        assert_eq!(scalers[0].state(), scalers[1].state());
        assert_eq!(scalers[0].state().skipped_steps, 2);
    }
}
