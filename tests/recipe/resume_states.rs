//! What a training goes on with that was interrupted: its skipped steps, its loss scale, whose it is.

use std::ops::ControlFlow;
use std::path::Path;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::SgdConfig;
use burn::tensor::Device;
use burn_lean::amp::{Checkpoints, GradScalerConfig, LossScale};
use burn_lean::recipe::{ComputeDtype, Progress, Recipe, RecipeError, Run, Task, TrainStage};

use crate::problem::{Net, NetTask, batches};
use crate::support::parameters;

/// Five batches an epoch; the fifth has an infinite pixel where `is_broken`.
fn task(is_broken: bool, device: &Device) -> NetTask<'_> {
    let cross_entropy = CrossEntropyLossConfig::new().init(&device.clone().autodiff());
    Task::new(
        |model: &Net, x| model.forward(x),
        move |logits, labels| cross_entropy.forward(logits, labels),
        move |seed| {
            let mut batches = batches(seed, device);
            batches.truncate(5);
            let last = batches.last_mut().unwrap();
            if is_broken {
                last.0 = last.0.clone() * f32::INFINITY;
            }
            batches
        },
    )
    .with_optimizer(|_| SgdConfig::new().init())
}

fn recipe(dtype: ComputeDtype) -> Recipe {
    Recipe::new()
        .with_seed(5)
        .with_dtype(dtype)
        .with_checkpoint_steps(4)
        .with_train(TrainStage::new(1, 0.01))
}

/// Runs until so many checkpoints are there, or to the end.
fn run(
    recipe: &Recipe,
    is_broken: bool,
    state: &Path,
    mut checkpoints: usize,
) -> Result<Net, RecipeError> {
    let device = Device::flex();
    let task = task(is_broken, &device);
    let outcome = Run::new(recipe)
        .with_state(state)
        .with_progress(|progress| {
            checkpoints -= usize::from(matches!(progress, Progress::Checkpoint { .. }));
            match checkpoints {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        })
        .run(Net::new(16, &device.clone().autodiff()), &task)?;
    Ok(outcome.stages.into_iter().next_back().unwrap().model)
}

/// The loss of the last step is not finite, and that step is skipped, in either run.
#[test]
fn a_step_that_is_skipped_after_a_restart_is_one_of_its_epoch() {
    let recipe = recipe(ComputeDtype::Bf16);
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let whole = run(&recipe, true, folders[0].path(), usize::MAX).unwrap();
    let error = run(&recipe, true, folders[1].path(), 1).unwrap_err();
    assert_matches!(error, RecipeError::Interrupted { .. });
    let resumed = run(&recipe, true, folders[1].path(), usize::MAX).unwrap();
    assert_eq!(parameters(&resumed), parameters(&whole));
}

/// `auto` is of the device: a checkpoint of one that trains in F32 has no loss scale.
#[test]
fn a_training_that_goes_on_in_half_precision_has_its_loss_scale() {
    let recipe = recipe(ComputeDtype::F16);
    let folder = tempfile::tempdir().unwrap();
    run(&recipe, false, folder.path(), 1).unwrap_err();
    let checkpoints = Checkpoints::new(folder.path().join("0-train.checkpoints"));
    let load = || {
        let latest = checkpoints.latest().unwrap().unwrap();
        let net = Net::new(16, &Device::flex().autodiff());
        let loaded = checkpoints.load(latest, net, SgdConfig::new().init());
        (latest, loaded.unwrap())
    };
    let (step, (net, optim, scaler)) = load();
    assert!(!scaler.is_disabled());
    let of_f32 = GradScalerConfig::new(LossScale::None).init().unwrap();
    checkpoints.save(step, &net, &optim, &of_f32).unwrap();
    run(&recipe, false, folder.path(), 1).unwrap_err();
    let (later, (.., scaler)) = load();
    assert!(later > step && !scaler.is_disabled());
}

#[test]
fn a_training_without_the_file_that_says_whose_it_is_is_refused() {
    let recipe = recipe(ComputeDtype::F32);
    // Begun, and finished.
    for checkpoints in [1, usize::MAX] {
        let folder = tempfile::tempdir().unwrap();
        let first = run(&recipe, false, folder.path(), checkpoints);
        assert_eq!(first.is_ok(), checkpoints > 1);
        let file = folder.path().join("run.json");
        std::fs::remove_file(&file).unwrap();
        let other = recipe.clone().with_seed(6);
        let error = run(&other, false, folder.path(), usize::MAX).unwrap_err();
        assert_says!(error, "stages are beside it");
        assert!(!file.exists());
    }
}
