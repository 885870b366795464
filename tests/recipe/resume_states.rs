//! What a training goes on with that was interrupted: its skipped steps, its loss scale, its zeros, whose it is.

use std::ops::ControlFlow;
use std::path::Path;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use burn_lean::amp::{Checkpoints, GradScalerConfig, LossScale};
use burn_lean::recipe::{
    ComputeDtype, Latency, Progress, PruneMethod, PruneStage, RateSchedule, Recipe, RecipeError,
    Run, Task, TrainStage,
};

use crate::problem::{Net, NetTask, batches};
use crate::support::parameters;

/// Five batches an epoch, of which the one with this number is not finite.
fn task(broken: Option<usize>, device: &Device) -> NetTask<'_> {
    let cross_entropy = CrossEntropyLossConfig::new().init(&device.clone().autodiff());
    Task::new(
        |model: &Net, x| model.forward(x),
        move |logits, labels| cross_entropy.forward(logits, labels),
        move |seed| {
            let mut batches = batches(seed, device);
            batches.truncate(5);
            if let Some(broken) = broken {
                let pixels = &mut batches[broken].0;
                *pixels = pixels.clone() * f32::INFINITY;
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
    broken: Option<usize>,
    state: &Path,
    mut checkpoints: usize,
) -> Result<Net, RecipeError> {
    let device = Device::flex();
    let task = task(broken, &device);
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
    let whole = run(&recipe, Some(4), folders[0].path(), usize::MAX).unwrap();
    let error = run(&recipe, Some(4), folders[1].path(), 1).unwrap_err();
    assert_matches!(error, RecipeError::Interrupted { .. });
    let resumed = run(&recipe, Some(4), folders[1].path(), usize::MAX).unwrap();
    assert_eq!(parameters(&resumed), parameters(&whole));
}

/// There is nothing to keep yet, and the next step is taken.
#[test]
fn a_checkpoint_is_not_due_before_a_step_of_the_epoch_is_taken() {
    let recipe = recipe(ComputeDtype::Bf16);
    let often = recipe.clone().with_checkpoint_steps(1);
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let whole = run(&recipe, Some(0), folders[0].path(), usize::MAX).unwrap();
    // The first comes after the second step.
    let error = run(&often, Some(0), folders[1].path(), 1).unwrap_err();
    assert_matches!(error, RecipeError::Interrupted { .. });
    let resumed = run(&often, Some(0), folders[1].path(), usize::MAX).unwrap();
    assert_eq!(parameters(&resumed), parameters(&whole));
}

/// Other batches stand for a device whose sums are not the same each time.
#[test]
fn a_stage_whose_checkpoint_has_other_zeros_is_trained_anew() {
    let device = Device::flex();
    let tune = TrainStage::new(2, 3e-3).with_schedule(RateSchedule::Cosine);
    let prune = PruneStage::new(0.8)
        .with_method(PruneMethod::Gradual)
        .with_stages(1)
        .with_samples(24)
        .with_tune(tune);
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_prune(prune);
    let pruned = |flips: bool, state: &Path, mut checkpoints: usize| {
        let cross_entropy = CrossEntropyLossConfig::new().init(&device.clone().autodiff());
        let task: NetTask<'_> = Task::new(
            |model: &Net, x| model.forward(x),
            move |logits, labels| cross_entropy.forward(logits, labels),
            |seed| {
                let flipped = |x: Tensor<4>| if flips { x.flip([3]) } else { x };
                let all = batches(seed, &device).into_iter();
                let all = all.map(|(x, labels)| (flipped(x), labels));
                all.collect::<Vec<_>>()
            },
        );
        let mut steps = 0;
        let outcome = Run::new(&recipe)
            .with_latency(Latency::None)
            .with_state(state)
            .with_progress(|progress| {
                steps += usize::from(matches!(progress, Progress::Step { .. }));
                checkpoints -= usize::from(matches!(progress, Progress::Checkpoint { .. }));
                match checkpoints {
                    0 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }
            })
            .run(Net::new(16, &device.clone().autodiff()), &task)?;
        let masks = outcome.masks.clone().unwrap();
        let net = outcome.last().model.valid();
        Ok::<_, RecipeError>((parameters(&net), masks, steps))
    };
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (_, before, _) = pruned(false, folders[0].path(), usize::MAX).unwrap();
    let (weights, masks, steps) = pruned(true, folders[1].path(), usize::MAX).unwrap();
    assert_ne!(masks, before);
    let error = pruned(false, folders[2].path(), 1).unwrap_err();
    assert_matches!(error, RecipeError::Interrupted { .. });
    let (found, found_masks, found_steps) = pruned(true, folders[2].path(), usize::MAX).unwrap();
    assert_eq!(found_masks, masks);
    assert_eq!(found, weights);
    assert_eq!(found_steps, steps);
}

/// `auto` is of the device: a checkpoint of one that trains in F32 has no loss scale.
#[test]
fn a_training_that_goes_on_in_half_precision_has_its_loss_scale() {
    let recipe = recipe(ComputeDtype::F16);
    let folder = tempfile::tempdir().unwrap();
    run(&recipe, None, folder.path(), 1).unwrap_err();
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
    run(&recipe, None, folder.path(), 1).unwrap_err();
    let (later, (.., scaler)) = load();
    assert!(later > step && !scaler.is_disabled());
}

#[test]
fn a_damaged_checkpoint_says_what_to_remove_and_the_one_before_is_gone_on_from() {
    let recipe = recipe(ComputeDtype::F32);
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let whole = run(&recipe, None, folders[0].path(), usize::MAX).unwrap();
    let state = folders[1].path();
    let error = run(&recipe, None, state, 2).unwrap_err();
    assert_matches!(error, RecipeError::Interrupted { .. });
    let folder = state.join("0-train.checkpoints");
    let latest = Checkpoints::new(&folder).latest().unwrap().unwrap();
    let damaged = folder.join(format!("step-{latest}"));
    std::fs::write(damaged.join("manifest.json"), []).unwrap();

    let error = run(&recipe, None, state, usize::MAX).unwrap_err();
    let advice = format!("; remove the folder {} to go on", damaged.display());
    assert_says!(error, "stage `FP32`", &advice);
    std::fs::remove_dir_all(&damaged).unwrap();
    let resumed = run(&recipe, None, state, usize::MAX).unwrap();
    assert_eq!(parameters(&resumed), parameters(&whole));
}

/// One of version 1 has no checksum of what weights carry, and its stages may lack their masks.
#[test]
fn a_state_of_an_earlier_version_is_not_damaged_and_says_what_to_do() {
    let recipe = recipe(ComputeDtype::F32);
    let folder = tempfile::tempdir().unwrap();
    run(&recipe, None, folder.path(), usize::MAX).unwrap();
    let file = folder.path().join("run.json");
    let text = std::fs::read(&file).unwrap();
    let mut earlier: serde_json::Value = serde_json::from_slice(&text).unwrap();
    earlier["version"] = 1.into();
    earlier.as_object_mut().unwrap().remove("initial").unwrap();
    earlier["weights"] = 7.into();
    std::fs::write(&file, earlier.to_string()).unwrap();

    let error = run(&recipe, None, folder.path(), usize::MAX).unwrap_err();
    assert_matches!(error, RecipeError::StateOfAnotherRun { .. });
    assert_says!(
        error,
        "the version of its files is 2 here and 1 there",
        "name another folder, or remove this one"
    );
}

#[test]
fn a_training_without_the_file_that_says_whose_it_is_is_refused() {
    let recipe = recipe(ComputeDtype::F32);
    // Begun, and finished.
    for checkpoints in [1, usize::MAX] {
        let folder = tempfile::tempdir().unwrap();
        let first = run(&recipe, None, folder.path(), checkpoints);
        assert_eq!(first.is_ok(), checkpoints > 1);
        let file = folder.path().join("run.json");
        std::fs::remove_file(&file).unwrap();
        let other = recipe.clone().with_seed(6);
        let error = run(&other, None, folder.path(), usize::MAX).unwrap_err();
        assert_says!(error, "stages are beside it");
        assert!(!file.exists());
    }
}
