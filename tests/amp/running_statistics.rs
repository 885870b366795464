//! A batch with infinities or NaN leaves none in a BatchNorm.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, Checkpoints, Fallback, GradScaler, GradScalerConfig,
    Speculative,
};
use burn_lean::reparam::own_copy;

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

/// The loss of a `run`; `factor` breaks the batch.
fn run_loss(model: &Normalized, step: u64, factor: f32) -> Tensor<1> {
    let device = model.norm.gamma.base().device();
    let x = tensor::<2>(step, [5, 6], &device).mul_scalar(factor);
    let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
    let loss = autocast.run(model, x, |model, x| model.forward(x).square().mean());
    loss.unwrap()
}

/// As a GAN is trained: the pass of a generator's step goes through its critic.
#[test]
fn a_skipped_step_of_one_model_leaves_no_nan_in_another() {
    each_device(|target| {
        for is_run in [true, false] {
            let device = target.device.clone().autodiff();
            let models = (
                LinearConfig::new(6, 6).init(&device),
                Normalized::new(&device),
            );
            let config = AutocastConfig::new(FloatDType::F16).with_fallback(Fallback::Emulate);
            let ((generator, mut critic), region) = config.prepare(models).unwrap();
            let (mut scaler, mut optim) = (scaler(), SgdConfig::new().init());
            let mut step = |scaler: &mut GradScaler, critic: Normalized, batch: u64| {
                let grads = match is_run {
                    true => {
                        let loss = scaler.scale(run_loss(&critic, batch, 1.0)).unwrap();
                        GradientsParams::from_grads(loss.backward(), &critic)
                    }
                    false => gradients(&critic, &region, scaler, batch, 1.0).unwrap(),
                };
                let critic = scaler.step(&mut optim, 0.1, critic, grads).unwrap();
                assert!(!scaler.report().unwrap().skipped);
                critic
            };
            critic = step(&mut scaler, critic, 1);
            let expected = statistics(&critic);

            let both = (generator.clone(), critic.clone());
            let z = tensor::<2>(2, [5, 6], &device).mul_scalar(f32::INFINITY);
            let loss = match is_run {
                true => {
                    let run = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
                    let loss = run.run(&both, z, |(generator, critic), z| {
                        critic.forward(generator.forward(z)).square().mean()
                    });
                    loss.unwrap()
                }
                false => region
                    .forward(z, |z| both.1.forward(both.0.forward(z)))
                    .square()
                    .mean(),
            };
            let grads = scaler.scale(loss).unwrap().backward();
            let grads = GradientsParams::from_grads(grads, &generator);
            let unscaled = scaler.unscale(&generator, grads).unwrap();
            let optim = &mut SgdConfig::new().init();
            let _ = scaler.apply(optim, 0.1, generator, unscaled).unwrap();
            scaler.update().unwrap();
            assert!(scaler.report().unwrap().skipped);

            // Its pass cannot be told from the broken one; the next goes on from what is known.
            critic = step(&mut scaler, critic, 3);
            assert_eq!(statistics(&critic), expected);
            critic = step(&mut scaler, critic, 4);
            let found = statistics(&critic);
            assert!(found.iter().all(|x| x.is_finite()), "{found:?}");
            assert_ne!(found, expected);
        }
    });
}

/// Both losses are there before the first of the two steps.
#[test]
fn a_step_that_is_taken_before_that_of_another_model_is_skipped_is_mended_in_the_next() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let generator = LinearConfig::new(6, 6).init(&device);
        let mut critic = Normalized::new(&device);
        let (mut of_critic, mut of_generator) = (scaler(), scaler());
        let mut optim = SgdConfig::new().init();
        let grads = |scaler: &mut GradScaler, critic: &Normalized, batch: u64| {
            let loss = scaler.scale(run_loss(critic, batch, 1.0)).unwrap();
            GradientsParams::from_grads(loss.backward(), critic)
        };
        let first = grads(&mut of_critic, &critic, 1);
        critic = of_critic.step(&mut optim, 0.1, critic, first).unwrap();

        let [second, more] = [3, 5].map(|batch| grads(&mut of_critic, &critic, batch));
        let both = (generator.clone(), critic.clone());
        let z = tensor::<2>(2, [5, 6], &device).mul_scalar(f32::INFINITY);
        let run = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        let loss = run.run(&both, z, |(generator, critic), z| {
            critic.forward(generator.forward(z)).square().mean()
        });
        let broken = of_generator.scale(loss.unwrap()).unwrap().backward();
        let broken = GradientsParams::from_grads(broken, &generator);
        critic = of_critic.step(&mut optim, 0.1, critic, second).unwrap();
        critic = of_critic.step(&mut optim, 0.1, critic, more).unwrap();
        let optim_of_generator = &mut SgdConfig::new().init();
        let _ = of_generator
            .step(optim_of_generator, 0.1, generator, broken)
            .unwrap();
        assert!(of_generator.report().unwrap().skipped);

        let third = grads(&mut of_critic, &critic, 4);
        critic = of_critic.step(&mut optim, 0.1, critic, third).unwrap();
        assert!(!of_critic.report().unwrap().skipped);
        let found = statistics(&critic);
        assert!(found.iter().all(|x| x.is_finite()), "{found:?}");
        // Those of the first step, not those of a new BatchNorm.
        assert!(found[..4].iter().all(|mean| *mean != 0.0), "{found:?}");
    });
}

/// As of a checkpoint that was saved between the broken pass and the next step.
#[test]
fn broken_statistics_of_a_loaded_model_are_mended_in_its_first_step() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let critic = Normalized::new(&device);
        let mut scaler = scaler();
        let mut optim = SgdConfig::new().init();
        let _ = run_loss(&critic, 1, f32::NAN);
        let critic = critic.valid().train();
        scaler.remember_statistics(&critic);
        let grads = |scaler: &mut GradScaler, critic: &Normalized, batch: u64| {
            let loss = scaler.scale(run_loss(critic, batch, 1.0)).unwrap();
            GradientsParams::from_grads(loss.backward(), critic)
        };
        let first = grads(&mut scaler, &critic, 1);
        let critic = scaler.step(&mut optim, 0.1, critic, first).unwrap();
        let second = grads(&mut scaler, &critic, 2);
        let critic = scaler.step(&mut optim, 0.1, critic, second).unwrap();
        let found = statistics(&critic);
        assert!(found.iter().all(|x| x.is_finite()), "{found:?}");
    });
}

#[test]
fn a_broken_step_of_a_run_does_not_get_the_statistics_of_a_copy() {
    each_device(|target| {
        let (model, _, expected) = trained(target);
        // Of the same identities.
        let copy = own_copy(&model);
        let _ = run_loss(&copy, 20, 1.0);
        assert_ne!(statistics(&copy), expected);

        let mut scaler = scaler();
        let loss = scaler.scale(run_loss(&model, 1, f32::NAN)).unwrap();
        let _ = run_loss(&copy, 2, 1.0);
        let of_copy = statistics(&copy);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let optim = &mut SgdConfig::new().init();
        let model = scaler.step(optim, 0.1, model, grads).unwrap();

        assert!(scaler.report().unwrap().skipped);
        assert_eq!(statistics(&model), expected);
        assert_eq!(statistics(&copy), of_copy);
    });
}

/// It is on the device without autodiff, which is equal to that with it.
#[test]
fn a_first_step_is_skipped_beside_a_frozen_part_for_evaluation() {
    #[derive(Module, Debug)]
    struct Both {
        first: Normalized,
        second: Normalized,
    }
    each_device(|target| {
        // Another network, and a copy, which has the identities of what is trained.
        for (is_copy, frozen) in [(false, 0usize), (false, 1), (true, 0), (true, 1)] {
            let (trained, autocast) = prepared(target);
            let evaluated = match is_copy {
                true => trained.valid().no_grad(),
                false => prepared(target).0.valid().no_grad(),
            };
            let (first, second) = match frozen {
                0 => (evaluated, trained),
                _ => (trained, evaluated),
            };
            let model = Both { first, second };
            let (mut scaler, mut optim) = (scaler(), SgdConfig::new().init());
            let student = [&model.second, &model.first][frozen];
            let grads = gradients(student, &autocast, &mut scaler, 0, f32::INFINITY).unwrap();
            let model = scaler.step(&mut optim, 0.1, model, grads).unwrap();

            assert!(scaler.report().unwrap().skipped);
            for (place, part) in [model.first, model.second].iter().enumerate() {
                let mean = part.norm.running_mean.value();
                assert_eq!(mean.is_autodiff(), place != frozen, "{is_copy}");
                assert_eq!(statistics(part), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
            }
        }
    });
}

#[test]
fn a_skipped_step_leaves_a_struct_alone_that_has_the_name_of_burns() {
    #[derive(Module, Debug)]
    struct BatchNorm {
        running_mean: Param<Tensor<1>>,
    }
    #[derive(Module, Debug)]
    struct Own {
        factor: Param<Tensor<1>>,
        norm: BatchNorm,
    }
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let limits = Tensor::full([2], f32::NEG_INFINITY, &device);
        let model = Own {
            factor: Param::from_tensor(Tensor::ones([2], &device)),
            norm: BatchNorm {
                running_mean: Param::from_tensor(limits).freeze(),
            },
        };
        let mut scaler = scaler();
        let loss = model.factor.val().mul_scalar(f32::INFINITY).sum();
        let grads = scaler.scale(loss).unwrap().backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let optim = &mut SgdConfig::new().init();
        let model = scaler.step(optim, 0.1, model, grads).unwrap();

        assert!(scaler.report().unwrap().skipped);
        let found = values(model.norm.running_mean.val());
        assert_eq!(found, [f32::NEG_INFINITY; 2]);
    });
}
