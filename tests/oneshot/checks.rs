//! What the example says of a run by sizes alone, and that the run agrees.

use burn::tensor::Device;
use burn_lean::oneshot::{OneShot, OneShotError, Preset};
use serde_json::{Value, json};

use crate::check::{check, folder, layers, leave_head};
use crate::llama::{Llama, Sizes};
use crate::pretrained::Pretrained;
use crate::support::with_numbers;
use crate::{SMALL, small_llama, tokens};

/// Of a Llama of 135 million weights.
const OF_576: Sizes = Sizes {
    vocabulary: 49152,
    width: 576,
    hidden: 1536,
    layers: 30,
    heads: 9,
    kv_heads: 3,
    ..SMALL
};

/// Of one of 8 billion.
const OF_4096: Sizes = Sizes {
    vocabulary: 128_256,
    width: 4096,
    hidden: 14336,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    own_head: true,
    ..SMALL
};

fn preset(name: &str) -> Preset {
    name.parse().unwrap()
}

#[test]
fn a_folder_of_mostly_floats_is_refused_with_groups_that_fit() {
    let of = |name: &str| folder(&preset(name), &OF_576);
    // 2,654,208 of 3,538,944 weights of a block read 576 numbers, four groups and a half.
    let refused = of("w4a16-g128").unwrap_err();
    assert_says!(refused, "576 inputs", "75 %", "groups of 64");
    assert_says!(of("w4a8-g128").unwrap_err(), "not rounded");
    for name in ["w4a16-g64", "w4a16-asym", "w8a8", "sparse-2:4"] {
        assert_eq!(of(name), Ok(Vec::new()), "{name}");
    }
    // One group, which is the whole output.
    assert_eq!(folder(&preset("w4a16-g128"), &SMALL), Ok(Vec::new()));
    // A quarter of the weights: said, and done.
    let few = Sizes {
        width: 64,
        hidden: 172,
        heads: 8,
        kv_heads: 4,
        ..SMALL
    };
    let lines = folder(&preset("w4a16-g32"), &few).unwrap();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_says!(lines[0], "172 inputs", "24 %", "take none");
}

#[test]
fn which_programs_read_a_grid_is_said_where_it_is_not_all_of_them() {
    for (name, said) in [
        ("w4a16-g32", None),
        ("w4a16-g128-sym", None),
        ("w4a16", None),
        ("w8a16", None),
        ("w8a8", None),
        ("sparse-2:4-w4a16-g64", None),
        ("w4a8-g32", Some("vLLM does not")),
        ("w8a8-g64", Some("vLLM does not")),
        ("w4a8-g64-sym", Some("on CPUs alone")),
        ("w3a16-g64", Some("on its version")),
        ("w8a16-g32", Some("on its version")),
    ] {
        let presets = [(name.to_string(), preset(name))];
        let lines = check(&presets, &OF_4096, 14336, true).unwrap();
        assert_eq!(lines.len(), usize::from(said.is_some()), "{lines:?}");
        for (line, said) in lines.iter().zip(said) {
            assert_says!(line, &format!("{name}: "), said);
        }
        // Without a folder nobody reads one.
        assert!(check(&presets, &OF_4096, 14336, false).unwrap().is_empty());
    }
}

#[test]
fn calibration_that_is_too_short_is_refused_by_sizes_as_by_the_run() {
    let device = Device::flex();
    let short = tokens(&device).remove(0).slice([0..1]);
    let rows = short.dims()[1];
    for name in ["w4a16-g4", "sparse-2:4"] {
        let done = OneShot::new(preset(name)).compress(
            small_llama(&device),
            [short.clone()],
            |model, x| model.forward(x),
        );
        let expected = OneShotError::TooFewRows {
            path: "layers.0.feed_forward.w2.weight".into(),
            rows,
            inputs: SMALL.hidden,
        };
        assert_eq!(done.unwrap_err().into_error(), expected);
        assert_eq!(layers(&preset(name), &SMALL, rows), Err(expected));
        assert_eq!(layers(&preset(name), &SMALL, SMALL.hidden), Ok(()));
    }
    // Nearest codes ask for no rows; groups of a pattern have to divide.
    assert_eq!(layers(&preset("w8a8"), &SMALL, 1), Ok(()));
    let odd = layers(&preset("sparse-3:8"), &SMALL, 100).unwrap_err();
    assert_matches!(odd, OneShotError::DoesNotFit { .. });
}

/// What becomes of a small model whose head is a matrix of its own: paths of the compressed weights, and what the
/// configuration of its folder leaves out.
fn with_own_head(sizes: &Sizes, asked: bool) -> (Vec<String>, Value) {
    let device = Device::flex();
    let mut preset = Preset::w8a16();
    leave_head(&mut preset, sizes, asked).unwrap();
    let model: Llama = with_numbers(sizes.init(&device), 11);
    let done = OneShot::new(preset)
        .compress(model, tokens(&device), |model, x| model.forward(x))
        .unwrap();
    let paths = done.weights.iter().map(|weight| weight.path.clone());
    let paths = paths.collect();
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("model");
    let mut writer = Pretrained::create(&folder, false, sizes, None).unwrap();
    writer
        .add(&done.prepare(None).unwrap().model, None)
        .unwrap();
    writer.finish().unwrap();
    let text = std::fs::read(folder.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&text).unwrap();
    (paths, config["quantization_config"]["ignore"].clone())
}

#[test]
fn a_head_of_its_own_stays_as_it_is_unless_it_is_asked_for() {
    let sizes = Sizes {
        own_head: true,
        ..SMALL
    };
    let head = "output.weight".to_string();
    let (paths, ignored) = with_own_head(&sizes, false);
    assert_eq!((paths.len(), paths.contains(&head)), (14, false));
    assert_eq!(ignored, json!(["lm_head"]));
    let (paths, ignored) = with_own_head(&sizes, true);
    assert_eq!((paths.len(), paths.contains(&head)), (15, true));
    assert_eq!(ignored, json!([]));
    // A tied one has no path that could be skipped, and is nothing to ask for.
    let mut tied = Preset::w8a16();
    leave_head(&mut tied, &SMALL, false).unwrap();
    assert_eq!(tied, Preset::w8a16());
    assert_says!(leave_head(&mut tied, &SMALL, true).unwrap_err(), "--head");
}
