//! Presets: names, values, what is refused.

use burn_lean::oneshot::{Activations, OneShotError, Pattern, Preset, PruneMethod, Rounding};

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
        "sparse-2:4",
        "sparse-2:4-w4a16-g32",
    ] {
        let preset: Preset = name.parse().unwrap();
        assert_eq!(preset.name(), name);
        let json = serde_json::to_string(&preset).unwrap();
        assert_eq!(serde_json::from_str::<Preset>(&json).unwrap(), preset);
    }
    assert_eq!("w8a16".parse::<Preset>().unwrap(), Preset::w8a16());
    assert_eq!("w8a8".parse::<Preset>().unwrap(), Preset::w8a8());
    assert_eq!("w3a16-g64".parse::<Preset>().unwrap(), Preset::w3a16(64));
    assert_eq!("sparse-0.7".parse::<Preset>().unwrap(), Preset::sparse(0.7));
    assert_eq!(
        "sparse-2:4".parse::<Preset>().unwrap(),
        Preset::sparse_2_4()
    );
}

#[test]
fn as_published_is_without_what_goes_beyond() {
    let preset = Preset::w4a16(32).as_published();
    let quantize = preset.quantize.unwrap();
    assert!(!quantize.search_range);
    assert_eq!(
        quantize.rounding,
        Rounding::Compensated {
            activation_order: true,
            sweeps: 0
        }
    );
    let prune = Preset::sparse_2_4().as_published().prune.unwrap();
    assert_eq!(
        (prune.pattern, prune.method),
        (Pattern::NOfM { n: 2, m: 4 }, PruneMethod::BestSubset)
    );
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
        "sparse-1.5",
        "sparse-5:4",
        "w4a16-g0",
        "g32",
        "w4a16-g32-x",
    ] {
        let error = text.parse::<Preset>().unwrap_err();
        assert!(
            matches!(error, OneShotError::Invalid { .. }),
            "{text}: {error}"
        );
    }
}

#[test]
fn rounded_inputs_need_bits_and_weights_on_a_grid() {
    let field = |preset: Preset| match preset.validate().unwrap_err() {
        OneShotError::Invalid { field, .. } => field,
        error => panic!("{error}"),
    };
    let with = |preset: Preset, bits| preset.with_activations(Some(Activations::new(bits)));
    assert_eq!(field(with(Preset::w8a16(), 1)), "activations.bits");
    assert_eq!(field(with(Preset::w8a16(), 9)), "activations.bits");
    assert_eq!(field(with(Preset::sparse(0.5), 8)), "activations");
    assert!(with(Preset::w4a16(32), 8).validate().is_ok());
}
