//! Everything that prepares a model reaches the places that a forward pass shows, without an edit.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::module::conv_transpose2d;
use burn::tensor::ops::ConvTransposeOptions;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::quant::{
    FakeQuantizeConfig, GptqConfig, MixedPrecisionConfig, NumberFormat, ObserverConfig, PtqConfig,
    PtqMode, QatConfig, QuantizedForward, Rounding, RoundingConfig, Scheme, WeightConfig,
    ptq::PtqReport, quantizers,
};

use crate::sites_models::Decoder;
use crate::support::{on_each, tensor, values, with_numbers};

fn paths<M: Module>(model: &M) -> Vec<String> {
    let located = quantizers(model).into_iter();
    located.map(|located| located.path).collect()
}

fn forward(model: &Decoder, x: Tensor<3>) -> Tensor<3> {
    model.forward(x)
}

fn quantized(model: &Decoder, x: Tensor<3>) -> Vec<f32> {
    let run = QuantizedForward::new().run(model, x, forward);
    values(run.unwrap())
}

fn config() -> PtqConfig {
    PtqConfig::new()
        .with_quantize(QatConfig::new().with_sums(true))
        .with_progress(false)
}

/// Σ reference² / Σ (reference − found)².
fn signal_to_noise(reference: &[f32], found: &[f32]) -> f32 {
    let noise: f32 = reference
        .iter()
        .zip(found)
        .map(|(a, b)| (a - b).powi(2))
        .sum();
    reference.iter().map(|a| a * a).sum::<f32>() / noise
}

#[test]
fn ptq_reaches_the_places_that_qat_reaches() {
    on_each(|device| {
        let float = with_numbers(Decoder::new(device), 7);
        let batches = || (1..4).map(|seed| Decoder::batch(seed, device));
        let x = Decoder::batch(1, device);
        let expected = values(float.forward(x.clone()));
        let trained = QatConfig::new()
            .with_sums(true)
            .prepare_for(float.clone(), x.clone(), forward)
            .unwrap();
        for mode in [PtqMode::Static, PtqMode::Dynamic] {
            let config = config().with_mode(mode);
            let (model, report) = config
                .quantize_for(float.clone(), batches, forward)
                .unwrap();
            assert_eq!(paths(&model), paths(&trained));
            assert_eq!(report.left_float, []);
            let found = quantized(&model, x.clone());
            assert_ne!(found, expected);
            assert!(signal_to_noise(&expected, &found) > 300.0, "{mode:?}");
            if mode == PtqMode::Static {
                let ranges = report.activations.iter();
                let ranges: Vec<&str> = ranges.map(|range| range.path.as_str()).collect();
                for site in ["wq.weight.quant.sites.query", "mixing.quant.sites.sum_left"] {
                    assert!(ranges.iter().any(|path| path.ends_with(site)), "{ranges:?}");
                }
            }
        }
    });
}

#[test]
fn weights_that_only_the_forward_pass_shows_are_rounded_and_biases_corrected() {
    let device = Device::flex();
    let float = with_numbers(Decoder::new(&device), 7);
    let batches = || (1..9).map(|seed| Decoder::batch(seed, &device));
    let rounding = RoundingConfig::new().with_rounding(Rounding::Gptq(GptqConfig::new()));
    let config = config().with_rounding(rounding);
    let (_, report) = config.quantize_for(float, batches, forward).unwrap();
    let rounded = report.rounding.weights.iter();
    let rounded: Vec<&str> = rounded.map(|weight| weight.path.as_str()).collect();
    let block = ["wq.weight", "wk.weight", "wv.weight"].map(|name| format!("block.{name}"));
    for path in block
        .iter()
        .map(String::as_str)
        .chain(["input.weight", "head.weight"])
    {
        assert!(rounded.contains(&path), "{path} in {rounded:?}");
    }
}

/// Integers of four bits.
fn few_bits(rounding: Rounding) -> PtqConfig {
    PtqConfig::new()
        .with_quantize(QatConfig::new().with_weight(WeightConfig::int(4)))
        .with_rounding(RoundingConfig::new().with_rounding(rounding))
        .with_progress(false)
}

/// Nothing is rounded for its inputs, and this is named.
fn assert_left_to_nearest(report: &PtqReport, path: &str) {
    let rounding = &report.rounding;
    assert!(rounding.weights.is_empty(), "{rounding}");
    let nearest: Vec<&str> = rounding
        .nearest
        .iter()
        .map(|(path, _)| path.as_str())
        .collect();
    assert_eq!(nearest, [path], "{rounding}");
}

/// As in an autoencoder whose decoder is its encoder transposed.
#[test]
fn a_weight_that_is_multiplied_in_both_directions_is_left_to_nearest_rounding() {
    on_each(|device| {
        let forward = |model: &Linear, x: Tensor<2>| {
            let hidden = model.forward(x).tanh();
            hidden.matmul(model.weight.val().transpose())
        };
        for features in [6, 4] {
            let model: Linear = with_numbers(LinearConfig::new(features, 4).init(device), 3);
            let batches = || [tensor::<2>(5, [8, features], device)];
            for rounding in [Rounding::Auto, Rounding::Gptq(GptqConfig::new())] {
                let config = few_bits(rounding);
                let quantized = config.quantize_for(model.clone(), batches, forward);
                assert_left_to_nearest(&quantized.unwrap().1, "weight");
            }
        }
    });
}

/// The inputs of one of both products are collected.
#[test]
fn a_weight_that_another_kind_of_product_reads_too_is_left_to_nearest_rounding() {
    on_each(|device| {
        let conv: Conv2d = with_numbers(Conv2dConfig::new([2, 3], [2, 2]).init(device), 3);
        let images = || [tensor::<4>(5, [4, 2, 5, 5], device)];
        let transposed = |conv: &Conv2d, x: Tensor<4>| {
            let hidden = conv.forward(x).tanh();
            let options = ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], 1);
            conv_transpose2d(hidden, conv.weight.val(), None, options)
        };
        let config = few_bits(Rounding::Auto);
        let (_, report) = config.quantize_for(conv, images, transposed).unwrap();
        assert_left_to_nearest(&report, "weight");
        assert_says!(report, "a product whose inputs are not collected");

        let linear: Linear = with_numbers(LinearConfig::new(6, 4).init(device), 3);
        let rows = || [tensor::<2>(5, [8, 6], device)];
        let on_the_left = |linear: &Linear, x: Tensor<2>| {
            let hidden = linear.forward(x).tanh();
            linear.weight.val().matmul(hidden.transpose())
        };
        let (_, report) = config.quantize_for(linear, rows, on_the_left).unwrap();
        assert_left_to_nearest(&report, "weight");
    });
}

/// A table of the model's own.
#[derive(Module, Debug)]
struct Table {
    rows: Param<Tensor<2>>,
}

/// The inputs of the head are of one direction, which the codes of the looked-up rows would pay for.
#[test]
fn a_table_whose_rows_are_looked_up_is_not_rounded_for_the_head_alone() {
    on_each(|device| {
        let tokens = || [Tensor::<2, Int>::zeros([2, 3], device)];
        let table: Embedding = with_numbers(EmbeddingConfig::new(5, 4).init(device), 3);
        let tied = |table: &Embedding, tokens: Tensor<2, Int>| {
            let rows = table.forward(tokens).tanh();
            rows.matmul(table.weight.val().transpose().unsqueeze())
        };
        for rounding in [Rounding::Auto, Rounding::Gptq(GptqConfig::new())] {
            let config = few_bits(rounding);
            let quantized = config.quantize_for(table.clone(), tokens, tied);
            assert_left_to_nearest(&quantized.unwrap().1, "weight");
        }

        let rows = Param::from_tensor(tensor::<2>(7, [5, 4], device));
        let tied = |table: &Table, tokens: Tensor<2, Int>| {
            let rows = table.rows.val().select(0, tokens.flatten(0, 1)).tanh();
            rows.matmul(table.rows.val().transpose())
        };
        let config = few_bits(Rounding::Auto);
        let (_, report) = config.quantize_for(Table { rows }, tokens, tied).unwrap();
        assert_left_to_nearest(&report, "rows");
    });
}

#[test]
fn a_config_with_the_sites_of_a_forward_pass_prepares_models_that_records_load_into() {
    let device = Device::flex();
    let x = Decoder::batch(1, &device);
    let float = with_numbers(Decoder::new(&device), 7);
    let mut config = config();
    config.quantize = config
        .quantize
        .with_sites_of(&float, x.clone(), forward)
        .unwrap();
    let batches = || (1..4).map(|seed| Decoder::batch(seed, &device));
    let (model, _) = config.quantize_for(float, batches, forward).unwrap();
    let expected = quantized(&model, x.clone());
    // As an application does: another model, no data, a config from a file.
    let text = serde_json::to_string(&config.qat_config()).unwrap();
    let config: QatConfig = serde_json::from_str(&text).unwrap();
    let other = config.prepare(Decoder::new(&device)).unwrap();
    let other = other.load_record(model.into_record());
    assert_eq!(quantized(&other, x), expected);
}

#[test]
fn bits_are_allocated_to_layers_with_all_of_their_sites() {
    let device = Device::flex();
    let x = Decoder::batch(1, &device);
    let float = with_numbers(Decoder::new(&device), 7);
    let expected = values(float.forward(x.clone()));
    let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint(3)))
        .with_observer(ObserverConfig::MinMax);
    let config = QatConfig::new()
        .with_sums(true)
        .with_activation(Some(activation))
        .with_sites_of(&float, x.clone(), forward)
        .unwrap();
    let run = QuantizedForward::new();
    let output = |model: &Decoder| run.run(model, x.clone(), forward);
    let allocation = MixedPrecisionConfig::new(config)
        .with_max_drop(6.0)
        .allocate(
            float,
            |model: &Decoder| output(model).map(drop),
            output,
            // In dB, at most 60.
            |model| {
                let found = values(output(model).unwrap());
                f64::from(10.0 * signal_to_noise(&expected, &found).log10()).min(60.0)
            },
        )
        .unwrap();
    let kept = &allocation.report.kept;
    assert!(!kept.is_empty(), "{}", allocation.report);
    let sites = quantizers(&allocation.model).into_iter();
    let of_sites = sites.filter(|located| located.path.contains("sites."));
    let bits: Vec<(bool, String)> = of_sites
        .map(|located| {
            let is_kept = located.parameter.is_some_and(|layer| kept.contains(&layer));
            (is_kept, located.quantizer.scheme().to_string())
        })
        .collect();
    assert_eq!(bits.len(), 4);
    for (is_kept, scheme) in bits {
        let expected = if is_kept { "UINT8" } else { "UINT3" };
        assert_says!(scheme, expected);
    }
}
