//! A folder of checkpoints: what is whole there, what is damaged, and who writes.

#[cfg(unix)]
use std::io::Write;
use std::path::Path;

use burn::module::Param;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::{AmpError, Checkpoints, GradScalerConfig};

use crate::model::{Mlp, bits, prepared};

/// What a kill leaves behind when it hits between two files of a checkpoint, without the luck.
#[test]
fn a_half_written_checkpoint_is_never_seen() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let optim = AdamWConfig::new().init();
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(1, &model, &optim, &scaler).unwrap();
    let partial = folder.path().join("partial-2");
    std::fs::create_dir(&partial).unwrap();
    std::fs::write(partial.join("model.bpk"), b"half a mod").unwrap();

    assert_eq!(checkpoints.latest().unwrap(), Some(1));
    // And the next save of that step is not disturbed by it.
    checkpoints.save(2, &model, &optim, &scaler).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [1, 2]);
    let refused = checkpoints.load(7, model, optim.clone()).err().unwrap();
    let (model, error) = refused.into_parts();
    assert_says!(error, "no checkpoint of step 7");
    assert!(error.to_string().ends_with("but of 1, 2"), "{error}");
    assert!(checkpoints.load(2, model, optim).is_ok());
}

#[test]
fn a_checkpoint_of_the_same_step_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = || AdamWConfig::new().init();
    let checkpoints = Checkpoints::new(folder.path());
    let save = |step, model: &Mlp| checkpoints.save(step, model, &optim(), &scaler).unwrap();
    let device = Device::flex();
    let (old, new) = (Mlp::new(1, &device), Mlp::new(2, &device));
    let loaded = |step| {
        let (model, ..) = checkpoints
            .load(step, Mlp::new(3, &device), optim())
            .unwrap();
        bits(&model)
    };
    save(6, &old);
    save(7, &old);
    save(7, &new);
    assert_eq!(checkpoints.steps().unwrap(), [6, 7]);
    assert_eq!(loaded(6), bits(&old));
    assert_eq!(loaded(7), bits(&new));
    let entries = std::fs::read_dir(folder.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert_eq!(names, ["checkpoints.lock", "step-6", "step-7"]);
}

/// What a kill leaves behind when it hits while one checkpoint takes the place of another.
#[test]
fn a_replacement_that_is_cut_short_is_the_checkpoint() {
    let (device, other) = (Device::flex(), tempfile::tempdir().unwrap());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = || AdamWConfig::new().init();
    let (old, new) = (Mlp::new(1, &device), Mlp::new(2, &device));
    for old_is_there in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let loaded = |step| {
            let (model, ..) = checkpoints
                .load(step, Mlp::new(3, &device), optim())
                .unwrap();
            bits(&model)
        };
        checkpoints.save(6, &old, &optim(), &scaler).unwrap();
        if old_is_there {
            checkpoints.save(7, &old, &optim(), &scaler).unwrap();
        }
        let replacing = Checkpoints::new(other.path());
        replacing.save(7, &new, &optim(), &scaler).unwrap();
        let complete = folder.path().join("replacement-7");
        std::fs::rename(other.path().join("step-7"), &complete).unwrap();

        assert_eq!(checkpoints.steps().unwrap(), [6, 7]);
        assert_eq!(loaded(7), bits(&new));
        // The next save puts it in its place.
        checkpoints.save(8, &old, &optim(), &scaler).unwrap();
        assert_eq!(checkpoints.steps().unwrap(), [7, 8]);
        assert_eq!(loaded(7), bits(&new));
        assert!(!complete.exists());
    }
}

/// A pipe in the place of a file holds the reader between the manifest and the model.
#[cfg(unix)]
#[test]
fn a_checkpoint_that_is_replaced_while_it_is_read_is_read_again() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let device = Device::flex();
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = || AdamWConfig::new().init();
    let (old, new) = (Mlp::new(1, &device), Mlp::new(2, &device));
    let checkpoints = Checkpoints::new(folder.path());
    for step in [6, 7] {
        checkpoints.save(step, &old, &optim(), &scaler).unwrap();
    }
    let replacing = Checkpoints::new(other.path());
    replacing.save(7, &new, &optim(), &scaler).unwrap();
    let place = folder.path().join("step-7");
    let pipe = place.join("model.bpk");
    std::fs::remove_file(&pipe).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());

    let loaded = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Waits for a reader.
            let mut model = std::fs::File::options().write(true).open(&pipe).unwrap();
            std::fs::rename(&place, other.path().join("old")).unwrap();
            std::fs::rename(other.path().join("step-7"), &place).unwrap();
            model.write_all(b"half a mod").unwrap();
        });
        let loaded = checkpoints.load(7, Mlp::new(3, &device), optim());
        // Whatever came of it, the other does not wait for ever.
        drop(std::fs::File::open(&pipe));
        loaded
    });
    let (model, ..) = loaded.unwrap();
    assert_eq!(bits(&model), bits(&new));
}

#[test]
fn damaged_foreign_and_missing_checkpoints_are_typed_errors_that_keep_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let before = bits(&model);
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let checkpoints = Checkpoints::new(folder.path()).keep(10);
    let optim = || AdamWConfig::new().init();
    for step in [1, 2, 3, 4, 5, 7] {
        checkpoints.save(step, &model, &optim(), &scaler).unwrap();
    }
    // Renamed by hand.
    std::fs::rename(folder.path().join("step-7"), folder.path().join("step-8")).unwrap();
    let file = |step: u64, name: &str| folder.path().join(format!("step-{step}/{name}"));

    // One flipped bit in the weights, a truncated optimizer, another version, no scaler at all.
    let mut bytes = std::fs::read(file(1, "model.bpk")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file(1, "model.bpk"), bytes).unwrap();
    let bytes = std::fs::read(file(2, "optimizer.bpk")).unwrap();
    std::fs::write(file(2, "optimizer.bpk"), &bytes[..bytes.len() / 2]).unwrap();
    let manifest = std::fs::read_to_string(file(3, "manifest.json")).unwrap();
    let manifest = manifest.replace("\"version\": 1", "\"version\": 7");
    std::fs::write(file(3, "manifest.json"), manifest).unwrap();
    std::fs::remove_file(file(4, "scaler.json")).unwrap();

    let mut model = model;
    for (step, expected) in [
        (1, "model.bpk"),
        (2, "optimizer.bpk"),
        (3, "version 7"),
        (4, "scaler.json"),
        (6, "of step 6 in"),
        (8, "it is of step 7"),
    ] {
        let rejected = checkpoints.load(step, model, optim()).err().unwrap();
        assert_says!(rejected, expected);
        assert_matches!(
            rejected.error(),
            AmpError::Record { .. } | AmpError::NoCheckpoint { step: 6, .. }
        );
        // What another version wrote, or what was renamed, may be worth keeping.
        let is_damaged = [1, 2, 4].contains(&step);
        assert_eq!(rejected.to_string().contains("remove"), is_damaged);
        model = rejected.into_value();
        assert_eq!(bits(&model), before);
    }

    // A model of another shape.
    let mut other = Mlp::new(1, &Device::flex().autodiff());
    other.second.weight = Param::from_tensor(Tensor::zeros([8, 4], &Device::flex().autodiff()));
    let rejected = checkpoints.load(5, other, optim()).err().unwrap();
    assert_matches!(rejected.error(), AmpError::Record { .. });
    assert_eq!(rejected.value().second.weight.dims(), [8, 4]);
}

#[test]
fn a_damaged_checkpoint_says_what_to_remove_and_from_where_training_goes_on() {
    let damages: [fn(&Path); 4] = [
        |step| std::fs::write(step.join("manifest.json"), b"").unwrap(),
        |step| std::fs::write(step.join("model.bpk"), b"half a mod").unwrap(),
        |step| std::fs::write(step.join("optimizer.bpk"), b"").unwrap(),
        |step| std::fs::remove_file(step.join("scaler.json")).unwrap(),
    ];
    let (mut model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = || AdamWConfig::new().init();
    for damage in damages {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        for step in [4, 6] {
            checkpoints.save(step, &model, &optim(), &scaler).unwrap();
        }
        for (step, then) in [(6, "to go on from step 4"), (4, "to begin anew")] {
            assert_eq!(checkpoints.latest().unwrap(), Some(step));
            let path = folder.path().join(format!("step-{step}"));
            damage(&path);
            let rejected = checkpoints.load(step, model, optim()).err().unwrap();
            assert_matches!(rejected.error(), AmpError::Record { .. });
            let advice = format!("; remove the folder {} {then}", path.display());
            assert_says!(rejected, &advice);
            model = rejected.into_value();
            std::fs::remove_dir_all(&path).unwrap();
        }
        assert_eq!(checkpoints.latest().unwrap(), None);
    }
}

#[test]
fn a_damaged_replacement_says_that_what_it_was_to_replace_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = || AdamWConfig::new().init();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(6, &model, &optim(), &scaler).unwrap();
    let replacement = folder.path().join("replacement-6");
    std::fs::create_dir(&replacement).unwrap();
    std::fs::write(replacement.join("manifest.json"), b"").unwrap();

    let rejected = checkpoints.load(6, model, optim()).err().unwrap();
    assert_says!(rejected, "replacement-6 to go on from step 6");
    std::fs::remove_dir_all(&replacement).unwrap();
    checkpoints.load(6, rejected.into_value(), optim()).unwrap();
}

#[test]
fn a_folder_that_another_process_writes_into_is_a_typed_error_and_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = || AdamWConfig::new().init();
    let checkpoints = Checkpoints::new(folder.path());
    let save = |step, model: &Mlp| checkpoints.save(step, model, &optim(), &scaler);
    save(1, &model).unwrap();
    save(2, &model).unwrap();

    let lock = std::fs::File::open(folder.path().join("checkpoints.lock")).unwrap();
    lock.try_lock().unwrap();
    // What the other writes.
    let partial = folder.path().join("partial-3");
    std::fs::create_dir(&partial).unwrap();
    let error = save(3, &model).unwrap_err();
    assert_matches!(error, AmpError::CheckpointsInUse { .. });
    assert_says!(error, &folder.path().display().to_string());
    assert_eq!(checkpoints.discard_after(1), Err(error));
    assert!(partial.exists());
    // There is nothing to discard.
    checkpoints.discard_after(2).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [1, 2]);
    let (model, ..) = checkpoints.load(2, model, optim()).unwrap();

    lock.unlock().unwrap();
    save(3, &model).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [2, 3]);
    assert!(!partial.exists());
}

/// Neither removes what the other one is writing.
#[test]
fn two_trainings_in_one_folder_of_checkpoints_leave_it_whole() {
    let folder = tempfile::tempdir().unwrap();
    let optim = || AdamWConfig::new().init();
    let model = || prepared(1, FloatDType::F16, &Device::flex()).0;
    let train = || {
        let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
        let model = model();
        for step in 1..=6 {
            match Checkpoints::new(folder.path()).save(step, &model, &optim(), &scaler) {
                Ok(())
                | Err(AmpError::CheckpointsInUse { .. } | AmpError::LaterCheckpoint { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(train);
        }
    });
    let checkpoints = Checkpoints::new(folder.path());
    let steps = checkpoints.steps().unwrap();
    assert!(!steps.is_empty());
    for step in steps {
        checkpoints.load(step, model(), optim()).unwrap();
    }
}

#[test]
fn going_back_needs_the_later_checkpoints_discarded() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = AdamWConfig::new().init();
    let checkpoints = Checkpoints::new(folder.path());
    let save = |step| checkpoints.save(step, &model, &optim, &scaler);
    for step in [20, 30, 40] {
        save(step).unwrap();
    }
    assert_eq!(checkpoints.steps().unwrap(), [30, 40]);
    let error = save(35).unwrap_err();
    assert_matches!(
        error,
        AmpError::LaterCheckpoint {
            step: 35,
            latest: 40
        }
    );
    // What a process that was killed left behind goes with the next save.
    std::fs::create_dir(folder.path().join("partial-50")).unwrap();
    // Of somebody else.
    std::fs::create_dir(folder.path().join("partial-ablation")).unwrap();
    checkpoints.discard_after(30).unwrap();
    save(35).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [30, 35]);
    assert!(!folder.path().join("partial-50").exists());
    assert!(folder.path().join("partial-ablation").exists());
}

#[test]
fn a_folder_without_a_manifest_is_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap();
    let optim = || AdamWConfig::new().init();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(3, &model, &optim(), &scaler).unwrap();
    for empty in ["step-9", "replacement-3"] {
        std::fs::create_dir(folder.path().join(empty)).unwrap();
    }
    assert_eq!(checkpoints.steps().unwrap(), [3]);
    assert_eq!(checkpoints.latest().unwrap(), Some(3));
    let (model, ..) = checkpoints.load(3, model, optim()).unwrap();
    // It is in the way of no other, and replaces none.
    checkpoints.save(4, &model, &optim(), &scaler).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [3, 4]);
    checkpoints.load(3, model.clone(), optim()).unwrap();
    checkpoints.save(9, &model, &optim(), &scaler).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [4, 9]);
    checkpoints.load(9, model, optim()).unwrap();
}
