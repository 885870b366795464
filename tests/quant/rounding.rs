//! Weight rounding with calibration data, and bias correction.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig, PaddingConfig1d, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, GptqConfig, Learned, Mapping, NumberFormat, ObserverConfig, PtqConfig,
    PtqMode, QatConfig, QuantError, Rounding, RoundingConfig, Unsupported, WeightConfig,
    WeightQuantizer,
    module::{InputStatistics, LayerInputs},
    quantized_weights,
    rounding::{AdaRoundConfig, RoundedWeight, WeightGrid, adaround, gptq},
};

use crate::support::{each_device, farthest, numbers, on_each, tensor, values, with_numbers};

/// Inputs whose features are correlated: products of few factors.
fn correlated(seed: u64, rows: usize, features: usize, device: &Device) -> Tensor<2> {
    let factors = tensor::<2>(seed, [rows, features / 2], device);
    let mixing = tensor::<2>(99, [features / 2, features], device);
    factors.matmul(mixing) + tensor::<2>(seed + 1, [rows, features], device) * 0.1
}

fn grid(outputs: usize, features: usize, quant_max: i32) -> WeightGrid {
    let weight = numbers(5, outputs * features);
    let scale = weight.chunks(features).flat_map(|row| {
        let largest = row.iter().fold(0.0_f32, |largest, w| largest.max(w.abs()));
        vec![largest / quant_max as f32; features]
    });
    let scale: Vec<f32> = scale.collect();
    let zeros = vec![0.0; outputs * features];
    WeightGrid::new(
        [outputs, features],
        weight.clone(),
        scale,
        zeros,
        (-quant_max, quant_max),
    )
    .unwrap()
}

fn statistics(features: usize) -> InputStatistics {
    let mut inputs = InputStatistics::new(features);
    inputs
        .observe(correlated(1, 128, features, &Device::flex()))
        .unwrap();
    inputs
}

#[test]
fn both_methods_beat_nearest_rounding_on_correlated_inputs() {
    let (outputs, features) = (8, 16);
    let inputs = statistics(features);
    for quant_max in [7, 3, 1] {
        let grid = grid(outputs, features, quant_max);
        let error = |codes: &[i32]| grid.output_error(codes, &inputs).unwrap();
        let nearest = error(&grid.nearest());
        let by_gptq = gptq(&grid, &inputs, &GptqConfig::new()).unwrap();
        let ordered = GptqConfig::new().with_activation_order(true);
        let by_order = gptq(&grid, &inputs, &ordered).unwrap();
        let by_adaround = adaround(&grid, &inputs, &AdaRoundConfig::new()).unwrap();
        assert!(error(&by_gptq) < 0.7 * nearest);
        assert!(error(&by_order) < 0.7 * nearest);
        assert!(error(&by_adaround) < 0.5 * nearest);
        for codes in [by_gptq, by_order, by_adaround] {
            assert!(codes.iter().all(|code| code.abs() <= quant_max));
        }
    }
}

/// The formula in F64, sample by sample.
#[test]
fn the_output_error_is_that_of_the_samples_in_however_many_batches_they_came() {
    let device = Device::flex();
    let (outputs, features) = (6, 40);
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(4))
        .with_activation(None);
    let layer = LinearConfig::new(features, outputs).init(&device);
    let layer = config.prepare(with_numbers(layer, 1)).unwrap();
    let batches = [1, 3].map(|seed| correlated(seed, 30, features, &device));
    let inputs = LayerInputs::collect(&layer, |layer| {
        for x in &batches {
            drop(layer.forward_q(x.clone()));
        }
    })
    .unwrap();
    let grid = grid(outputs, features, 7);
    let codes = grid.nearest();
    let weight = numbers(5, outputs * features);
    let pairs = grid.values(&codes).into_iter().zip(weight);
    let off: Vec<f64> = pairs.map(|(a, b)| f64::from(a) - f64::from(b)).collect();
    let samples: Vec<f32> = batches.into_iter().flat_map(values::<2>).collect();
    let mut squares = 0.0;
    for x in samples.chunks(features) {
        for off in off.chunks(features) {
            let terms = off.iter().zip(x).map(|(off, x)| off * f64::from(*x));
            squares += terms.sum::<f64>().powi(2);
        }
    }
    let expected = squares / (60 * outputs) as f64;
    let found = grid.output_error(&codes, &inputs.of("weight").unwrap()[0]);
    let found = found.unwrap();
    assert!((found / expected - 1.0).abs() < 1e-10, "{found} {expected}");
}

#[test]
fn adaround_is_between_nearest_rounding_and_the_best_of_all() {
    let features = 8;
    let inputs = statistics(features);
    let grid = grid(1, features, 3);
    let weight = grid.nearest();
    let lower: Vec<i32> = {
        // Codes below the weight: one less where nearest rounded up.
        let values = grid.values(&weight);
        let original = numbers(5, features);
        let below = |index: usize| weight[index] - i32::from(values[index] > original[index]);
        (0..features).map(below).collect()
    };
    let best = (0..1 << features)
        .map(|choice: i32| {
            let codes: Vec<i32> = lower
                .iter()
                .enumerate()
                .map(|(bit, code)| (code + (choice >> bit & 1)).clamp(-3, 3))
                .collect();
            grid.output_error(&codes, &inputs).unwrap()
        })
        .fold(f64::INFINITY, f64::min);
    let found = adaround(&grid, &inputs, &AdaRoundConfig::new()).unwrap();
    let found = grid.output_error(&found, &inputs).unwrap();
    let nearest = grid.output_error(&weight, &inputs).unwrap();
    assert!(best < nearest);
    assert!(
        (best..=nearest).contains(&found),
        "{best} {found} {nearest}"
    );
}

#[test]
fn a_dead_feature_is_rounded_to_nearest_and_takes_no_compensation() {
    let device = Device::flex();
    let mut inputs = InputStatistics::new(3);
    inputs
        .observe(Tensor::from_data(
            [[1.0, 0.0, 1.0], [2.0, 0.0, 2.0]],
            &device,
        ))
        .unwrap();
    let grid = WeightGrid::new(
        [1, 3],
        vec![0.4, 2.4, 0.4],
        vec![1.0; 3],
        vec![0.0; 3],
        (-7, 7),
    )
    .unwrap();
    for order in [false, true] {
        let config = GptqConfig::new().with_activation_order(order);
        let codes = gptq(&grid, &inputs, &config).unwrap();
        assert_eq!(codes[1], 2);
        assert_eq!(codes[0] + codes[2], 1);
    }
    // Nothing at all is known.
    let mut nothing = InputStatistics::new(3);
    nothing.observe(Tensor::zeros([4, 3], &device)).unwrap();
    assert_eq!(
        gptq(&grid, &nothing, &GptqConfig::new()).unwrap(),
        grid.nearest()
    );
    assert_eq!(
        adaround(&grid, &nothing, &AdaRoundConfig::new()).unwrap(),
        grid.nearest()
    );
}

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    fc: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let mut conv = Conv2dConfig::new([4, 4], [3, 3])
            .with_padding(PaddingConfig2d::Same)
            .with_groups(2)
            .init(device);
        conv.weight = Param::from_tensor(tensor(1, [4, 2, 3, 3], device));
        conv.bias = Some(Param::from_tensor(tensor(2, [4], device)));
        let mut fc = LinearConfig::new(4 * 16, 5).init(device);
        fc.weight = Param::from_tensor(tensor(3, [64, 5], device));
        fc.bias = Some(Param::from_tensor(tensor(4, [5], device)));
        Self { conv, fc }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        self.fc
            .forward_q(relu(self.conv.forward_q(x)).flatten(1, 3))
    }
}

/// Smooth images: neighbours resemble each other.
fn images(seed: u64, device: &Device) -> Tensor<4> {
    let coarse = tensor::<4>(seed, [8, 4, 2, 2], device);
    coarse.repeat_dim(2, 2).repeat_dim(3, 2) + tensor::<4>(seed + 50, [8, 4, 4, 4], device) * 0.2
}

fn mean_squared(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / a.len() as f32
}

#[test]
fn a_rounded_model_is_closer_to_the_float_one_and_converts_to_those_codes() {
    on_each(|device| {
        let float = Net::new(device);
        let x = images(30, device);
        let expected = values(float.forward(x.clone()));
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(3))
            .with_activation(None);
        let nearest = config.prepare(float).unwrap();
        let inputs = LayerInputs::collect(&nearest, |nearest| {
            for seed in 0..4 {
                nearest.forward(images(seed, device));
            }
        })
        .unwrap();
        assert_eq!(
            inputs.paths().collect::<Vec<_>>(),
            ["conv.weight", "fc.weight"]
        );
        assert_eq!(inputs.of("conv.weight").unwrap().len(), 2);
        let before = mean_squared(&values(nearest.forward(x.clone())), &expected);

        for rounding in [
            Rounding::Gptq(GptqConfig::new()),
            Rounding::AdaRound(AdaRoundConfig::new()),
        ] {
            let config = RoundingConfig::new().with_rounding(rounding);
            let (rounded, report) = config.apply(nearest.clone(), &inputs).unwrap();
            for weight in &report.weights {
                assert!(weight.error < weight.nearest_error, "{report}");
                assert!(
                    weight.changed > 0.0 && weight.bias_correction.is_some(),
                    "{report}"
                );
            }
            let after = mean_squared(&values(rounded.forward(x.clone())), &expected);
            assert!(after < 0.8 * before, "{after} {before}\n{report}");

            // Fake quantization leaves the rounded weight as it is, and keeps its scales.
            assert_eq!(
                values(rounded.fc.weight.val()),
                values(rounded.fc.weight.base())
            );
            assert_eq!(
                values(rounded.conv.weight.val()),
                values(rounded.conv.weight.base())
            );
            let scales = |net: &Net| -> Vec<Vec<f32>> {
                let weights = quantized_weights(net).unwrap().into_iter();
                weights.map(|(_, weight)| weight.scale().to_vec()).collect()
            };
            assert_eq!(scales(&rounded), scales(&nearest));

            let convert = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
            let (converted, _) = convert.convert(rounded.clone()).unwrap();
            assert_eq!(
                quantized_weights(&converted).unwrap(),
                quantized_weights(&rounded).unwrap()
            );
            assert_eq!(
                values(converted.forward(x.clone())),
                values(rounded.forward(x.clone()))
            );
        }
    });
}

#[test]
fn training_with_learned_scales_goes_on_from_the_rounded_weights() {
    each_device(|target| {
        let x = correlated(7, 64, 8, &target.device);
        let device = target.device.clone().autodiff();
        let float = with_numbers(LinearConfig::new(8, 3).init(&device), 4);
        let weight = WeightConfig::int(3).with_learned(Learned::Lsq);
        let config = QatConfig::new().with_weight(weight).with_activation(None);
        // With the ranges of the values at hand, and with ranges that were chosen.
        let prepared = config.prepare(float.clone()).unwrap();
        let inputs = LayerInputs::collect(&prepared, |layer| {
            layer.forward_q(x.clone());
        })
        .unwrap();
        let (at_hand, _) = RoundingConfig::new().apply(prepared, &inputs).unwrap();
        let (chosen, _) = PtqConfig::new()
            .with_quantize(config)
            .with_mode(PtqMode::WeightOnly)
            .with_progress(false)
            .quantize(
                float,
                || [x.clone()],
                |layer: &Linear, x| {
                    layer.forward_q(x);
                },
            )
            .unwrap();
        for layer in [at_hand, chosen] {
            let first_step = layer.weight.val();
            assert!(first_step.is_autodiff());
            assert_eq!(values(first_step), values(layer.weight.base()));
            let quantizers = WeightQuantizer::of(&layer.weight).unwrap();
            assert!(quantizers.weight.is_learning());
        }
    });
}

#[test]
fn a_weight_that_is_observed_keeps_the_grid_that_it_was_rounded_to() {
    let device = Device::flex();
    let x = correlated(7, 64, 8, &device);
    let weight = WeightConfig::new()
        .with_format(NumberFormat::uint(4))
        .with_mapping(Mapping::Affine)
        .with_observer(ObserverConfig::MinMax);
    let config = QatConfig::new().with_weight(weight).with_activation(None);
    let layer = LinearConfig::new(8, 3).init(&device.clone().autodiff());
    let layer: Linear = config.prepare(with_numbers(layer, 4)).unwrap();
    drop(layer.forward_q(x.clone()));
    let inputs = LayerInputs::collect(&layer, |layer| drop(layer.forward_q(x.clone())));
    let (rounded, _) = RoundingConfig::new()
        .apply(layer, &inputs.unwrap())
        .unwrap();
    // Both look at the weight in training; the ends of the grid are off those of the range.
    assert_eq!(values(rounded.weight.val()), values(rounded.weight.base()));
}

#[test]
fn bias_correction_keeps_the_mean_output() {
    on_each(|device| {
        let mut layer = LinearConfig::new(8, 3).init(device);
        layer.weight = Param::from_tensor(tensor(3, [8, 3], device));
        let x = tensor::<2>(1, [64, 8], device) + 1.0;
        let mean = |layer: &Linear| values(layer.forward_q(x.clone()).mean_dim(0));
        let expected = mean(&layer);
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(2))
            .with_activation(None);
        let layer = config.prepare(layer).unwrap();
        let inputs = LayerInputs::collect(&layer, |layer| {
            layer.forward_q(x.clone());
        })
        .unwrap();
        let off = |found: Vec<f32>| farthest(&found, &expected);
        assert!(off(mean(&layer)) > 0.1);
        let nearest = RoundingConfig::new().with_rounding(Rounding::Nearest);
        let (corrected, report) = nearest.apply(layer.clone(), &inputs).unwrap();
        assert_eq!(report.weights[0].changed, 0.0);
        // Means of 64 sums of 8 products below 4.
        assert!(off(mean(&corrected)) < 1e-5);
        let uncorrected = nearest.with_bias_correction(false);
        let (same, report) = uncorrected.apply(layer.clone(), &inputs).unwrap();
        assert_eq!(report.weights[0].bias_correction, None);
        assert_eq!(mean(&same), mean(&layer));
    });
}

/// The mean outputs of a convolution with such a weight, from the inputs that were collected of it.
fn mean_outputs(inputs: &LayerInputs, weight: &[f32]) -> Vec<f32> {
    let groups = inputs.of("weight").unwrap();
    let of_group = |(group, weight): (&InputStatistics, &[f32])| -> Vec<f32> {
        let mean = group.mean();
        let of_output = |row: &[f32]| row.iter().zip(&mean).map(|(w, x)| w * x).sum::<f32>();
        weight.chunks(mean.len()).map(of_output).collect()
    };
    let weights = weight.chunks(weight.len() / groups.len());
    groups.iter().zip(weights).flat_map(of_group).collect()
}

#[test]
fn a_convolution_of_its_mean_inputs_is_its_mean_output() {
    on_each(|device| {
        let config = QatConfig::new().with_activation(None);
        let mean = |y: Tensor<3>| values(y.swap_dims(0, 1).flatten::<2>(1, 2).mean_dim(1));
        for padding in [
            PaddingConfig2d::Valid,
            PaddingConfig2d::Same,
            PaddingConfig2d::Explicit(1, 0, 2, 1),
        ] {
            let conv = Conv2dConfig::new([4, 6], [3, 2])
                .with_stride([2, 1])
                .with_groups(2)
                .with_padding(padding)
                .with_bias(false)
                .init(device);
            let x = tensor::<4>(3, [2, 4, 7, 6], device);
            let expected = mean(conv.forward(x.clone()).flatten(2, 3));
            let weight = values(conv.weight.val());
            let conv: Conv2d = config.prepare(conv).unwrap();
            let inputs = LayerInputs::collect(&conv, |conv| drop(conv.forward_q(x)));
            let found = mean_outputs(&inputs.unwrap(), &weight);
            // Twelve products below 1.
            assert_near!(found.iter(), expected, 1e-5);
        }
        for padding in [
            PaddingConfig1d::Valid,
            PaddingConfig1d::Same,
            PaddingConfig1d::Explicit(2, 1),
        ] {
            let conv = Conv1dConfig::new(4, 6, 3)
                .with_stride(2)
                .with_dilation(2)
                .with_groups(2)
                .with_padding(padding)
                .with_bias(false)
                .init(device);
            let x = tensor::<3>(3, [2, 4, 9], device);
            let expected = mean(conv.forward(x.clone()));
            let weight = values(conv.weight.val());
            let conv: Conv1d = config.prepare(conv).unwrap();
            let inputs = LayerInputs::collect(&conv, |conv| drop(conv.forward_q(x)));
            let found = mean_outputs(&inputs.unwrap(), &weight);
            // Six products below 1.
            assert_near!(found.iter(), expected, 1e-5);
        }
    });
}

#[test]
fn sequences_are_rounded_for_their_convolution_and_their_recurrent_layer() {
    #[derive(Module, Debug)]
    struct Sequences {
        conv: Conv1d,
        lstm: Lstm,
    }
    let device = Device::flex();
    let model = Sequences {
        conv: Conv1dConfig::new(4, 6, 3).with_groups(2).init(&device),
        lstm: LstmConfig::new(6, 5, true).init(&device),
    };
    let model = with_numbers(model, 3);
    let forward = |model: &Sequences, seed: u64| {
        let x = tensor::<3>(seed, [4, 4, 1], &device).repeat_dim(2, 8);
        let x = x + tensor::<3>(seed + 1, [4, 4, 8], &device) * 0.2;
        let x = model.conv.forward_q(x).swap_dims(1, 2);
        model.lstm.forward_q((x, None)).0
    };
    let expected = values(forward(&model, 70));
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(3))
        .with_activation(None);
    let nearest = config.prepare(model).unwrap();
    let inputs = LayerInputs::collect(&nearest, |nearest| {
        for seed in 0..8 {
            forward(nearest, 10 + 2 * seed);
        }
    })
    .unwrap();
    assert_eq!(inputs.of("conv.weight").unwrap().len(), 2);
    // Each gate sees the sequence and the hidden states.
    assert_eq!(inputs.paths().count(), 1 + 4 * 2);
    // Four sequences of six positions, eight times.
    let samples = |path: &str| inputs.of(path).unwrap()[0].samples();
    assert_eq!(samples("conv.weight"), 8 * 4 * 6);
    assert_eq!(
        samples("lstm.input_gate.hidden_transform.weight"),
        8 * 4 * 6
    );
    let (rounded, report) = RoundingConfig::new()
        .apply(nearest.clone(), &inputs)
        .unwrap();
    let sum = |of: fn(&RoundedWeight) -> f64| report.weights.iter().map(of).sum::<f64>();
    assert!(
        sum(|weight| weight.error) < sum(|weight| weight.nearest_error),
        "{report}"
    );
    assert!(
        report.weights.iter().all(|weight| weight.changed > 0.0),
        "{report}"
    );
    let before = mean_squared(&values(forward(&nearest, 70)), &expected);
    let after = mean_squared(&values(forward(&rounded, 70)), &expected);
    assert!(after < before, "{after} {before}\n{report}");
    let (converted, _) = ConvertConfig::new().convert(rounded.clone()).unwrap();
    assert_eq!(
        values(forward(&converted, 70)),
        values(forward(&rounded, 70))
    );
}

#[test]
fn bad_inputs_of_every_method_are_refused() {
    let device = Device::flex();
    let grid = grid(2, 4, 7);
    let empty = InputStatistics::new(4);
    let no_data = |error: QuantError| assert_matches!(error, QuantError::NoData { .. });
    no_data(gptq(&grid, &empty, &GptqConfig::new()).unwrap_err());
    no_data(adaround(&grid, &empty, &AdaRoundConfig::new()).unwrap_err());
    let unprepared = LinearConfig::new(4, 2).init(&device);
    let not_shown = LayerInputs::collect(&unprepared, |_| {});
    assert_matches!(not_shown, Err(QuantError::NoLayerInputs));

    let mut inputs = InputStatistics::new(4);
    let nan = Tensor::from_data([[1.0, f32::NAN, 0.0, 0.0]], &device);
    assert_matches!(inputs.observe(nan), Err(QuantError::NonFinite { .. }));
    assert_eq!(inputs.samples(), 0);
    let wide = inputs.observe(Tensor::zeros([1, 5], &device));
    assert_matches!(wide, Err(QuantError::LengthMismatch { .. }));
    inputs.observe(Tensor::zeros([0, 4], &device)).unwrap();
    inputs.observe(tensor(1, [2, 4], &device)).unwrap();

    let other = statistics(16);
    let mismatch = gptq(&grid, &other, &GptqConfig::new());
    assert_matches!(mismatch, Err(QuantError::LengthMismatch { .. }));
    let negative = GptqConfig::new().with_ridge(-1.0);
    let error = gptq(&grid, &inputs, &negative);
    assert_matches!(error, Err(QuantError::InvalidConfig { field: "ridge", .. }));
    // Two samples span two of four directions; without ridge the Hessian is singular.
    let without_ridge = GptqConfig::new().with_ridge(0.0);
    let error = gptq(&grid, &inputs, &without_ridge);
    assert_matches!(error, Err(QuantError::NotPositiveDefinite { .. }));
    for (config, field) in [
        (
            AdaRoundConfig::new().with_learning_rate(0.0),
            "learning_rate",
        ),
        (
            AdaRoundConfig::new().with_regularization(f64::NAN),
            "regularization",
        ),
        (AdaRoundConfig::new().with_warmup(1.0), "warmup"),
        (AdaRoundConfig::new().with_beta([20.0, 0.0]), "beta"),
    ] {
        match adaround(&grid, &inputs, &config) {
            Err(QuantError::InvalidConfig { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{other:?}"),
        }
    }

    let new = |weight: Vec<f32>, scale: Vec<f32>, range| {
        WeightGrid::new([1, 2], weight, scale, vec![0.0; 2], range).unwrap_err()
    };
    let error = new(vec![1.0], vec![1.0; 2], (-7, 7));
    assert_matches!(error, QuantError::LengthMismatch { .. });
    let error = new(vec![1.0, f32::NAN], vec![1.0; 2], (-7, 7));
    assert_matches!(error, QuantError::NonFinite { .. });
    let error = new(vec![1.0; 2], vec![1.0, -1.0], (-7, 7));
    assert_matches!(error, QuantError::InvalidScale { .. });
    let error = new(vec![1.0; 2], vec![1.0; 2], (7, 7));
    assert_matches!(error, QuantError::InvalidConfig { .. });

    let mut foreign = LayerInputs::default();
    foreign.insert("fc3.weight", vec![statistics(16)]);
    let prepared = || QatConfig::new().prepare(Net::new(&device)).unwrap();
    let apply = |inputs: &LayerInputs| {
        let gptq = RoundingConfig::new().with_rounding(Rounding::Gptq(GptqConfig::new()));
        let rejected = gptq.apply(prepared(), inputs).unwrap_err();
        rejected.into_error()
    };
    assert_matches!(apply(&foreign), QuantError::UnknownParameter { .. });
    let mut foreign = LayerInputs::default();
    foreign.insert("fc.bias", vec![statistics(16)]);
    assert_matches!(apply(&foreign), QuantError::UnsupportedLayer { .. });
    let mut foreign = LayerInputs::default();
    foreign.insert("fc.weight", vec![statistics(16)]);
    assert!(matches!(apply(&foreign), QuantError::Parameter { path, .. } if path == "fc.weight"));
}

#[test]
fn a_batch_without_examples_takes_the_inputs_of_no_other() {
    let device = Device::flex();
    let conv = Conv1dConfig::new(2, 3, 3).init(&device);
    let config = QatConfig::new().with_activation(None);
    let conv: Conv1d = config.prepare(conv).unwrap();
    let inputs = LayerInputs::collect(&conv, |conv| {
        for examples in [0, 4, 0] {
            conv.forward_q(Tensor::<3>::ones([examples, 2, 8], &device));
        }
    });
    assert_eq!(inputs.unwrap().of("weight").unwrap()[0].samples(), 4 * 6);
}
