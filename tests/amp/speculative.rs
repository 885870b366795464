//! No-wait mode against the plain mode.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, AutocastConfig, DynamicLossScale, Fallback, GradScaler, GradScalerConfig, LossScale,
    Speculative,
};

use crate::model::{Mlp, Normalized, bits, gradients, loss, prepared};
use crate::support::{each_device, on_tracked, tensor};

/// Overflows at the start, in a row, alone, and at the end.
const FACTORS: [f32; 12] = [
    f32::INFINITY,
    1.0,
    1.0,
    f32::NAN,
    f32::INFINITY,
    1.0,
    1.0,
    1.0,
    1.0,
    f32::INFINITY,
    1.0,
    f32::INFINITY,
];

fn scaler() -> GradScaler {
    GradScalerConfig::new(LossScale::Dynamic(DynamicLossScale {
        growth_interval: 2,
        ..Default::default()
    }))
    .with_max_norm(Some(0.5))
    .init()
    .unwrap()
}

/// As in the plain mode: one of two batches whose gradients are added up is without examples.
#[test]
fn a_step_of_several_losses_is_taken_back_for_one_that_is_not_finite() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F16, &target.device);
        let weights = bits(&model);
        let mut training = Speculative::new(model, AdamWConfig::new().init(), scaler());
        training
            .step(0.05, |model, scaler| {
                let one = scaler.scale(loss(model, &autocast, 0, 1.0))?;
                let empty = scaler.scale(loss(model, &autocast, 0, 1.0) + f32::NAN)?;
                let grads = (one + empty).backward();
                Ok(GradientsParams::from_grads(grads, model))
            })
            .unwrap();
        let (model, _, scaler) = training.finish().unwrap();
        assert_eq!(scaler.state().skipped_steps, 1);
        assert_eq!(bits(&model), weights);
    });
}

#[test]
fn no_wait_mode_gives_the_numbers_of_the_plain_mode() {
    each_device(|target| {
        let (mut model, autocast) = prepared(1, FloatDType::F16, &target.device);
        let speculative = model.clone();
        let mut plain = scaler();
        let mut optim = AdamWConfig::new().init();
        for (step, factor) in FACTORS.into_iter().enumerate() {
            let grads = gradients(&model, &autocast, &mut plain, step as u64, factor).unwrap();
            model = plain.step(&mut optim, 0.05, model, grads).unwrap();
        }

        let mut training = Speculative::new(speculative, AdamWConfig::new().init(), scaler());
        for (step, factor) in FACTORS.into_iter().enumerate() {
            training
                .step(0.05, |model, scaler| {
                    gradients(model, &autocast, scaler, step as u64, factor)
                })
                .unwrap();
        }
        let (found, found_optim, found_scaler) = training.finish().unwrap();

        assert_eq!(bits(&found), bits(&model));
        assert_eq!(found_scaler.state(), plain.state());
        assert_eq!(found_scaler.state().skipped_steps, 5);
        // Equal moments give equal steps.
        let one_more = |mut model, mut optim: ModuleOptimizer, mut scaler: GradScaler| {
            let grads = gradients(&model, &autocast, &mut scaler, 99, 1.0).unwrap();
            model = scaler.step(&mut optim, 0.05, model, grads).unwrap();
            bits(&model)
        };
        let expected = one_more(model, optim, plain);
        assert_eq!(one_more(found, found_optim, found_scaler), expected);
    });
}

#[test]
fn running_statistics_are_taken_back_too() {
    on_tracked(|device| {
        let config = AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        // The gradient overflows at the loss, not in the forward pass, which stays sound.
        let gradients = |model: &Normalized,
                         autocast: &burn_lean::amp::Autocast,
                         scaler: &mut GradScaler,
                         step: usize| {
            let x = tensor::<2>(step as u64, [5, 6], &device);
            let loss = autocast.forward(x, |x| model.forward(x)).square().mean();
            let factor = if step == 1 { f32::INFINITY } else { 1.0 };
            let loss = scaler.scale(loss.mul_scalar(factor))?;
            Ok::<_, AmpError>(GradientsParams::from_grads(loss.backward(), model))
        };

        let (mut model, autocast) = config.prepare(Normalized::new(&device)).unwrap();
        let mut plain = scaler();
        let mut optim = AdamWConfig::new().init();
        for step in 0..4 {
            let grads = gradients(&model, &autocast, &mut plain, step).unwrap();
            model = plain.step(&mut optim, 0.05, model, grads).unwrap();
        }

        let (other, autocast) = config.prepare(Normalized::new(&device)).unwrap();
        let mut training = Speculative::new(other, AdamWConfig::new().init(), scaler());
        for step in 0..4 {
            training
                .step(0.05, |model, scaler| {
                    gradients(model, &autocast, scaler, step)
                })
                .unwrap();
        }
        let (found, _, found_scaler) = training.finish().unwrap();

        assert_eq!(found_scaler.state(), plain.state());
        assert_eq!(bits(&found.valid()), bits(&model.valid()));
    });
}

#[test]
fn divergence_is_reported_one_step_later_and_gives_everything_back() {
    let (model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let weights = bits(&model);
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16)
        .with_max_consecutive_skips(Some(2))
        .init()
        .unwrap();
    let mut training = Speculative::new(model, AdamWConfig::new().init(), scaler);
    let mut step = || {
        training.step(0.1, |model, scaler| {
            gradients(model, &autocast, scaler, 0, f32::NAN)
        })
    };
    step().unwrap();
    step().unwrap();
    assert_matches!(step(), Err(AmpError::Diverged { consecutive: 2, .. }));
    let (model, _, scaler) = training.finish().unwrap();
    assert_eq!(bits(&model), weights);
    assert_eq!(scaler.state().skipped_steps, 2);
}

#[test]
fn the_losses_of_a_step_that_failed_are_not_those_of_the_next() {
    let (model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let mut training = Speculative::new(model, AdamWConfig::new().init(), scaler());
    let broken = Tensor::<1>::full([1], f32::NAN, &Device::flex());
    let failures: [Result<GradientsParams, AmpError>; 2] =
        [Err(AmpError::NothingToUpdate), Ok(GradientsParams::new())];
    for failure in failures {
        let mut failure = Some(failure);
        let result = training.step(0.1, |_, scaler| {
            scaler.scale(broken.clone())?;
            failure.take().unwrap()
        });
        assert!(result.is_err());
    }
    training
        .step(0.1, |model, scaler| {
            gradients(model, &autocast, scaler, 0, 1.0)
        })
        .unwrap();
    training.settle().unwrap();
    assert!(training.report().unwrap().loss.unwrap().is_finite());
}

#[test]
fn settling_waits_for_the_outcome() {
    let (model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let weights = bits(&model);
    let mut training = Speculative::new(model, AdamWConfig::new().init(), scaler());
    training
        .step(0.1, |model, scaler| {
            gradients(model, &autocast, scaler, 0, f32::INFINITY)
        })
        .unwrap();
    assert_ne!(bits(training.model()), weights);
    let (model, _, scaler) = training.settle().unwrap();
    assert_eq!(bits(model), weights);
    assert_eq!(scaler.state().skipped_steps, 1);
    assert!(training.report().unwrap().skipped);
}

#[test]
fn a_training_that_is_given_up_leaves_the_device_usable() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F16, &target.device);
        for _ in 0..3 {
            let mut training = Speculative::new(model.clone(), AdamWConfig::new().init(), scaler());
            training
                .step(0.1, |model, scaler| {
                    gradients(model, &autocast, scaler, 0, 1.0)
                })
                .unwrap();
            drop(training);
            // Another read: Burn's wgpu runtime panics here when the first one was given up.
            assert!(!bits(&model).is_empty());
        }
    });
}

/// Once for each batch, as in a plain loop: quantizers and masks follow a schedule of steps.
#[test]
fn what_a_loop_does_after_each_step_is_done_after_those_that_are_taken_back_too() {
    struct Smaller;
    impl ModuleMapper for Smaller {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|weight| weight.mul_scalar(0.875).detach().require_grad())
        }
    }
    let after = |model: Mlp| model.map(&mut Smaller);
    let (mut model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let mut training =
        Speculative::new(model.clone(), AdamWConfig::new().init(), scaler()).with_after_step(after);
    let mut plain = scaler();
    let mut optim = AdamWConfig::new().init();
    for (step, factor) in FACTORS.into_iter().enumerate() {
        let grads = gradients(&model, &autocast, &mut plain, step as u64, factor).unwrap();
        model = after(plain.step(&mut optim, 0.05, model, grads).unwrap());
        training
            .step(0.05, |model, scaler| {
                gradients(model, &autocast, scaler, step as u64, factor)
            })
            .unwrap();
    }
    let (found, ..) = training.finish().unwrap();
    assert_eq!(plain.state().skipped_steps, 5);
    assert_eq!(bits(&found), bits(&model));
}
