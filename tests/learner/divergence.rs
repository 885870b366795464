//! What cannot go on stops the training.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{GradientsAccumulator, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn::train::Learner;
use burn_lean_amp::{
    Amp, AmpError, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, GradScalerConfig,
    SkipCause,
};

use crate::devices::on_tracked;
use crate::support::{
    Batch, Mlp, amp, batch, bits, samples, samples_with_infinity, scaler, training,
};
use crate::training::step;

#[test]
fn a_diverged_training_stops_with_the_model_before_it() {
    on_tracked(|device| {
        let directory = tempfile::tempdir().unwrap();
        let config = scaler().with_max_consecutive_skips(Some(3));
        let amp = amp(&device, FloatDType::F16, &config);
        let monitor = amp.monitor();
        let before = bits(amp.model());
        let every_other: Vec<usize> = (0..40).step_by(2).collect();

        let result = training(directory.path(), samples_with_infinity(40, &every_other), 4)
            .with_interrupter(monitor.interrupter())
            .num_epochs(5)
            .launch(Learner::new(amp, SgdConfig::new().init(), 0.1));

        assert_eq!(
            monitor.error(),
            Some(AmpError::Diverged {
                consecutive: 3,
                loss_scale: 512.0,
                cause: SkipCause::LossNotFinite,
                parameter: Some("first.weight".into()),
            })
        );
        let error = result.error.unwrap().to_string();
        assert_says!(error, "3 steps in a row were skipped");
        assert_eq!(result.model.state().unwrap().steps, 3);
        assert_eq!(bits(result.model.model()), before);
    });
}

/// All trainings of one model have its interrupter.
#[test]
fn a_training_after_one_that_failed_runs_to_its_end() {
    on_tracked(|device| {
        let directory = tempfile::tempdir().unwrap();
        let config = scaler().with_max_consecutive_skips(Some(2));
        let amp = amp(&device, FloatDType::F16, &config);
        let monitor = amp.monitor();
        let train = |amp: Amp<Mlp>, rows| {
            let schedule = amp.lr_scheduler(0.1).unwrap();
            training(directory.path(), rows, 4)
                .with_interrupter(monitor.interrupter())
                .launch(Learner::new(amp, SgdConfig::new().init(), schedule))
        };
        let failed = train(amp, samples_with_infinity(16, &[0, 4, 8, 12]));
        assert_matches!(monitor.error(), Some(AmpError::Diverged { .. }));
        let steps = failed.model.state().unwrap().steps;

        monitor.reset();
        assert!(monitor.report().is_none() && !monitor.interrupter().should_stop());
        let result = train(failed.model.train(), samples(16));
        assert!(result.error.is_none(), "{:?}", result.error);
        assert_eq!(monitor.error(), None);
        assert_eq!(result.model.state().unwrap().steps, steps + 4);
    });
}

#[test]
fn a_loss_in_half_precision_is_an_error_and_no_step() {
    let device = Device::flex().autodiff();
    let model = HalfLoss {
        mlp: Mlp::new(&device),
    };
    let amp = Amp::new(model, &AutocastConfig::new(FloatDType::F16), &scaler()).unwrap();
    let monitor = amp.monitor();
    let before = bits(amp.model());
    let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);

    step(&mut learner, &samples(4), &device);

    assert_matches!(monitor.error(), Some(AmpError::LossDtype { .. }));
    assert_eq!(bits(learner.model().model()), before);
}

#[test]
fn a_model_off_the_autodiff_device_is_an_error_and_no_panic() {
    let device = Device::flex();
    let amp = amp(&device, FloatDType::F16, &scaler());
    let monitor = amp.monitor();
    let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);

    step(&mut learner, &samples(4), &device);

    assert_eq!(monitor.error(), Some(AmpError::NoGradients));
}

#[test]
fn a_model_that_is_frozen_is_an_error_and_no_panic() {
    let device = Device::flex().autodiff();
    let autocast = AutocastConfig::new(FloatDType::F16);
    let amp = Amp::new(Mlp::new(&device).no_grad(), &autocast, &scaler()).unwrap();
    let monitor = amp.monitor();
    let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);

    step(&mut learner, &samples(4), &device);

    assert_eq!(monitor.error(), Some(AmpError::NoGradients));
}

/// The gradients of the other passes are those of a part of the step.
#[test]
fn a_step_of_which_one_pass_failed_is_not_taken() {
    let device = Device::flex().autodiff();
    for failing in 0..2 {
        let model = HalfLoss {
            mlp: Mlp::new(&device),
        };
        let amp = Amp::new(model, &AutocastConfig::new(FloatDType::F16), &scaler()).unwrap();
        let monitor = amp.monitor();
        let before = bits(amp.model());
        let schedule = amp.lr_scheduler(0.1).unwrap();
        let mut learner = Learner::new(amp, SgdConfig::new().init(), schedule);
        let mut take = |failing: Option<usize>| {
            let mut sum = GradientsAccumulator::new();
            for pass in 0..2 {
                let rows = if Some(pass) == failing { 4 } else { 5 };
                let grads = learner.train_step(batch(&samples(rows), &device)).grads;
                sum.accumulate(&learner.model(), grads);
            }
            learner.lr_step();
            learner.optimizer_step(sum.grads());
            let amp = learner.model();
            (bits(amp.model()), amp.state().unwrap().steps)
        };

        assert_eq!(take(Some(failing)), (before.clone(), 1));
        assert_matches!(monitor.error(), Some(AmpError::LossDtype { .. }));
        let report = monitor.report().unwrap();
        assert_eq!(report.overflow.unwrap().cause, SkipCause::LossNotFinite);
        let (after, steps) = take(None);
        assert_ne!(after, before);
        assert_eq!(steps, 2);
    }
}

/// The loss scale is a float parameter, too: weights are clipped in `with_after_step`.
#[test]
fn a_clip_of_the_whole_instead_of_the_model_is_an_error_and_no_step() {
    struct Clip;
    impl ModuleMapper for Clip {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let requires_grad = param.is_require_grad();
            param.map(|value| {
                let clipped = value.detach().clamp(-0.05, 0.05);
                clipped.detach().set_require_grad(requires_grad)
            })
        }
    }
    let device = Device::flex().autodiff();
    let amp = amp(&device, FloatDType::F16, &scaler()).map(&mut Clip);
    let monitor = amp.monitor();
    let before = bits(amp.model());
    let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);

    step(&mut learner, &samples(4), &device);

    let Some(error @ AmpError::Record { .. }) = monitor.error() else {
        panic!("{monitor:?}")
    };
    assert_says!(error, "is not the inverse");
    assert_eq!(bits(learner.model().model()), before);
}

#[test]
fn a_bad_configuration_gives_the_model_back() {
    on_tracked(|device| {
        let config = GradScalerConfig::for_dtype(FloatDType::F16).with_max_norm(Some(-1.0));

        let rejected = Amp::new(
            Mlp::new(&device),
            &AutocastConfig::new(FloatDType::F16),
            &config,
        )
        .unwrap_err();

        assert_matches!(
            rejected.error(),
            AmpError::InvalidConfig {
                field: "max_norm",
                ..
            }
        );
        assert_eq!(bits(rejected.value()), bits(&Mlp::new(&device)));
    });
}

/// Computes its loss inside the region, of an even number of rows.
#[derive(Module, Debug)]
struct HalfLoss {
    mlp: Mlp,
}

impl AmpTrainStep for HalfLoss {
    type Input = Batch;
    type Output = ();

    fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, ()) {
        let even = batch.x.dims()[0].is_multiple_of(2);
        let mut inside = None;
        let y = autocast.forward(batch.x, |x| {
            let y = self.mlp.first.forward(x);
            inside = Some(y.clone().mean());
            y
        });
        let loss = if even { inside.unwrap() } else { y.mean() };
        (loss, ())
    }
}

impl AmpInferenceStep for HalfLoss {
    type Input = Batch;
    type Output = ();

    fn inference_step(&self, _autocast: &Autocast, _batch: Batch) {}
}
