//! Every file that is parsed: sound bytes are taken; damaged ones are taken or refused, without a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::cases::count;
use crate::damage::damaged;
use crate::parsers::{TARGETS, Target};

fn target(name: &str) -> &'static Target {
    let found = TARGETS.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("no target `{name}`"))
}

/// Parses damaged copies of every sound input; returns how many of them were refused.
fn withstands(name: &str, few: usize) -> (usize, usize) {
    let Target { parse, sound, .. } = target(name);
    let (mut refused, mut all) = (0, 0);
    for (index, sound) in sound().into_iter().enumerate() {
        parse(&sound).unwrap_or_else(|error| panic!("{name} {index} is sound: {error}"));
        let seed = 1000 * index as u64 + 18;
        for (at, bytes) in damaged(&sound, seed, count(few)).enumerate() {
            let parsed = catch_unwind(AssertUnwindSafe(|| parse(&bytes)));
            let parsed = parsed.unwrap_or_else(|_| {
                let kept = std::env::temp_dir().join(format!("{name}-{index}-{at}"));
                std::fs::write(&kept, &bytes).unwrap();
                panic!(
                    "{name}: copy {at} of input {index} panics; kept as {}",
                    kept.display()
                )
            });
            refused += usize::from(parsed.is_err());
            all += 1;
        }
    }
    (refused, all)
}

macro_rules! withstand {
    ($($test:ident: $target:literal, $few:literal;)+) => {
        $(
            #[test]
            fn $test() {
                let (refused, all) = withstands($target, $few);
                println!("{}: {refused} of {all} refused", $target);
                // Most damage is noticed; what is not leaves another sound file.
                assert!(2 * refused > all, "{refused} of {all}");
            }
        )+
    };
}

withstand! {
    damaged_files_of_quantized_models: "quantized_file", 150;
    damaged_compressed_tensors: "compressed_tensors", 150;
    damaged_sparse_records: "sparse_record", 400;
    damaged_values_in_json: "json_values", 300;
    damaged_files_of_compressed_models: "oneshot_file", 300;
    damaged_states_of_one_shot_runs: "oneshot_state", 150;
    damaged_stages_of_a_pruner: "prune_stage", 150;
    damaged_checkpoints: "checkpoint", 200;
    damaged_onnx_files: "onnx_file", 300;
    damaged_recipes: "recipe_text", 500;
    damaged_states_of_recipes: "recipe_state", 150;
}

/// `LEAN_CORPORA=DIR` writes the sound inputs for the fuzz targets of the same names.
#[test]
fn corpora_are_those_of_the_fuzz_targets() {
    let checkout = crate::support::checkout();
    let manifest = std::fs::read_to_string(checkout.join("fuzz/Cargo.toml")).unwrap();
    for Target { name, sound, .. } in &TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let source = checkout.join(format!("fuzz/fuzz_targets/{name}.rs"));
        let source = std::fs::read_to_string(source).unwrap();
        assert!(
            source.contains(&format!("parsers::{name}(bytes)")),
            "{name}"
        );
        let Some(folder) = std::env::var_os("LEAN_CORPORA") else {
            continue;
        };
        let folder = checkout.join(folder).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        for (index, bytes) in sound().into_iter().enumerate() {
            std::fs::write(folder.join(index.to_string()), bytes).unwrap();
        }
    }
}
