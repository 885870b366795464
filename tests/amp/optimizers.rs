//! Several optimizers with one scaler; gradients and states that belong to others.

use burn::optim::{
    AdamConfig, AdamWConfig, GradientsParams, LionConfig, ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, Checkpoints, GradScaler, GradScalerConfig, ResumableOptimizer, SkipCause,
};

use crate::model::{Mlp, bits, gradients, loss, one_gradient, prepared};
use crate::support::each_device;

fn scaler() -> GradScaler {
    GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap()
}

/// Two networks, of which the second has a NaN in its batch.
struct Two {
    models: [Mlp; 2],
    autocast: Autocast,
}

impl Two {
    const FACTORS: [f32; 2] = [1.0, f32::NAN];

    fn new(device: &Device) -> Self {
        let (first, autocast) = prepared(1, FloatDType::F16, device);
        let (second, _) = prepared(2, FloatDType::F16, device);
        Self {
            models: [first, second],
            autocast,
        }
    }

    fn loss(&self, which: usize) -> Tensor<1> {
        let model = &self.models[which];
        loss(model, &self.autocast, 0, Self::FACTORS[which])
    }

    fn scaled(&self, which: usize, scaler: &mut GradScaler) -> GradientsParams {
        let loss = scaler.scale(self.loss(which)).unwrap();
        GradientsParams::from_grads(loss.backward(), &self.models[which])
    }

    fn check(&self, which: usize, scaler: &GradScaler) {
        let report = scaler.report().unwrap();
        match which {
            0 => {
                let expected = self.loss(0).into_scalar::<f32>();
                assert_eq!(report.loss, Some(expected));
                assert!(!report.skipped);
            }
            _ => {
                assert!(report.loss.unwrap().is_nan());
                let overflow = report.overflow.as_ref().unwrap();
                assert_eq!(overflow.cause, SkipCause::LossNotFinite);
            }
        }
    }
}

#[test]
fn the_report_of_an_optimizer_shows_its_own_loss() {
    each_device(|target| {
        for order in [[0, 1], [1, 0]] {
            let two = Two::new(&target.device);
            let optim = || SgdConfig::new().init();
            // Each served before the next loss is scaled.
            let mut one_by_one = scaler();
            for which in order {
                let grads = two.scaled(which, &mut one_by_one);
                let unscaled = one_by_one.unscale(&two.models[which], grads).unwrap();
                let model = two.models[which].clone();
                let _ = one_by_one
                    .apply(&mut optim(), 0.1, model, unscaled)
                    .unwrap();
                two.check(which, &one_by_one);
            }
            one_by_one.update().unwrap();
            assert_eq!(one_by_one.loss_scale(), 32768.0);

            // Both scaled first: told apart by what their gradients are, or as it is said.
            for said in [false, true] {
                let mut together = scaler();
                let grads = order.map(|which| two.scaled(which, &mut together));
                for (which, grads) in order.into_iter().zip(grads) {
                    let model = two.models[which].clone();
                    let mut unscaled = together.unscale(&model, grads).unwrap();
                    if said {
                        unscaled = unscaled.with_loss(&two.loss(which));
                    }
                    let _ = together.apply(&mut optim(), 0.1, model, unscaled).unwrap();
                    two.check(which, &together);
                }
            }
        }
    });
}

#[test]
fn finite_losses_of_two_optimizers_are_told_apart_where_it_is_said() {
    let (first, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let (second, _) = prepared(2, FloatDType::F16, &Device::flex());
    let mut scaler = scaler();
    let losses = [&first, &second].map(|model| loss(model, &autocast, 0, 1.0));
    let expected = losses.clone().map(|loss| loss.into_scalar::<f32>());
    assert_ne!(expected[0], expected[1]);
    let unscaled = [0, 1].map(|which| {
        let model = [&first, &second][which];
        let grads = scaler.scale(losses[which].clone()).unwrap().backward();
        let grads = GradientsParams::from_grads(grads, model);
        let unscaled = scaler.unscale(model, grads).unwrap();
        unscaled.with_loss(&losses[which])
    });
    for ((model, unscaled), expected) in [first, second].into_iter().zip(unscaled).zip(expected) {
        let mut optim = SgdConfig::new().init();
        let _ = scaler.apply(&mut optim, 0.1, model, unscaled).unwrap();
        assert_eq!(scaler.report().unwrap().loss, Some(expected));
    }
}

#[test]
fn the_gradients_of_another_model_are_refused_and_the_model_comes_back() {
    each_device(|target| {
        let (model, _) = prepared(1, FloatDType::F16, &target.device);
        let (other, _) = prepared(1, FloatDType::F16, &target.device);
        let before = bits(&model);
        let mut scaler = scaler();
        let unscaled = scaler
            .unscale(&other, one_gradient(&other, &[1.0]))
            .unwrap();
        let mut optim = SgdConfig::new().init();
        let rejected = scaler.apply(&mut optim, 0.1, model, unscaled).unwrap_err();
        let expected = AmpError::ForeignGradients {
            path: "first.weight".into(),
        };
        assert_eq!(*rejected.error(), expected);
        assert!(rejected.to_string().contains("`first.weight`"));
        let model = rejected.into_value();
        assert_eq!(bits(&model), before);
        assert_eq!(scaler.update(), Err(AmpError::NothingToUpdate));

        // A clone has the identities of its original.
        let unscaled = scaler.unscale(&model, one_gradient(&model, &[1.0]));
        let clone = model.clone();
        let stepped = scaler.apply(&mut optim, 0.1, clone, unscaled.unwrap());
        assert_ne!(bits(&stepped.unwrap()), before);
    });
}

/// A checkpoint after one step with AdamW.
fn checkpoint(folder: &std::path::Path) -> (Checkpoints, Mlp, ModuleOptimizer) {
    let (model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let (mut optim, mut scaler) = (AdamWConfig::new().init(), scaler());
    let grads = gradients(&model, &autocast, &mut scaler, 0, 1.0).unwrap();
    let model = scaler.step(&mut optim, 0.1, model, grads).unwrap();
    let checkpoints = Checkpoints::new(folder);
    checkpoints.save(1, &model, &optim, &scaler).unwrap();
    (checkpoints, model, optim)
}

#[test]
fn the_state_of_another_kind_of_optimizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoints, model, _) = checkpoint(folder.path());
    let before = bits(&model);
    for other in [
        LionConfig::new().init(),
        RmsPropConfig::new().init(),
        SgdConfig::new().init(),
    ] {
        let (fresh, _) = prepared(1, FloatDType::F16, &Device::flex());
        let fresh_before = bits(&fresh);
        let rejected = checkpoints.load(1, fresh, other).err().unwrap();
        assert_matches!(rejected.error(), AmpError::Record { .. });
        assert_says!(rejected, "optimizer.bpk", "another kind");
        assert_eq!(bits(&rejected.into_value()), fresh_before);
    }
    // Of the same moments.
    for same in [AdamWConfig::new().init(), AdamConfig::new().init()] {
        let (fresh, _) = prepared(3, FloatDType::F16, &Device::flex());
        let (loaded, ..) = checkpoints.load(1, fresh, same).unwrap();
        assert_eq!(bits(&loaded), before);
    }
}

#[test]
fn a_resumable_optimizer_reads_and_writes_the_records_of_a_plain_one() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoints, _, plain) = checkpoint(folder.path());
    let resumable = || ResumableOptimizer::new(AdamWConfig::new().build(), &Device::flex()).init();
    let step = |model: Mlp, optim: &mut ModuleOptimizer| {
        let (_, autocast) = prepared(1, FloatDType::F16, &Device::flex());
        let mut scaler = scaler();
        let grads = gradients(&model, &autocast, &mut scaler, 7, 1.0).unwrap();
        bits(&scaler.step(optim, 0.1, model, grads).unwrap())
    };
    let load = |optim| {
        let (fresh, _) = prepared(3, FloatDType::F16, &Device::flex());
        let (model, optim, _) = checkpoints.load(1, fresh, optim).unwrap();
        (model, optim)
    };
    let (model, _) = load(AdamWConfig::new().init());
    let mut expected_optim = plain.clone();
    let expected = step(model, &mut expected_optim);

    let (model, mut optim) = load(resumable());
    assert_eq!(optim.to_record().len(), plain.to_record().len());
    assert_eq!(step(model, &mut optim), expected);
    // And back, into a plain one.
    let (model, optim) = load(resumable());
    checkpoints.save(1, &model, &optim, &scaler()).unwrap();
    let (model, mut optim) = load(AdamWConfig::new().init());
    assert_eq!(step(model, &mut optim), expected);
}

/// Both losses are scaled before the first step, which overflows and lowers the scale.
#[test]
fn a_second_step_divides_by_the_scale_that_its_loss_was_multiplied_by() {
    each_device(|target| {
        let model = Mlp::new(1, &target.device.clone().autodiff());
        let loss = |factor: f32| {
            let device = model.first.weight.base().device();
            let x = crate::support::tensor::<2>(7, [5, 6], &device).mul_scalar(factor);
            model.forward(x).square().mean()
        };
        let gradients = |loss: Tensor<1>| GradientsParams::from_grads(loss.backward(), &model);
        let sgd = || SgdConfig::new().init();
        let expected = sgd().step(0.1, model.clone(), gradients(loss(1.0)));
        let mut scaler = scaler();
        let before = scaler.loss_scale();
        let [first, second] = [1e30, 1.0].map(|factor| scaler.scale(loss(factor)).unwrap());
        let (first, second) = (gradients(first), gradients(second));
        let _ = scaler.step(&mut sgd(), 0.1, model.clone(), first).unwrap();
        assert!(scaler.report().unwrap().skipped);
        assert_eq!(scaler.loss_scale(), before / 2.0);
        let found = scaler.step(&mut sgd(), 0.1, model.clone(), second).unwrap();
        assert_eq!(bits(&found), bits(&expected));
    });
}
