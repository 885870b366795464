//! A batch with infinities or NaN leaves none in a BatchNorm.

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Fallback, GradScaler, GradScalerConfig, Speculative,
};

use crate::model::{Normalized, bits};
use crate::support::{Target, each_device, tensor, values};

fn prepared(target: &Target) -> (Normalized, Autocast) {
    AutocastConfig::new(FloatDType::F16)
        .with_fallback(Fallback::Emulate)
        .prepare(Normalized::new(&target.device.clone().autodiff()))
        .unwrap()
}

fn scaler() -> GradScaler {
    GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap()
}

/// Scaled gradients of one batch; `factor` breaks its first feature.
fn gradients(
    model: &Normalized,
    autocast: &Autocast,
    scaler: &mut GradScaler,
    step: u64,
    factor: f32,
) -> Result<GradientsParams, AmpError> {
    let device = model.norm.gamma.base().device();
    let x = tensor::<2>(step, [5, 6], &device).mul_scalar(factor);
    let loss = autocast.forward(x, |x| model.forward(x)).square().mean();
    Ok(GradientsParams::from_grads(
        scaler.scale(loss)?.backward(),
        model,
    ))
}

/// Mean and variance, with the update of the last forward pass.
fn statistics(model: &Normalized) -> Vec<f32> {
    let norm = model.valid().norm;
    [norm.running_mean.value(), norm.running_var.value()]
        .into_iter()
        .flat_map(values)
        .collect()
}

#[test]
fn a_skipped_step_puts_back_statistics_that_are_not_finite() {
    each_device(|target| {
        for broken in [f32::NAN, f32::INFINITY] {
            // The first step is broken, then one in the middle, then two in a row.
            let factors = [broken, 1.0, 1.0, broken, 1.0, broken, broken];
            let (mut model, autocast) = prepared(target);
            let (mut scaler, mut optim) = (scaler(), SgdConfig::new().init());
            let mut expected = statistics(&model);
            assert_eq!(expected, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
            for (step, factor) in factors.into_iter().enumerate() {
                let grads = gradients(&model, &autocast, &mut scaler, step as u64, factor);
                model = scaler.step(&mut optim, 0.1, model, grads.unwrap()).unwrap();

                assert_eq!(scaler.report().unwrap().skipped, factor != 1.0);
                if factor == 1.0 {
                    assert_ne!(statistics(&model), expected, "{}: step {step}", target.name);
                    expected = statistics(&model);
                }
                assert_eq!(statistics(&model), expected, "{}: step {step}", target.name);
            }
            let y = model
                .valid()
                .norm
                .forward(Tensor::<2>::ones([1, 4], &target.device));
            assert!(values(y).iter().all(|y| y.is_finite()));
        }
    });
}

#[test]
fn a_skipped_step_keeps_statistics_that_are_finite() {
    each_device(|target| {
        let (model, autocast) = prepared(target);
        let before = statistics(&model);
        let mut scaler = scaler();
        let mut grads = gradients(&model, &autocast, &mut scaler, 0, 1.0).unwrap();
        // The backward pass overflows, the forward pass has not.
        let gamma = Tensor::full([4], f32::INFINITY, &target.device);
        grads.register::<1>(model.norm.gamma.id, gamma);
        // Of another model: to look at statistics takes their update in.
        let (other, autocast) = prepared(target);
        let _ = gradients(&other, &autocast, &mut scaler, 0, 1.0).unwrap();
        let updated = statistics(&other);
        assert_ne!(updated, before);

        let model = scaler
            .step(&mut SgdConfig::new().init(), 0.1, model, grads)
            .unwrap();

        assert!(scaler.report().unwrap().skipped);
        assert_eq!(statistics(&model), updated);
    });
}

#[test]
fn a_broken_micro_batch_leaves_the_statistics_of_the_step_before() {
    each_device(|target| {
        for factors in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            let (mut model, autocast) = prepared(target);
            let (mut scaler, mut optim) = (scaler(), SgdConfig::new().init());
            for (step, factors) in [[1.0, 1.0], factors].into_iter().enumerate() {
                let mut accumulator = GradientsAccumulator::new();
                for (i, factor) in factors.into_iter().enumerate() {
                    let batch = (2 * step + i) as u64;
                    let grads = gradients(&model, &autocast, &mut scaler, batch, factor);
                    accumulator.accumulate(&model, grads.unwrap());
                }
                model = scaler
                    .step(&mut optim, 0.1, model, accumulator.grads())
                    .unwrap();
            }
            assert_eq!(scaler.state().skipped_steps, 1);
            let found = statistics(&model);
            assert!(
                found.iter().all(|x| x.is_finite()),
                "{}: {found:?}",
                target.name
            );
            // And not those of the start, 0 and 1.
            assert!(found.iter().all(|x| *x != 0.0 && *x != 1.0), "{found:?}");
        }
    });
}

#[test]
fn no_wait_mode_gives_the_statistics_of_the_plain_mode() {
    each_device(|target| {
        let factors = [f32::NAN, 1.0, f32::INFINITY, f32::NAN, 1.0, f32::NAN];
        let (mut model, autocast) = prepared(target);
        let (mut plain, mut optim) = (scaler(), SgdConfig::new().init());
        for (step, factor) in factors.into_iter().enumerate() {
            let grads = gradients(&model, &autocast, &mut plain, step as u64, factor);
            model = plain.step(&mut optim, 0.1, model, grads.unwrap()).unwrap();
        }

        let (other, autocast) = prepared(target);
        let mut training = Speculative::new(other, SgdConfig::new().init(), scaler());
        for (step, factor) in factors.into_iter().enumerate() {
            training
                .step(0.1, |model, scaler| {
                    gradients(model, &autocast, scaler, step as u64, factor)
                })
                .unwrap();
        }
        let (found, _, found_scaler) = training.finish().unwrap();

        assert_eq!(found_scaler.state(), plain.state());
        assert!(statistics(&found).iter().all(|x| x.is_finite()));
        assert_eq!(
            bits(&found.valid()),
            bits(&model.valid()),
            "{}",
            target.name
        );
    });
}
