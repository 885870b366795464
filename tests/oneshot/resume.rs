//! Ended at any moment, and begun again.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use burn::module::ParamGroup;
use burn::tensor::Device;
use burn_lean::oneshot::{
    Compressed, OneShot, OneShotError, Pattern, Preset, Prune, PruneMethod, Scaling,
};

use crate::llama::{Llama, Sizes};
use crate::support::{parameters, with_numbers};
use crate::{SMALL, small_llama, tokens};

fn compress(preset: &Preset, state: Option<&Path>) -> Result<Compressed<Llama>, OneShotError> {
    let device = Device::flex();
    let mut oneshot = OneShot::new(preset.clone());
    if let Some(folder) = state {
        oneshot = oneshot.with_state(folder);
    }
    oneshot
        .compress(small_llama(&device), tokens(&device), |model, x| {
            model.forward(x)
        })
        .map_err(|rejected| rejected.into_error())
}

/// Ends after the first block, as a kill would.
fn interrupted(preset: &Preset, folder: &Path) {
    let device = Device::flex();
    let ended = catch_unwind(AssertUnwindSafe(|| {
        OneShot::new(preset.clone())
            .with_state(folder)
            .with_progress(|_, _, _| panic!("killed"))
            .compress(small_llama(&device), tokens(&device), |model, x| {
                model.forward(x)
            })
    }));
    assert!(ended.is_err());
}

#[test]
fn the_model_is_that_of_an_uninterrupted_run() {
    let awq = Preset::w4a16()
        .with_group(8)
        .with_scaling(Some(Scaling::Awq));
    for preset in [
        Preset::w4a16().with_group(8),
        "sparse-2:4".parse().unwrap(),
        awq,
    ] {
        let folder = tempfile::tempdir().unwrap();
        let whole = compress(&preset, None).unwrap();
        interrupted(&preset, folder.path());
        // What a kill in the middle of writing leaves behind.
        fs::write(folder.path().join(".tmpAbCdEf"), b"half a block").unwrap();
        let resumed = compress(&preset, Some(folder.path())).unwrap();
        let flags: Vec<bool> = resumed
            .report
            .blocks
            .iter()
            .map(|one| one.resumed)
            .collect();
        assert_eq!(flags, [true, false], "{}", preset.name());
        assert_eq!(
            parameters(&whole.model),
            parameters(&resumed.model),
            "{}",
            preset.name()
        );
        assert_eq!(whole.weights, resumed.weights);
        for (one, other) in whole.report.layers.iter().zip(&resumed.report.layers) {
            assert_eq!(
                (&one.path, one.zeros, one.rows),
                (&other.path, other.zeros, other.rows)
            );
            // A decimal number may be read back one bit off.
            let off = (one.relative_error - other.relative_error).abs();
            assert!(off <= 1e-12 * one.relative_error);
        }
        let again = compress(&preset, Some(folder.path())).unwrap();
        assert!(again.report.blocks.iter().all(|one| one.resumed));
        assert_eq!(parameters(&whole.model), parameters(&again.model));
    }
}

#[test]
fn a_fraction_that_json_gives_back_one_bit_off_is_the_same_preset() {
    let fraction = 1.0 / 11.0_f64;
    let read_back: f64 = serde_json::from_str(&fraction.to_string()).unwrap();
    assert_ne!(read_back, fraction, "the test shows nothing");
    let prune = Prune::new(Pattern::PerLayer(fraction), PruneMethod::Magnitude);
    let preset = Preset::new().with_prune(Some(prune));
    let folder = tempfile::tempdir().unwrap();
    interrupted(&preset, folder.path());
    let resumed = compress(&preset, Some(folder.path())).unwrap();
    let blocks = &resumed.report.blocks;
    let flags: Vec<bool> = blocks.iter().map(|one| one.resumed).collect();
    assert_eq!(flags, [true, false]);
}

#[test]
fn a_state_of_something_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    interrupted(&Preset::w4a16().with_group(8), folder.path());
    let error = compress(&Preset::w4a16().with_group(16), Some(folder.path())).unwrap_err();
    assert_says!(error, "another preset");

    let device = Device::flex();
    let oneshot = OneShot::new(Preset::w4a16().with_group(8)).with_state(folder.path());
    let one = tokens(&device).into_iter().take(1);
    let error = oneshot.compress(small_llama(&device), one, |model, x| model.forward(x));
    let error = error.unwrap_err();
    assert_says!(error, "other calibration batches");

    let oneshot = OneShot::new(Preset::w4a16().with_group(8)).with_state(folder.path());
    let oneshot = oneshot.with_blocks_of(ParamGroup::from_predicate("layers.1"));
    let error = oneshot.compress(small_llama(&device), tokens(&device), |model, x| {
        model.forward(x)
    });
    assert_says!(error.unwrap_err(), "other blocks");

    // Without what says whose they are, its blocks would be those of any other run.
    std::fs::remove_file(folder.path().join("manifest.json")).unwrap();
    let error = compress(&Preset::w4a16().with_group(16), Some(folder.path())).unwrap_err();
    assert_says!(error, "manifest.json is gone");
}

#[test]
fn a_run_that_finished_nothing_does_not_refuse_the_next_one() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let preset = Preset::w4a16().with_group(8);
    // Fewer tokens than the widest layer has inputs.
    let short = tokens(&device).remove(0).slice([0..1]);
    let refused = OneShot::new(preset.clone())
        .with_state(folder.path())
        .compress(small_llama(&device), [short], |model, x| model.forward(x));
    assert_matches!(
        *refused.unwrap_err().error(),
        OneShotError::TooFewRows { .. }
    );
    compress(&preset, Some(folder.path())).unwrap();
    // Ended in its first block.
    for number in 0..2 {
        fs::remove_file(folder.path().join(format!("block-{number:04}.safetensors"))).unwrap();
    }
    let other = compress(&Preset::w4a16().with_group(16), Some(folder.path())).unwrap();
    assert!(other.report.blocks.iter().all(|one| !one.resumed));
}

/// All of them have the same parameters.
#[test]
fn a_state_of_a_model_with_other_rotations_norms_or_heads_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let preset = Preset::w4a16().with_group(8);
    interrupted(&preset, folder.path());
    let device = Device::flex();
    let resumed = |sizes: Sizes| {
        OneShot::new(preset.clone())
            .with_state(folder.path())
            .compress(
                with_numbers(sizes.init(&device), 11),
                tokens(&device),
                |model, x| model.forward(x),
            )
    };
    let rotated = Sizes {
        rope_theta: 5e5,
        ..SMALL
    };
    let normed = Sizes {
        norm_epsilon: 1e-2,
        ..SMALL
    };
    let headed = Sizes {
        heads: 2,
        kv_heads: 1,
        ..SMALL
    };
    for sizes in [rotated, normed, headed] {
        assert_says!(resumed(sizes).unwrap_err(), "other operations");
    }
    assert!(resumed(SMALL).unwrap().report.blocks[0].resumed);
}

#[test]
fn a_damaged_block_is_named() {
    let folder = tempfile::tempdir().unwrap();
    interrupted(&Preset::w4a16().with_group(8), folder.path());
    let file = folder.path().join("block-0000.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let error = compress(&Preset::w4a16().with_group(8), Some(folder.path())).unwrap_err();
    assert_says!(error, "block-0000.safetensors");
}
