//! Burn's own checkpoints hold the state of the grad scaler.

use std::path::Path;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, FloatDType, Tensor};
use burn::train::Learner;
use burn_lean::recipe::{uniform_soup, uniform_soup_of_records};
use burn_lean_amp::{
    Amp, AmpError, DynamicLossScale, GradScalerConfig, LossScale, ResumedDataLoader,
};
use burn_lean_reparam::{PathMapper, Trail, map_with_path};

use crate::devices::on_tracked;
use crate::support::{
    Mlp, Rows, amp, bits, samples, samples_with_infinity, scaler, training, training_with,
};
use crate::training::step;

#[test]
fn a_checkpoint_restores_the_state_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let rows = samples_with_infinity(16, &[5]);
    let trained = training(directory.path(), rows.clone(), 4)
        .with_default_checkpointers()
        .num_epochs(2)
        .launch(learner())
        .model;
    let state = trained.state().unwrap();
    assert_eq!(
        (state.steps, state.skipped_steps, state.hysteresis_left),
        (8, 2, 2)
    );

    // Both epochs are done: nothing is left to train after loading.
    let loaded = training(directory.path(), rows, 4)
        .with_default_checkpointers()
        .checkpoint(2)
        .num_epochs(2)
        .launch(learner())
        .model;

    assert_eq!(loaded.state().unwrap(), state);
    assert_eq!(bits(&loaded), bits(&trained));
}

#[test]
fn a_resumed_training_is_the_uninterrupted_one() {
    let rows = samples_with_infinity(16, &[13]);
    let whole = tempfile::tempdir().unwrap();
    let whole = training(whole.path(), rows.clone(), 4)
        .num_epochs(3)
        .launch(learner())
        .model;

    let directory = tempfile::tempdir().unwrap();
    let train = || training(directory.path(), rows.clone(), 4).with_default_checkpointers();
    train().num_epochs(2).launch(learner());
    let resumed = train().num_epochs(3).checkpoint(2).launch(learner()).model;

    assert_eq!(resumed.state().unwrap(), whole.state().unwrap());
    assert_eq!(bits(resumed.model()), bits(whole.model()));
}

#[test]
fn a_resumed_training_on_shuffled_data_is_the_uninterrupted_one() {
    let rows = samples_with_infinity(16, &[13]);
    let train = |directory: &Path, epochs: usize, done: usize| {
        let loader = DataLoaderBuilder::new(Rows)
            .batch_size(4)
            .shuffle(11)
            .build(InMemDataset::new(rows.clone()));
        let loader = ResumedDataLoader::wrap(loader, done);
        let mut training = training_with(directory, loader)
            .with_default_checkpointers()
            .num_epochs(epochs);
        if done > 0 {
            training = training.checkpoint(done);
        }
        training.launch(learner()).model
    };
    let whole = tempfile::tempdir().unwrap();
    let whole = train(whole.path(), 5, 0);
    for done in [1, 3] {
        let directory = tempfile::tempdir().unwrap();
        train(directory.path(), done, 0);
        let resumed = train(directory.path(), 5, done);
        assert_eq!(bits(&resumed), bits(&whole), "after {done} epochs");
    }
}

/// The mean of a scale and that of its inverse are no inverse of each other, and counters have none.
#[test]
fn the_average_of_checkpoints_trains_on_with_the_state_of_the_first() {
    on_tracked(|device| {
        let fresh = || amp(&device, FloatDType::F16, &scaler());
        let mut learner = Learner::new(fresh(), SgdConfig::new().init(), 0.1);
        let folder = tempfile::tempdir().unwrap();
        let paths = ["first.bpk", "second.bpk"].map(|name| folder.path().join(name));
        let models = paths.each_ref().map(|path| {
            for _ in 0..3 {
                step(&mut learner, &samples(4), &device);
            }
            let model = learner.model();
            model.clone().into_record().save(path).unwrap();
            model
        });
        let states = models.each_ref().map(|model| model.state().unwrap());
        assert_ne!(states[0], states[1]);

        let soup = uniform_soup_of_records(&fresh(), &paths).unwrap();

        let expected = uniform_soup(&models.map(Amp::into_model)).unwrap();
        assert_eq!(bits(soup.model()), bits(&expected));
        assert_eq!(soup.state().unwrap(), states[0]);
        let monitor = soup.monitor();
        let mut learner = Learner::new(soup, SgdConfig::new().init(), 0.1);
        step(&mut learner, &samples(4), &device);
        assert_eq!(monitor.error(), None);
        let state = learner.model().state().unwrap();
        assert_eq!(state.steps, states[0].steps + 1);
    });
}

#[test]
fn a_checkpoint_of_another_loss_scale_restarts_it_after_one_step() {
    let dynamic = |init_scale, max_scale| {
        LossScale::Dynamic(DynamicLossScale {
            init_scale,
            max_scale,
            ..Default::default()
        })
    };
    on_tracked(|device| {
        let learner = |loss_scale| {
            let amp = amp(&device, FloatDType::F16, &GradScalerConfig::new(loss_scale));
            Learner::new(amp, SgdConfig::new().init(), 0.1)
        };
        for (saved, resumed) in [
            (LossScale::None, dynamic(1024.0, f32::MAX)),
            (LossScale::Static(1.0), dynamic(1024.0, f32::MAX)),
            (dynamic(4096.0, f32::MAX), dynamic(256.0, 1024.0)),
            (dynamic(4096.0, f32::MAX), LossScale::Static(128.0)),
            (LossScale::Static(64.0), LossScale::Static(128.0)),
        ] {
            let mut before = learner(saved);
            step(&mut before, &samples(4), &device);
            let counted = before.model().state().unwrap().steps;

            let mut after = learner(resumed);
            after.load_model(before.model().into_record());
            let weights = bits(after.model().model());
            let monitor = after.model().monitor();
            step(&mut after, &samples(4), &device);

            // The step is sound: its gradients carried the scale that was loaded.
            assert_eq!(monitor.error(), None);
            assert_ne!(bits(after.model().model()), weights);
            assert_eq!(monitor.report().unwrap().loss_scale, saved.init().scale);
            let mut expected = resumed.init();
            expected.steps = counted + 1;
            assert_eq!(after.model().state().unwrap(), expected);
            // From here on it is the scale's own.
            step(&mut after, &samples(4), &device);
            let expected = resumed.update(expected, false);
            assert_eq!(after.model().state().unwrap(), expected);
        }

        // A training that needs no loss scale keeps the state of one that does, for later.
        let mut f16 = learner(dynamic(4096.0, f32::MAX));
        step(&mut f16, &samples(4), &device);
        let state = f16.model().state().unwrap();
        let mut without = learner(LossScale::None);
        without.load_model(f16.model().into_record());
        step(&mut without, &samples(4), &device);
        assert_eq!(without.model().state().unwrap(), state);
    });
}

#[test]
fn a_damaged_state_is_an_error_and_no_step() {
    on_tracked(|device| {
        let sound = amp(&device, FloatDType::F16, &scaler());
        let damaged = map_with_path(sound, &mut Damage);
        let monitor = damaged.monitor();
        let before = bits(damaged.model());
        let mut learner = Learner::new(damaged, SgdConfig::new().init(), 0.1);

        step(&mut learner, &samples(4), &device);

        assert_matches!(monitor.error(), Some(AmpError::Record { .. }));
        assert!(monitor.interrupter().should_stop());
        assert_eq!(bits(learner.model().model()), before);
    });
}

/// Doubles the loss scale and forgets its inverse.
struct Damage;

impl PathMapper for Damage {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match at.path() == "grad_scaler.factors" {
            true => param.map(|factors| factors * 2.0),
            false => param,
        }
    }
}

/// Four steps an epoch, one of them skipped, with a schedule that goes down on each step.
fn learner() -> Learner<Amp<Mlp>> {
    let device = Device::flex().autodiff();
    let amp = amp(&device, FloatDType::F16, &scaler());
    let schedule = burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig::new(0.1, 0.9);
    let schedule = amp.lr_scheduler(schedule).unwrap();
    Learner::new(amp, SgdConfig::new().init(), schedule)
}
