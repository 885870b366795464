//! Zeros and a grid: codes on the weights that pruning left, and zeros that move.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{Device, TensorData};
use burn_lean::oneshot::{
    OneShot, Pattern, Preset, Prune, PruneMethod, Quantize, Rounding, Target,
};

use crate::methods::{INPUTS, OUTPUTS, compressed, grid, inputs, layer, output_error, rows};
use crate::support::values;

#[test]
fn codes_that_make_good_for_each_other_beat_nearest_ones_beside_zeros() {
    let device = Device::flex();
    let quantize = grid(3, Some(4), true, Rounding::refined());
    let prune = Prune::new(Pattern::PerLayer(0.5), PruneMethod::BestSubset);
    let mut both = Preset::new()
        .with_prune(Some(prune))
        .with_quantize(Some(quantize.clone()));
    both.target = Target::OwnInputs;
    let refined = compressed(&device, both.clone());
    let grid = refined.weights[0].grid.as_ref().unwrap();
    assert_eq!(grid.values(INPUTS), refined.weights[0].values);
    assert!(refined.weights[0].zeros() >= INPUTS * OUTPUTS / 2);

    let mut nearest = both;
    nearest.quantize.as_mut().unwrap().rounding = Rounding::Nearest;
    let (one, other) = (
        output_error(&refined.model),
        output_error(&compressed(&device, nearest).model),
    );
    assert!(one < 0.95 * other, "{one} against {other}");
}

/// Zeros that move lower the objective, and stay as many, where the pattern has them.
#[test]
fn zeros_that_move_lower_the_objective_within_their_pattern() {
    let device = Device::flex();
    for (pattern, group) in [
        (Pattern::PerOutput(0.5), None),
        (Pattern::NOfM { n: 2, m: 4 }, Some(4)),
    ] {
        let error = |exchange: bool| {
            let quantize = grid(2, None, true, Rounding::refined()).with_exchange_zeros(exchange);
            let prune = Prune::new(pattern, PruneMethod::BestSubset);
            let preset = Preset::new()
                .with_prune(Some(prune))
                .with_quantize(Some(quantize));
            let done = compressed(&device, preset);
            for row in rows(&done.model) {
                let nonzeros = |row: &[f64]| row.iter().filter(|w| **w != 0.0).count();
                assert!(nonzeros(&row) <= INPUTS - INPUTS / 2);
                if let Some(m) = group {
                    assert!(row.chunks(m).all(|group| nonzeros(group) <= 2));
                }
            }
            done.report.layers[0].relative_error
        };
        let (stay, moved) = (error(false), error(true));
        assert!(moved < stay, "{pattern}: {moved} against {stay}");
    }
}

#[test]
fn zeros_move_only_where_there_are_some_and_codes_are_searched() {
    let quantize = |rounding| {
        Some(
            Quantize::new(4)
                .with_rounding(rounding)
                .with_exchange_zeros(true),
        )
    };
    let dense = Preset::new().with_quantize(quantize(Rounding::refined()));
    let prune = Some(Prune::new(Pattern::PerOutput(0.5), PruneMethod::BestSubset));
    let nearest = Preset::new()
        .with_prune(prune)
        .with_quantize(quantize(Rounding::Nearest));
    for preset in [dense, nearest] {
        assert_says!(preset.validate().unwrap_err(), "exchange_zeros");
    }
}

/// An output that keeps no weight has nothing to round.
#[test]
fn an_output_without_weights_stays_zero_in_every_order() {
    let device = Device::flex();
    let mut dead = layer(&device);
    let mut weights = values(dead.weight.val());
    // The first output, whose weights are a column.
    weights.iter_mut().step_by(OUTPUTS).for_each(|w| *w = 0.0);
    dead.weight = Param::from_data(TensorData::new(weights, [INPUTS, OUTPUTS]), &device);
    for activation_order in [false, true] {
        let rounding = Rounding::Compensated {
            activation_order,
            sweeps: 0,
        };
        let prune = Prune::new(Pattern::PerLayer(0.5), PruneMethod::Magnitude);
        let preset = Preset::new()
            .with_quantize(Some(Quantize::new(4).with_rounding(rounding)))
            .with_prune(Some(prune))
            .as_published();
        let done = OneShot::new(preset).compress(dead.clone(), inputs(&device), Linear::forward);
        let weight = values(done.unwrap().model.weight.val());
        assert!(weight.iter().step_by(OUTPUTS).all(|w| *w == 0.0));
        assert!(weight.iter().any(|w| *w != 0.0));
    }
}
