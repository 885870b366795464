//! The learning-rate schedule waits for skipped steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::optim::SgdConfig;
use burn::tensor::{Device, FloatDType};
use burn::train::{ExecutionStrategy, Learner, MultiDeviceOptim, TrainingStrategy};
use burn_lean_amp::{Amp, learner::AmpLrScheduler};

use crate::devices::on_tracked;
use crate::support::{Mlp, amp, samples, samples_with_infinity, scaler, training};
use crate::training::step;

#[test]
fn the_learning_rate_of_a_skipped_step_is_used_again() {
    on_tracked(|device| {
        let amp = amp(&device, FloatDType::F16, &scaler());
        let schedule = amp.lr_scheduler(halving()).unwrap();
        let mut learner = Learner::new(amp, SgdConfig::new().init(), schedule);

        let mut lrs = Vec::new();
        for broken in [false, true, true, false, false] {
            let broken: &[usize] = if broken { &[0] } else { &[] };
            step(&mut learner, &samples_with_infinity(4, broken), &device);
            lrs.push(learner.lr_current().base());
        }

        assert_eq!(lrs, [0.5, 0.25, 0.25, 0.25, 0.125]);
    });
}

#[test]
fn the_schedule_advances_once_per_step_taken_on_one_device() {
    let device = Device::flex().autodiff();
    let advanced = advances(
        TrainingStrategy::Default(ExecutionStrategy::single(device)),
        6,
    );

    assert_eq!(advanced, 3);
}

#[test]
fn the_schedule_advances_once_per_step_taken_on_several_devices() {
    let devices = vec![Device::flex().autodiff(), Device::flex().autodiff()];
    let strategy = ExecutionStrategy::multi(devices, MultiDeviceOptim::OptimMainDevice);
    // Two batches a step: the first of two steps is skipped.
    let advanced = advances(TrainingStrategy::Default(strategy), 2);

    assert_eq!(advanced, 1);
}

/// How often the schedule advances in four batches of four samples, one of them infinite.
fn advances(strategy: TrainingStrategy<Amp<Mlp>>, broken: usize) -> usize {
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let amp = amp(&device, FloatDType::F16, &scaler());
    let calls = Counting::default();
    let schedule = AmpLrScheduler::new(calls.clone(), &amp.monitor());

    training(directory.path(), samples_with_infinity(16, &[broken]), 4)
        .with_training_strategy(strategy)
        .launch(Learner::new(amp, SgdConfig::new().init(), schedule));

    calls.0.load(Ordering::SeqCst)
}

#[test]
fn a_checkpoint_knows_whether_its_learning_rate_was_used() {
    for (broken, next) in [(&[0][..], 0.5), (&[], 0.25)] {
        on_tracked(|device| {
            let amp = amp(&device, FloatDType::F16, &scaler());
            let mut schedule = amp.lr_scheduler(halving()).unwrap();
            let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);
            assert_eq!(schedule.step(), 0.5);
            step(&mut learner, &samples_with_infinity(4, broken), &device);

            let mut resumed = restored(schedule.to_record());

            assert_eq!([resumed.step(), schedule.step()], [next, next]);
            if !broken.is_empty() {
                assert_eq!(resumed.to_record().scalar::<f64>("held_lr"), Some(next));
            }
        });
    }
}

#[test]
fn going_back_to_a_checkpoint_forgets_the_steps_after_it() {
    on_tracked(|device| {
        let amp = amp(&device, FloatDType::F16, &scaler());
        let mut schedule = amp.lr_scheduler(halving()).unwrap();
        let mut learner = Learner::new(amp, SgdConfig::new().init(), 0.1);
        assert_eq!(schedule.step(), 0.5);
        step(&mut learner, &samples_with_infinity(4, &[0]), &device);
        let record = schedule.to_record();
        assert_eq!(schedule.step(), 0.5);
        step(&mut learner, &samples(4), &device);
        assert_eq!(schedule.step(), 0.25);

        schedule.load_record(record);

        assert_eq!(schedule.step(), 0.5);
    });
}

#[test]
fn a_schedule_that_burn_refuses_is_refused() {
    let amp = amp(&Device::flex().autodiff(), FloatDType::F16, &scaler());

    let error = amp
        .lr_scheduler(ExponentialLrSchedulerConfig::new(0.5, 2.0))
        .unwrap_err();

    assert_says!(error, "Gamma");
}

/// A new schedule of a new model, as after a restart.
fn restored(record: LrSchedulerRecord) -> AmpLrScheduler {
    let amp = amp(&Device::flex().autodiff(), FloatDType::F16, &scaler());
    let mut schedule = amp.lr_scheduler(halving()).unwrap();
    schedule.load_record(record);
    schedule
}

/// 0.5, 0.25, 0.125, ...
fn halving() -> ExponentialLrSchedulerConfig {
    ExponentialLrSchedulerConfig::new(0.5, 0.5)
}

#[derive(Clone, Default)]
struct Counting(Arc<AtomicUsize>);

impl LrScheduler for Counting {
    fn step(&mut self) -> f64 {
        self.0.fetch_add(1, Ordering::SeqCst);
        0.1
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new()
    }

    fn load_record(&mut self, _record: LrSchedulerRecord) {}
}
