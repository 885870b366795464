//! A run that is killed at any moment, again and again, gives bit by bit what a run in one go gives.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Barrier;

use burn::module::{Lora, Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::quant::{
    QatConfig, Schedule, Site, fake::Range, module::map_quantizers, qat::set_schedule,
};
use burn_lean::recipe::{
    Distillation, Latency, PruneMethod, PruneStage, QuantizeStage, RateSchedule, Recipe,
    RecipeError, Run, ShrinkStage, Task, TrainStage,
};
use burn_lean::reparam::{PathMapper, Trail, attach, each_float, map_leaf, map_with_path};

use crate::problem::{Net, NetTask, batches, task};
use crate::support::killed::{as_a_child, child, lives_until_said};
use crate::support::{numbers, parameters, tensor};

/// The test that child processes run.
const CHILD: &str = "resume::as_a_child_process";

fn recipe(name: &str) -> Recipe {
    let quantize =
        |weights: &str| QuantizeStage::new(weights.parse().unwrap(), "uint8".parse().unwrap());
    let tune = TrainStage::new(2, 3e-3).with_schedule(RateSchedule::Cosine);
    let start = Recipe::new()
        .with_seed(5)
        .with_checkpoint_steps(4)
        .with_train(TrainStage::new(2, 0.01).with_warmup(0.3));
    match name {
        "layerwise" => start
            .with_prune(
                PruneStage::new(0.8)
                    .with_tune(tune.clone().with_distillation(Distillation::new(2.0, 0.5))),
            )
            .with_quantize(quantize("int8").with_train(tune))
            .with_quantize(quantize("int4")),
        "shrunk" => start
            .with_shrink(
                ShrinkStage::new(0.5)
                    .with_tune(tune.clone().with_distillation(Distillation::new(2.0, 0.5))),
            )
            .with_prune(PruneStage::new(0.5).with_tune(tune.clone()))
            .with_quantize(quantize("int8").with_train(tune)),
        _ => start.with_prune(
            PruneStage::new(0.8)
                .with_method(PruneMethod::Gradual)
                .with_stages(2)
                .with_samples(24)
                .with_tune(tune),
        ),
    }
}

/// What a run comes to: every number of every model, and what was measured of it.
fn run(recipe: &Recipe, folder: &Path, dies: Option<usize>) -> Result<String, RecipeError> {
    let device = Device::flex();
    let net = Net::with_dropout(0.1, 16, &device.clone().autodiff());
    let task = task(&device);
    let mut events = 0;
    let outcome = Run::new(recipe)
        .with_state(folder.join("state"))
        .with_output(folder.join("output"))
        .with_progress(|_| {
            if Some(events) == dies {
                // No destructor runs, nothing is flushed.
                std::process::abort();
            }
            events += 1;
            ControlFlow::Continue(())
        })
        .run(net, &task)?;
    let mut said = String::new();
    for stage in &outcome.stages {
        let row = &stage.row;
        // Not its bytes: identities of parameters are random, and written as decimals.
        said += &format!("{} {:?} {}\n", row.stage, row.accuracy, row.nonzeros);
        each_float(&stage.model.valid(), |at, float| {
            let bits = |value: &f32| format!("{:x}", value.to_bits());
            let bits: Vec<String> = float.values().iter().map(bits).collect();
            said += &format!("{} {}\n", at.path(), bits.join(" "));
        });
    }
    Ok(said)
}

#[test]
fn as_a_child_process() {
    as_a_child(|name, folder, dies| run(&recipe(name), folder, dies).unwrap());
}

fn survives(name: &str) {
    let straight = tempfile::tempdir().unwrap();
    let expected = child(CHILD, name, straight.path(), None).unwrap();
    assert!(expected.lines().count() > 10);
    // Two sequences of deaths, a life of 1 to 24 events after each.
    for sequence in 0..2 {
        let folder = tempfile::tempdir().unwrap();
        let lives = numbers(31 + sequence, 200);
        let lives = lives.iter().map(|life| 1 + (12.0 * (life + 1.0)) as usize);
        let (found, deaths) = lives_until_said(CHILD, name, folder.path(), lives);
        assert!(deaths >= 2, "{name}: {deaths}");
        let differs = found.lines().zip(expected.lines()).find(|(a, b)| a != b);
        let differs = differs.and_then(|(line, _)| line.split(' ').next());
        assert_eq!(differs, None, "{name}: after {deaths} deaths");
        assert_eq!(found.lines().count(), expected.lines().count());
        let files = |folder: &Path| {
            let files = std::fs::read_dir(folder.join("output")).unwrap();
            let mut names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(files(folder.path()), files(straight.path()));
    }
}

#[test]
fn pruning_with_distillation_and_training_with_fake_quantization_survive_kills() {
    survives("layerwise");
}

#[test]
fn smaller_layers_and_what_follows_survive_kills() {
    survives("shrunk");
}

#[test]
fn gradual_pruning_survives_kills() {
    survives("gradual");
}

#[test]
fn a_finished_run_is_not_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::new().with_train(TrainStage::new(1, 0.01));
    run(&recipe, folder.path(), None).unwrap();
    let device = Device::flex();
    let task = task(&device);
    let mut steps = 0;
    Run::new(&recipe)
        .with_state(folder.path().join("state"))
        .with_progress(|progress| {
            steps += usize::from(matches!(progress, burn_lean::recipe::Progress::Step { .. }));
            ControlFlow::Continue(())
        })
        .run(Net::new(16, &device.clone().autodiff()), &task)
        .unwrap();
    assert_eq!(steps, 0);
}

/// In a table there is one kind of latency, whatever the runs before were asked for.
#[test]
fn a_finished_stage_has_the_latency_that_this_run_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::new().with_train(TrainStage::new(1, 0.01));
    let device = Device::flex();
    let task = task(&device);
    let latency = |latency: Latency| {
        let run = Run::new(&recipe).with_state(folder.path());
        let model = Net::new(16, &device.clone().autodiff());
        let outcome = run.with_latency(latency).run(model, &task).unwrap();
        outcome.dense().row.latency_ms
    };
    assert_eq!(latency(Latency::None), None);
    assert!(latency(Latency::Burn).is_some());
    assert_eq!(latency(Latency::None), None);
}

#[test]
fn an_evaluation_that_comes_later_is_of_finished_stages_too() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::new();
    let device = Device::flex();
    let without = Task::new(
        |model: &Net, x: Tensor<4>| model.forward(x),
        |logits: Tensor<2>, _: Tensor<1, Int>| logits.square().mean(),
        |seed| batches(seed, &device),
    );
    let with = task(&device);
    let accuracy = |task: &NetTask<'_>| {
        let run = Run::new(&recipe).with_state(folder.path());
        let model = Net::new(16, &device.clone().autodiff());
        run.run(model, task).unwrap().dense().row.accuracy
    };
    assert_eq!(accuracy(&without), None);
    assert!(accuracy(&with).is_some());
}

#[test]
fn the_state_of_another_recipe_or_of_other_weights_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::new().with_train(TrainStage::new(1, 0.01));
    run(&recipe, folder.path(), None).unwrap();
    let other = Recipe::new().with_train(TrainStage::new(2, 0.01));
    let error = run(&other, folder.path(), None).unwrap_err().to_string();
    assert_says!(error, "`train.epochs` is 2 here and 1 there");

    let device = Device::flex();
    let task = task(&device);
    let other = Net::new(17, &device.clone().autodiff());
    let rejected = Run::new(&recipe)
        .with_state(folder.path().join("state"))
        .run(other, &task)
        .unwrap_err();
    let RecipeError::StateOfAnotherRun { field, .. } = rejected.error() else {
        panic!("{rejected:?}");
    };
    assert_eq!(field, "the checksum of the initial weights");
}

/// Adapters that were trained elsewhere.
struct Adapters(u64);

impl PathMapper for Adapters {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match at.is_attached() {
            true => map_leaf(param, |old| tensor(self.0, old.dims(), &old.device())),
            false => param,
        }
    }
}

/// The weights are the same, and not all of the model.
#[test]
fn the_state_of_other_adapters_or_quantizers_is_refused() {
    let device = Device::flex();
    let task = task(&device);
    let given = || Net::new(16, &device.clone().autodiff());
    let adapted = |seed| {
        let adapted = attach(given(), Lora::new(1, 1.0)).unwrap();
        map_with_path(adapted, &mut Adapters(seed))
    };
    let calibrated = |max: f32| {
        let prepared = QatConfig::new().prepare(given()).unwrap();
        map_quantizers(prepared, |located| match located.site {
            Site::Weight => located.quantizer,
            _ => {
                let [min, max] = [-max, max].map(|bound| Tensor::from_floats([bound], &device));
                located.quantizer.with_range(Range { min, max })
            }
        })
    };
    let scheduled = |step| {
        let schedule = Schedule::new().with_quantize_from(step);
        set_schedule(calibrated(1.0), schedule).unwrap()
    };
    for [one, other] in [
        [adapted(1), adapted(2)],
        [calibrated(1.0), calibrated(2.0)],
        [scheduled(0), scheduled(1)],
    ] {
        let folder = tempfile::tempdir().unwrap();
        let recipe = Recipe::new();
        let run = |model: &Net| {
            let run = Run::new(&recipe).with_latency(Latency::None);
            run.with_state(folder.path()).run(model.clone(), &task)
        };
        run(&one).unwrap();
        // By now its quantizers know that they are used.
        run(&one).unwrap();
        let rejected = run(&other).unwrap_err();
        assert_matches!(rejected.error(), RecipeError::StateOfAnotherRun { .. });
        assert_says!(
            rejected,
            "the checksum of what the initial weights carry",
            "need a seed of the device"
        );
    }
}

#[test]
fn the_state_of_other_data_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::new().with_train(TrainStage::new(1, 0.01));
    let device = Device::flex();
    let task = task(&device);
    let go_on = |identity: Option<serde_json::Value>| -> Result<(), RecipeError> {
        let mut run = Run::new(&recipe).with_state(folder.path());
        if let Some(identity) = identity {
            run = run.with_identity(identity)?;
        }
        run.run(Net::new(16, &device.clone().autodiff()), &task)?;
        Ok(())
    };
    let images = |batch_size: u32| Some(serde_json::json!({ "batch_size": batch_size }));
    // Of a run without an identity, and of one that had none to keep yet.
    go_on(None).unwrap();
    let error = go_on(images(16)).unwrap_err().to_string();
    assert_says!(error, "`identity` is {");
    std::fs::remove_dir_all(folder.path()).unwrap();

    go_on(images(16)).unwrap();
    go_on(images(16)).unwrap();
    for (identity, said) in [
        (images(32), "`identity.batch_size` is 32 here and 16 there"),
        (None, "`identity` is not given here"),
    ] {
        assert_says!(go_on(identity).unwrap_err(), said);
    }
    let unnamed = std::collections::HashMap::from([((1, 2), 3)]);
    let error = Run::new(&recipe).with_identity(unnamed).unwrap_err();
    assert_matches!(
        error,
        RecipeError::Invalid {
            field: "identity",
            ..
        }
    );
}

#[test]
fn a_damaged_stage_is_an_error_and_not_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::new().with_train(TrainStage::new(1, 0.01));
    run(&recipe, folder.path(), None).unwrap();
    // What is kept beside the model, masks for example, is of its own.
    let stage = folder.path().join("state/0-train/stage.toml");
    let text = std::fs::read_to_string(&stage).unwrap();
    let other = text.replacen("seconds = ", "seconds = 1", 1);
    assert_ne!(other, text);
    std::fs::write(&stage, other).unwrap();
    let error = run(&recipe, folder.path(), None).unwrap_err().to_string();
    assert_says!(error, "its checksum is wrong");
    std::fs::write(&stage, text).unwrap();
    let model = folder.path().join("state/0-train/model.bpk");
    let mut bytes = std::fs::read(&model).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&model, bytes).unwrap();
    let error = run(&recipe, folder.path(), None).unwrap_err();
    assert_matches!(error, RecipeError::State { .. });
    // What says whose state it is belongs to no stage.
    std::fs::write(folder.path().join("state/run.json"), "{").unwrap();
    let error = run(&recipe, folder.path(), None).unwrap_err().to_string();
    assert!(
        error.ends_with("remove the state folder to begin anew"),
        "{error}"
    );
}

/// A finished stage has all that later ones ask of it.
#[test]
fn a_part_of_a_finished_stage_may_be_damaged_or_gone() {
    let folder = tempfile::tempdir().unwrap();
    let tune = TrainStage::new(1, 0.01);
    let recipe = Recipe::new().with_prune(PruneStage::new(0.5).with_tune(tune));
    let device = Device::flex();
    let task = task(&device);
    let pruned = || -> Result<_, RecipeError> {
        let run = Run::new(&recipe).with_latency(Latency::None);
        let model = Net::new(16, &device.clone().autodiff());
        let outcome = run.with_state(folder.path()).run(model, &task)?;
        let weights = parameters(&outcome.last().model.valid());
        Ok((outcome.masks.unwrap(), weights))
    };
    let expected = pruned().unwrap();
    let part = folder.path().join("1-prune-solved");
    std::fs::write(part.join("model.bpk"), "half a model").unwrap();
    assert_eq!(pruned().unwrap(), expected);
    std::fs::remove_dir_all(&part).unwrap();
    assert_eq!(pruned().unwrap(), expected);
    // Without both the stage is run again.
    std::fs::remove_dir_all(folder.path().join("1-prune")).unwrap();
    assert_eq!(pruned().unwrap(), expected);
    assert!(part.exists());
}

/// Each of them has the state, or is told that another one has it.
#[test]
fn of_runs_that_begin_in_one_folder_at_once_the_others_are_refused() {
    let device = Device::flex();
    let recipe = Recipe::new();
    let begin = Barrier::new(4);
    // Whether it had the state.
    let run = |state: &Path| {
        let task = task(&device);
        let model = Net::new(16, &device.clone().autodiff());
        begin.wait();
        let run = Run::new(&recipe).with_latency(Latency::None);
        let ended = run.with_state(state).run(model, &task);
        if let Err(rejected) = &ended {
            assert_matches!(rejected.error(), RecipeError::StateInUse { .. });
        }
        ended.is_ok()
    };
    for _ in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let had = std::thread::scope(|scope| {
            let runs = [(); 4].map(|()| scope.spawn(|| run(&state)));
            runs.map(|run| run.join().unwrap())
        });
        assert!(had.contains(&true));
    }
}

#[test]
fn a_state_that_another_run_writes_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe::new().with_train(TrainStage::new(1, 0.01));
    let state = folder.path().join("state");
    std::fs::create_dir_all(&state).unwrap();
    let other = std::fs::File::create(state.join("run.lock")).unwrap();
    other.lock().unwrap();
    let error = run(&recipe, folder.path(), None).unwrap_err();
    assert_matches!(error, RecipeError::StateInUse { .. });
    // As the end of a process does.
    drop(other);
    run(&recipe, folder.path(), None).unwrap();
}
