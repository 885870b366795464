//! One device: what a step does, what the dashboard shows.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleDisplay, ParamGroup};
use burn::optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType};
use burn::train::metric::LossMetric;
use burn::train::{InferenceStep, Learner, TrainStep};
use burn_lean_amp::{
    Amp, AmpTrainStep, AutocastConfig, DynamicLossScale, Fallback, GradScalerConfig, LossScale,
    LossScaleMetric, SkipCause, SkippedStepsMetric,
};

use crate::devices::{each_device, on_tracked};
use crate::support::{
    Batch, Mlp, Recorder, Row, amp, batch, bits, error_of, samples, samples_with_infinity, scaler,
    training,
};

#[test]
fn a_model_trains_in_f16_on_every_device() {
    each_device(|target| trains_to_a_lower_loss(target.device.clone(), FloatDType::F16));
}

#[test]
fn a_model_trains_in_bf16_on_flex() {
    trains_to_a_lower_loss(Device::flex(), FloatDType::BF16);
}

fn trains_to_a_lower_loss(device: Device, dtype: FloatDType) {
    let device = device.autodiff();
    let directory = tempfile::tempdir().unwrap();
    let amp = amp(&device, dtype, &GradScalerConfig::for_dtype(dtype));
    let before = error_of(amp.model(), &device);
    let schedule = amp.lr_scheduler(0.1).unwrap();

    let result = training(directory.path(), samples(16), 4)
        .num_epochs(10)
        .launch(Learner::new(amp, SgdConfig::new().init(), schedule));

    assert!(result.error.is_none(), "{:?}", result.error);
    let after = error_of(result.model.model(), &device);
    assert!(after < 0.1 * before, "{before} -> {after}");
}

#[test]
fn a_batch_with_infinity_is_one_skipped_step() {
    on_tracked(|device| {
        let directory = tempfile::tempdir().unwrap();
        let amp = amp(
            &device,
            FloatDType::F16,
            &GradScalerConfig::for_dtype(FloatDType::F16),
        );
        let monitor = amp.monitor();
        let before = bits(amp.model());
        let schedule = amp.lr_scheduler(0.1).unwrap();

        let result = training(directory.path(), samples_with_infinity(4, &[2]), 4)
            .launch(Learner::new(amp, SgdConfig::new().init(), schedule));

        let state = result.model.state().unwrap();
        assert_eq!(
            (state.steps, state.skipped_steps, state.scale),
            (1, 1, 32768.0)
        );
        assert_eq!(bits(result.model.model()), before);
        let report = monitor.report().unwrap();
        let overflow = report.overflow.unwrap();
        assert_eq!(overflow.cause, SkipCause::LossNotFinite);
        assert_eq!(overflow.first(), Some("first.weight"));
    });
}

#[test]
fn an_overflow_of_the_scaled_gradients_is_told_from_a_broken_loss() {
    on_tracked(|device| {
        let scale = LossScale::Dynamic(DynamicLossScale {
            init_scale: 2f32.powi(40),
            ..Default::default()
        });
        let amp = amp(&device, FloatDType::F16, &GradScalerConfig::new(scale));
        let monitor = amp.monitor();
        let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);

        step(&mut learner, &samples(4), &device);

        let report = monitor.report().unwrap();
        assert_eq!(report.overflow.unwrap().cause, SkipCause::ScaleTooHigh);
        assert!(report.loss.unwrap().is_finite());
    });
}

#[test]
fn an_accumulated_step_is_the_step_of_the_whole_batch() {
    // Sums of products of small powers of two: exact in F16, so the order does not matter.
    let rows = [
        ([1.0, 0.5], 0.0),
        ([2.0, 1.0], 1.0),
        ([0.5, 1.0], 2.0),
        ([1.0, 2.0], 0.5),
    ];
    let device = Device::flex().autodiff();
    let scaler = GradScalerConfig::new(LossScale::Dynamic(DynamicLossScale {
        init_scale: 64.0,
        growth_interval: 1,
        ..Default::default()
    }));
    let train = |batch_size, accumulation, lr| {
        let directory = tempfile::tempdir().unwrap();
        let amp = amp(&device, FloatDType::F16, &scaler);
        training(directory.path(), rows.to_vec(), batch_size)
            .grads_accumulation(accumulation)
            .launch(Learner::new(amp, SgdConfig::new().init(), lr))
            .model
    };

    // Each micro-batch has a mean of its own, and Burn adds the gradients up.
    let whole = train(4, 1, 0.125);
    let accumulated = train(2, 2, 0.0625);

    assert_eq!(bits(accumulated.model()), bits(whole.model()));
    let state = accumulated.state().unwrap();
    assert_eq!((state.steps, state.scale), (1, 128.0));
    assert_eq!(state, whole.state().unwrap());
}

#[test]
fn the_reported_loss_is_the_mean_over_the_accumulated_batches() {
    on_tracked(|device| {
        let amp = amp(&device, FloatDType::F16, &scaler());
        let monitor = amp.monitor();
        let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);
        let mut accumulator = GradientsAccumulator::new();
        let mut losses = Vec::new();

        for rows in [samples(4), samples(7)] {
            let output = learner.train_step(batch(&rows, &device));
            losses.push(output.item.loss.into_scalar::<f32>());
            accumulator.accumulate(&learner.model(), output.grads);
        }
        learner.lr_step();
        learner.optimizer_step(accumulator.grads());

        let mean = (losses[0] + losses[1]) / 2.0;
        assert_eq!(monitor.report().unwrap().loss, Some(mean));
    });
}

#[test]
fn the_dashboard_shows_loss_scale_and_skipped_steps() {
    on_tracked(|device| {
        let directory = tempfile::tempdir().unwrap();
        let amp = amp(
            &device,
            FloatDType::F16,
            &GradScalerConfig::for_dtype(FloatDType::F16),
        );
        let monitor = amp.monitor();
        let recorder = Recorder::default();

        training(directory.path(), samples_with_infinity(8, &[7]), 4)
            .renderer(Box::new(recorder.clone()))
            .metrics((LossMetric::new(),))
            .metric_train_numeric(LossScaleMetric::new(&monitor))
            .metric_train_numeric(SkippedStepsMetric::new(&monitor))
            .launch(Learner::new(amp, SgdConfig::new().init(), 0.1));

        assert_eq!(recorder.values("Loss Scale").last(), Some(&32768.0));
        assert_eq!(recorder.values("Skipped Steps").last(), Some(&1.0));
        // The loss in the dashboard is the unscaled one.
        assert!(recorder.values("Loss")[0] < 10.0);
    });
}

#[test]
fn parameter_groups_have_the_paths_of_the_inner_model() {
    on_tracked(|device| {
        let amp = amp(&device, FloatDType::F16, &scaler());
        let before = bits(amp.model());
        let lr = ModuleLrScheduler::new(amp.lr_scheduler(0.0).unwrap()).with_group(
            ParamGroup::from_path("second.weight"),
            amp.lr_scheduler(0.1).unwrap(),
        );
        let mut learner = Learner::new(amp, SgdConfig::new().init(), lr);

        step(&mut learner, &samples(4), &device);

        let after = bits(learner.model().model());
        let moved: Vec<&str> = (0..before.len())
            .filter(|&i| before[i] != after[i])
            .map(|i| after[i].0.as_str())
            .collect();
        assert_eq!(moved, ["second.weight"]);
    });
}

#[test]
fn clones_and_forks_have_states_of_their_own() {
    on_tracked(|device| {
        let amp = amp(&device, FloatDType::F16, &scaler());
        let kept = Learner::new(amp, SgdConfig::new().init(), 0.1);
        let mut cloned = kept.clone();
        let mut forked = kept.clone();
        forked.fork(&device);

        step(&mut cloned, &samples_with_infinity(4, &[0]), &device);
        step(&mut forked, &samples(4), &device);
        step(&mut forked, &samples(4), &device);

        let steps = |learner: &Learner<Amp<Mlp>>| {
            let state = learner.model().state().unwrap();
            (state.steps, state.skipped_steps)
        };
        assert_eq!(steps(&kept), (0, 0));
        assert_eq!(steps(&cloned), (1, 1));
        assert_eq!(steps(&forked), (2, 0));
    });
}

#[test]
fn the_state_survives_validation_and_back() {
    on_tracked(|device| {
        let amp = amp(&device, FloatDType::F16, &scaler());
        let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);
        step(&mut learner, &samples_with_infinity(4, &[0]), &device);
        let before = learner.model();

        let mut back = Learner::new(before.valid().train(), SgdConfig::new().init(), 0.1);
        assert_eq!(back.model().state(), before.state());

        step(&mut back, &samples(4), &device);
        step(&mut learner, &samples(4), &device);
        assert_eq!(back.model().state(), learner.model().state());
        assert_eq!(bits(back.model().model()), bits(learner.model().model()));
    });
}

#[test]
fn a_model_without_loss_scaling_takes_every_step() {
    on_tracked(|device| {
        let amp = amp(
            &device,
            FloatDType::BF16,
            &GradScalerConfig::new(LossScale::None),
        );
        let before = bits(amp.model());
        let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);

        step(&mut learner, &samples(4), &device);

        assert_ne!(bits(learner.model().model()), before);
        assert_eq!(learner.model().state().unwrap().scale, 1.0);
    });
}

#[test]
fn a_step_is_the_step_of_the_plain_grad_scaler() {
    on_tracked(|device| {
        let config = GradScalerConfig::new(LossScale::Static(48.0)).with_max_norm(Some(0.01));
        let mut learner = Learner::new(
            amp(&device, FloatDType::F16, &config),
            SgdConfig::new().init(),
            0.1,
        );
        let model = Mlp::new(&device);
        let (mut model, autocast) = AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .prepare(model)
            .unwrap();
        let mut scaler = config.init().unwrap();
        let mut optim = SgdConfig::new().init();

        for _ in 0..3 {
            step(&mut learner, &samples(4), &device);
            let (loss, _) = model.train_step(&autocast, batch(&samples(4), &device));
            let grads = scaler.scale(loss).unwrap().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = scaler.step(&mut optim, 0.1, model, grads).unwrap();
        }

        assert_eq!(bits(learner.model().model()), bits(&model));
        assert_eq!(learner.model().state().unwrap(), scaler.state());
    });
}

/// `SupervisedTraining::gradient_checkpointing` gives it to the batches alone, and Burn refuses the mixture.
#[test]
fn gradient_checkpointing_of_the_models_device_is_that_of_the_training() {
    let train = |device: Device| {
        let directory = tempfile::tempdir().unwrap();
        let amp = amp(&device, FloatDType::F16, &scaler());
        let result = training(directory.path(), samples(16), 4).launch(Learner::new(
            amp,
            SgdConfig::new().init(),
            0.1,
        ));
        assert!(result.error.is_none(), "{:?}", result.error);
        bits(result.model.model())
    };
    let device = Device::flex().autodiff();
    let checkpointing = train(device.clone().gradient_checkpointing());
    assert_eq!(checkpointing, train(device));
}

/// What Burn's training loop does with one batch.
pub(crate) fn step<M>(learner: &mut Learner<M>, rows: &[Row], device: &Device)
where
    M: Module
        + ModuleDisplay
        + std::fmt::Display
        + TrainStep<Input = Batch>
        + InferenceStep
        + 'static,
{
    let output = learner.train_step(batch(rows, device));
    learner.lr_step();
    learner.optimizer_step(output.grads);
}
