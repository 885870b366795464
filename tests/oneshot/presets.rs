//! Presets: names, values, what is refused.

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use burn_lean::oneshot::{
    Activations, Grid, OneShot, OneShotError, Pattern, Preset, Prune, PruneMethod, Rounding,
    Scaling, Target,
};

use crate::support::{tensor, values, with_numbers};

#[test]
fn names_come_back_as_the_preset_they_name() {
    for name in [
        "w8a8",
        "w4a8-g32",
        "w8a16",
        "w4a16-g32",
        "w3a16",
        "w4a16-g128-sym",
        "w4a16-asym",
        "sparse-0.5",
        "sparse-0.5-per-output",
        "sparse-2:4",
        "sparse-2:4-w4a16-g32",
        "sparse-0.25-per-output-w4a16-g32",
    ] {
        let preset: Preset = name.parse().unwrap();
        assert_eq!(preset.name(), name);
        let json = serde_json::to_string(&preset).unwrap();
        assert_eq!(serde_json::from_str::<Preset>(&json).unwrap(), preset);
    }
    assert_eq!("w8a16".parse::<Preset>().unwrap(), Preset::w8a16());
    assert_eq!("w8a8".parse::<Preset>().unwrap(), Preset::w8a8());
    assert_eq!("w4a16-g128".parse::<Preset>().unwrap(), Preset::w4a16());
    let three = "w3a16-g64".parse::<Preset>().unwrap().quantize.unwrap();
    assert_eq!(
        (three.bits, three.group, three.symmetric),
        (3, Some(64), false)
    );
    let either = ["w4a16-sym-g64", "w4a16-g64-sym"].map(|name| name.parse::<Preset>().unwrap());
    assert_eq!(either[0], either[1]);
    let wanda: Preset = "sparse-0.5-per-output".parse().unwrap();
    assert_eq!(wanda.prune.unwrap().pattern, Pattern::PerOutput(0.5));
    assert_eq!("sparse-0.7".parse::<Preset>().unwrap(), Preset::sparse(0.7));
    for (name, other) in [
        ("sparse-0.5-w8a16", "w8a16-sparse-0.5"),
        ("sparse-2:4-w4a8-g32", "w4a8-g32-sparse-2:4"),
    ] {
        let preset: Preset = name.parse().unwrap();
        assert_eq!(other.parse::<Preset>().unwrap(), preset);
    }
}

#[test]
fn a_grid_without_a_group_has_a_scale_for_each_weight() {
    let grid = Grid {
        bits: 4,
        group: 0,
        symmetric: false,
        codes: vec![3, 2],
        scales: vec![0.5, 2.0],
        zero_points: vec![1, 0],
    };
    assert_eq!(grid.values(2), [1.0, 4.0]);
}

#[test]
fn as_published_is_without_what_goes_beyond() {
    let preset = Preset::w4a16().with_group(32).as_published();
    let quantize = preset.quantize.unwrap();
    assert!(!quantize.search_range);
    assert_eq!(
        quantize.rounding,
        Rounding::Compensated {
            activation_order: true,
            sweeps: 0
        }
    );
    let prune = "sparse-2:4"
        .parse::<Preset>()
        .unwrap()
        .as_published()
        .prune
        .unwrap();
    assert_eq!(
        (prune.pattern, prune.method),
        (Pattern::NOfM { n: 2, m: 4 }, PruneMethod::BestSubset)
    );
}

/// Of 3 and 4 the smaller one goes, 9 of 25 squares, whatever arrives.
#[test]
fn what_weights_alone_decide_is_reported_of_them_alone() {
    let device = Device::flex();
    let mut layer: Linear = LinearConfig::new(2, 1).with_bias(false).init(&device);
    layer.weight = Param::from_data([[3.0], [4.0]], &device);
    let prune = Prune::new(Pattern::PerLayer(0.5), PruneMethod::Magnitude);
    let preset = Preset::new().with_prune(Some(prune)).as_published();
    let x = tensor::<2>(1, [3, 2], &device);
    let done = OneShot::new(preset).compress(layer, [x], |layer, x| layer.forward(x));
    let done = done.unwrap();
    assert_eq!(done.weights[0].values, [0.0, 4.0]);
    let line = &done.report.layers[0];
    assert_eq!(line.relative_error, 9.0 / 25.0);
    assert_eq!((line.rows, line.dead_inputs), (0, 0));
}

#[test]
fn what_is_no_preset_is_refused() {
    for text in [
        "",
        "w4",
        "w8a4",
        "w1a16",
        "w9a16",
        "sparse",
        "sparse-",
        "sparse--0.5",
        "sparse-1.5",
        "sparse-5:4",
        "sparse-0.5-per",
        "sparse-2:4-per-output",
        "w4a16-g0",
        "w4a16-g+8",
        "w04a16",
        "w+4a16",
        "g32",
        "w4a16-g32-x",
        "w300a16",
        "sparse-0.5-sparse-0.7",
        "w4a16-w8a16",
        "w4a16-g32-g64",
        "w4a16-sym-asym",
    ] {
        let error = text.parse::<Preset>().unwrap_err();
        assert!(
            matches!(error, OneShotError::InvalidConfig { .. }),
            "{text}: {error}"
        );
    }
    // Split at its sign it would have no value.
    let negative = "sparse--0.5".parse::<Preset>().unwrap_err();
    assert_says!(negative, "sparse--0.5");
}

#[test]
fn rounded_inputs_and_factors_need_what_fits_them() {
    let field = |preset: Preset| match preset.validate().unwrap_err() {
        OneShotError::InvalidConfig { field, .. } => field,
        error => panic!("{error}"),
    };
    let with = |preset: Preset, bits| preset.with_activations(Some(Activations::new(bits)));
    assert_eq!(field(with(Preset::w8a16(), 1)), "activations.bits");
    assert_eq!(field(with(Preset::w8a16(), 9)), "activations.bits");
    assert_eq!(field(with(Preset::sparse(0.5), 8)), "activations");
    assert!(with(Preset::w4a16().with_group(32), 8).validate().is_ok());
    let scaling = Some(Scaling::SmoothQuant { alpha: 1.5 });
    assert_eq!(field(Preset::w8a16().with_scaling(scaling)), "alpha");
    let no_block = Preset::w8a16().with_blocks(Some(Vec::new()));
    assert_eq!(field(no_block), "blocks");
}

#[test]
fn whether_a_layer_can_be_compressed_is_known_by_its_sizes() {
    let of = |name: &str, inputs, rows| {
        let preset: Preset = name.parse().unwrap();
        preset.check_layer("fc.weight", inputs, rows)
    };
    for (name, inputs, rows) in [
        ("w4a16-g4", 8, 8),
        // Nearest codes are no solution of anything, with factors before them neither.
        ("w8a16", 8, 0),
        ("w8a8", 8, 0),
        ("sparse-2:4", 8, 8),
    ] {
        assert_eq!(of(name, inputs, rows), Ok(()), "{name}");
    }
    let expected = OneShotError::TooFewRows {
        path: "fc.weight".into(),
        rows: 7,
        inputs: 8,
    };
    assert_eq!(of("w4a16-g4", 8, 7), Err(expected.clone()));
    assert_eq!(of("w4a8-g4", 8, 7), Err(expected));
    let wrong = of("sparse-2:4", 10, 100).unwrap_err();
    assert_says!(wrong, "fc.weight", "10");
    // Whatever the target says, with factors it is what the layer's own inputs give.
    let nearest = Preset::w8a16().with_target(Target::Original);
    assert!(nearest.check_layer("fc.weight", 8, 7).is_err());
    let awq = nearest.with_scaling(Some(Scaling::Awq));
    assert_eq!(awq.check_layer("fc.weight", 8, 7), Ok(()));
}

/// 0.29 · 100 is 28.999999999999996 in floats.
#[test]
fn a_fraction_that_is_a_whole_number_removes_as_many() {
    let device = Device::flex();
    let model = with_numbers(LinearConfig::new(100, 4).init(&device), 3);
    let x = tensor::<2>(2, [120, 100], &device);
    let preset: Preset = "sparse-0.29-per-output".parse().unwrap();
    let done = OneShot::new(preset).compress(model, [x], |model: &Linear, x| model.forward(x));
    let weight = values(done.unwrap().model.weight.val());
    for output in 0..4 {
        let zeros = weight.iter().skip(output).step_by(4).filter(|w| **w == 0.0);
        assert_eq!(zeros.count(), 29);
    }
}
