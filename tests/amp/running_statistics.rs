//! A batch with infinities or NaN leaves none in a BatchNorm.

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Checkpoints, Fallback, GradScaler, GradScalerConfig,
    Speculative,
};

use crate::model::{Normalized, bits};
use crate::support::{Target, devices, each_device, tensor, values};

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
                    assert_ne!(statistics(&model), expected, "step {step}");
                    expected = statistics(&model);
                }
                assert_eq!(statistics(&model), expected, "step {step}");
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
        let after = |steps: &[[f32; 2]]| {
            let (mut model, autocast) = prepared(target);
            let (mut scaler, mut optim) = (scaler(), SgdConfig::new().init());
            for (step, factors) in steps.iter().enumerate() {
                let mut accumulator = GradientsAccumulator::new();
                for (i, factor) in factors.iter().enumerate() {
                    let batch = (2 * step + i) as u64;
                    let grads = gradients(&model, &autocast, &mut scaler, batch, *factor);
                    accumulator.accumulate(&model, grads.unwrap());
                }
                model = scaler
                    .step(&mut optim, 0.1, model, accumulator.grads())
                    .unwrap();
            }
            assert_eq!(scaler.state().skipped_steps, steps.len() as u64 - 1);
            statistics(&model)
        };
        let sound = after(&[[1.0, 1.0]]);
        for factors in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            let found = after(&[[1.0, 1.0], factors]);
            assert!(found.iter().all(|x| x.is_finite()), "{found:?}");
            // And not those of the start, 0 and 1.
            assert!(found.iter().all(|x| *x != 0.0 && *x != 1.0), "{found:?}");
            // The pass after the broken one cannot be told from it.
            if factors[0].is_nan() {
                assert_eq!(found, sound);
            }
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
        assert_eq!(bits(&found.valid()), bits(&model.valid()));
    });
}

/// A training whose first step is broken.
struct First {
    model: Normalized,
    autocast: Autocast,
    scaler: GradScaler,
}

impl First {
    /// Takes the step, whose batches are multiplied by `factors`; `look` at the model before it.
    fn step(mut self, factors: [f32; 2], look: impl FnOnce(&Normalized)) -> Normalized {
        let mut accumulator = GradientsAccumulator::new();
        for (batch, factor) in factors.into_iter().enumerate() {
            let (model, scaler) = (&self.model, &mut self.scaler);
            let grads = gradients(model, &self.autocast, scaler, batch as u64, factor);
            accumulator.accumulate(&self.model, grads.unwrap());
        }
        look(&self.model);
        let optim = &mut SgdConfig::new().init();
        let grads = accumulator.grads();
        let model = self.scaler.step(optim, 0.1, self.model, grads).unwrap();
        assert!(self.scaler.report().unwrap().skipped);
        model
    }
}

#[test]
fn a_first_step_that_is_broken_leaves_no_nan() {
    let look: [fn(&Normalized); 2] = [
        |_| (),
        // Evaluation takes the updates of the forward passes in.
        |model| {
            let _ = model.valid();
        },
    ];
    each_device(|target| {
        for factors in [[f32::NAN, 1.0], [1.0, f32::INFINITY], [f32::NAN, f32::NAN]] {
            for look in look {
                let (model, autocast) = prepared(target);
                let first = First {
                    model,
                    autocast,
                    scaler: scaler(),
                };
                let found = statistics(&first.step(factors, look));
                assert!(found.iter().all(|x| x.is_finite()), "{found:?}");
                if factors[0] != 1.0 {
                    // No sound pass came before: those of a new BatchNorm.
                    assert_eq!(found, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
                }
            }
        }
    });
}

/// A model that has been trained, and its statistics.
fn trained(target: &Target) -> (Normalized, Autocast, Vec<f32>) {
    let (model, autocast) = prepared(target);
    for step in 0..3 {
        let _ = gradients(&model, &autocast, &mut scaler(), 10 + step, 1.0).unwrap();
    }
    let expected = statistics(&model);
    assert!(
        expected.iter().all(|x| *x != 0.0 && *x != 1.0),
        "{expected:?}"
    );
    (model, autocast, expected)
}

#[test]
fn a_broken_first_step_after_a_restart_leaves_the_loaded_statistics() {
    each_device(|target| {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let (model, _, expected) = trained(target);
        let optim = || SgdConfig::new().init();
        checkpoints.save(1, &model, &optim(), &scaler()).unwrap();

        let (fresh, autocast) = prepared(target);
        let (model, _, scaler) = checkpoints.load(1, fresh, optim()).unwrap();
        let first = First {
            model,
            autocast,
            scaler,
        };
        let found = first.step([f32::NAN, 1.0], |model| {
            let _ = model.valid();
        });
        assert_eq!(statistics(&found), expected);
    });
}

#[test]
fn statistics_that_are_remembered_are_put_back() {
    each_device(|target| {
        let (model, autocast, expected) = trained(target);
        let mut scaler = scaler();
        scaler.remember_statistics(&model);
        let first = First {
            model,
            autocast,
            scaler,
        };
        let found = first.step([f32::NAN, f32::NAN], |_| ());
        assert_eq!(statistics(&found), expected);
    });
}

#[test]
fn a_broken_step_of_a_run_leaves_the_statistics_of_before() {
    each_device(|target| {
        for broken in [f32::NAN, f32::INFINITY] {
            let (mut model, _, mut expected) = trained(target);
            let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
            let (mut scaler, mut optim) = (scaler(), SgdConfig::new().init());
            // The first two are broken, and one in the middle.
            let factors = [broken, broken, 1.0, broken, 1.0];
            for (step, factor) in factors.into_iter().enumerate() {
                let device = model.norm.gamma.base().device();
                let x = tensor::<2>(step as u64, [5, 6], &device).mul_scalar(factor);
                let loss = autocast.run(&model, x, |model, x| model.forward(x).square().mean());
                let grads = scaler.scale(loss.unwrap()).unwrap().backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = scaler.step(&mut optim, 0.1, model, grads).unwrap();

                assert_eq!(scaler.report().unwrap().skipped, factor != 1.0);
                if factor == 1.0 {
                    assert_ne!(statistics(&model), expected, "step {step}");
                    expected = statistics(&model);
                }
                assert_eq!(statistics(&model), expected, "step {step}");
            }
        }
    });
}

#[test]
fn other_threads_may_run_many_models_before_a_broken_step_is_taken_back() {
    let targets = devices();
    // Forty models compile forty times on a GPU.
    for target in targets.iter().filter(|target| !target.is_gpu()) {
        let (model, _, expected) = trained(target);
        let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        let run = |model: &Normalized, factor: f32| {
            let device = model.norm.gamma.base().device();
            let x = tensor::<2>(1, [5, 6], &device).mul_scalar(factor);
            let loss = autocast.run(model, x, |model, x| model.forward(x).square().mean());
            loss.unwrap()
        };
        let (mut scaler, mut optim) = (scaler(), SgdConfig::new().init());
        let loss = run(&model, f32::NAN);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..40 {
                    run(&Normalized::new(&target.device.clone().autodiff()), 1.0);
                }
            });
        });
        let grads = GradientsParams::from_grads(scaler.scale(loss).unwrap().backward(), &model);
        let model = scaler.step(&mut optim, 0.1, model, grads).unwrap();

        assert!(scaler.report().unwrap().skipped);
        assert_eq!(statistics(&model), expected, "{}", target.name);
    }
}

#[test]
fn no_wait_mode_mends_a_broken_first_step_of_two_passes() {
    each_device(|target| {
        let (model, autocast, expected) = trained(target);
        let mut training = Speculative::new(model, SgdConfig::new().init(), scaler());
        training
            .step(0.1, |model, scaler| {
                let _ = gradients(model, &autocast, scaler, 0, f32::NAN)?;
                gradients(model, &autocast, scaler, 1, 1.0)?;
                gradients(model, &autocast, scaler, 2, f32::NAN)
            })
            .unwrap();
        let (found, ..) = training.finish().unwrap();
        assert_eq!(statistics(&found), expected);
    });
}
