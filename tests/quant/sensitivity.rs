//! Which layer costs what, and which are kept.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ForwardQ, Learned, MixedPrecisionConfig, QatConfig, QuantError, Schedule, WeightConfig,
    WeightQuantizer,
    inspect::{Allocation, AllocationReport, Precision, Sensitivity},
    load_record, load_safetensors, quantizers, save_safetensors, sensitivity,
};

use crate::support::{each_device, on_each, on_tracked, scratch, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let net = Self {
            first: linear(6, 8),
            second: linear(8, 8),
            third: linear(8, 3),
        };
        with_numbers(net, 3)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward_q(x));
        self.third.forward_q(relu(self.second.forward_q(x)))
    }
}

fn weights_only(bits: u8) -> QatConfig {
    QatConfig::new()
        .with_weight(WeightConfig::int(bits))
        .with_activation(None)
}

/// The paths of the weights whose quantizers are on.
fn enabled(net: &Net) -> Vec<String> {
    let on = quantizers(net).into_iter();
    let on = on.filter(|located| located.quantizer.is_enabled());
    on.filter_map(|located| located.parameter).collect()
}

#[test]
fn each_layer_is_judged_alone_against_the_float_model() {
    each_device(|target| {
        let net = Net::new(&target.device);
        let x = tensor(5, [16, 6], &target.device);
        let float = net.forward(x.clone());
        let prepared = weights_only(2).prepare(net).unwrap();
        let found = sensitivity(
            &prepared,
            |net| net.forward(x.clone()),
            |net| 100.0 - enabled(net).len() as f64,
        )
        .unwrap();
        assert_eq!((found.float, found.quantized), (100.0, 97.0));
        let names: Vec<&str> = found
            .layers
            .iter()
            .map(|layer| layer.layer.as_str())
            .collect();
        assert_eq!(names, ["first.weight", "second.weight", "third.weight"]);
        assert!(
            found
                .layers
                .iter()
                .all(|layer| layer.quantized_alone == 99.0)
        );

        // The last layer's own noise is all there is at the output when it alone is quantized.
        let mut only_third = prepared.clone();
        let plain = Net::new(&target.device);
        only_third.first = plain.first;
        only_third.second = plain.second;
        let float = values(float);
        let noise = values(only_third.forward(x.clone()));
        let squares = |numbers: &mut dyn Iterator<Item = f32>| -> f64 {
            numbers.map(|number| f64::from(number).powi(2)).sum()
        };
        let signal = squares(&mut float.iter().copied());
        let noise = squares(&mut float.iter().zip(&noise).map(|(a, b)| a - b));
        let expected = 10.0 * (signal / noise).log10();
        assert!(
            (found.layers[2].output_sqnr - expected).abs() < 1e-2,
            "{found}"
        );
    });
}

#[test]
fn the_first_order_score_is_the_change_of_a_linear_loss() {
    on_tracked(|device| {
        let layer = with_numbers(LinearConfig::new(6, 3).init(&device), 7);
        let x = tensor(9, [4, 6], &device);
        let loss = |layer: &Linear| layer.forward_q(x.clone()).sum();
        let prepared = weights_only(3).prepare(layer.clone()).unwrap();
        let change = values(loss(&prepared))[0] - values(loss(&layer))[0];
        let inner = x.clone().without_autodiff();
        let found = sensitivity(&prepared, |layer| layer.forward_q(inner.clone()), |_| 0.0)
            .unwrap()
            .with_gradient_scores(&prepared, loss)
            .unwrap();
        // The loss is linear in the weight: its first-order expansion is exact, up to F32 sums.
        let score = found.layers[0].first_order.unwrap();
        assert!((score - f64::from(change)).abs() < 1e-4, "{score} {change}");
        assert!(found.layers[0].second_order.unwrap() > 0.0);
    });
}

#[test]
fn gradient_scores_need_a_gradient() {
    let device = Device::flex();
    let net = weights_only(4).prepare(Net::new(&device)).unwrap();
    let x = tensor(5, [4, 6], &device);
    let found = sensitivity(&net, |net| net.forward(x.clone()), |_| 0.0).unwrap();
    let error = found
        .with_gradient_scores(&net, |net| net.forward(x.clone()).sum())
        .unwrap_err();
    assert_matches!(error, QuantError::NoGradients);
}

#[test]
fn a_float_model_has_no_sensitivity() {
    let device = Device::flex();
    let x = tensor(5, [4, 6], &device);
    let error = sensitivity(&Net::new(&device), |net| net.forward(x.clone()), |_| 0.0);
    assert_matches!(error, Err(QuantError::NotPrepared));
}

#[test]
fn a_report_of_no_noise_and_of_a_failed_evaluation_reads_back_from_json() {
    let device = Device::flex();
    // Its weights lie on their grid already: no noise, infinitely many decibels.
    let net = weights_only(4).prepare(Net::new(&device)).unwrap();
    let net = weights_only(4).prepare(net.materialize()).unwrap();
    let x = tensor(5, [4, 6], &device);
    let found = sensitivity(&net, |net| net.forward(x.clone()), |_| f64::NAN).unwrap();
    assert_eq!(found.layers[0].sqnr[0].1, f64::INFINITY);
    let json = serde_json::to_string(&found).unwrap();
    let back = serde_json::from_str::<Sensitivity>(&json).unwrap();
    assert_eq!(back.layers[0].sqnr, found.layers[0].sqnr);
    assert!(back.float.is_nan() && back.layers[0].quantized_alone.is_nan());
    assert_eq!(back.layers[0].second_order, None);

    let allocation = MixedPrecisionConfig::new(weights_only(2))
        .with_keep_at(Precision::Float)
        .allocate(
            Net::new(&device),
            |_| (),
            |net| net.forward(x.clone()),
            |_| f64::NAN,
        );
    let report = allocation.unwrap().report;
    let json = serde_json::to_string(&report).unwrap();
    let back = serde_json::from_str::<AllocationReport>(&json).unwrap();
    assert!(back.drop.is_nan() && !back.within_bound);
    assert_eq!(back.trials.len(), report.trials.len());
}

/// A figure of merit that loses 3 where the second layer is quantized and half a point for each of
/// the others.
fn merit(net: &Net) -> f64 {
    let quantized = enabled(net);
    let cost = |path: &String| if path == "second.weight" { 3.0 } else { 0.5 };
    100.0 - quantized.iter().map(cost).sum::<f64>()
}

#[test]
fn the_most_sensitive_layers_are_kept_until_the_bound_is_met() {
    let device = Device::flex();
    let x = tensor(5, [16, 6], &device);
    let allocate = |max_drop: f64| {
        MixedPrecisionConfig::new(weights_only(2))
            .with_keep_at(Precision::Float)
            .with_max_drop(max_drop)
            .allocate(
                Net::new(&device),
                |_| (),
                |net| net.forward(x.clone()),
                merit,
            )
            .unwrap()
    };
    let one = allocate(1.0);
    assert_eq!(one.report.kept, ["second.weight"]);
    assert_eq!((one.report.drop, one.report.within_bound), (1.0, true));
    assert_eq!(enabled(&one.model), ["first.weight", "third.weight"]);
    // The config prepares a model with the same quantizers.
    let again = one.config.prepare(Net::new(&device)).unwrap();
    assert_eq!(enabled(&again), ["first.weight", "third.weight"]);

    assert_eq!(allocate(10.0).report.kept, [""; 0]);
    assert_eq!(allocate(0.0).report.kept.len(), 3);
}

#[test]
fn a_layer_that_makes_the_evaluation_fail_is_the_most_sensitive() {
    let device = Device::flex();
    let x = tensor(5, [16, 6], &device);
    let allocation = MixedPrecisionConfig::new(weights_only(2))
        .with_keep_at(Precision::Float)
        .allocate(
            Net::new(&device),
            |_| (),
            |net| net.forward(x.clone()),
            |net| match enabled(net).iter().any(|path| path == "second.weight") {
                true => f64::NAN,
                false => merit(net),
            },
        );
    let report = allocation.unwrap().report;
    assert_eq!(report.kept, ["second.weight"]);
    assert_eq!((report.drop, report.within_bound), (1.0, true));
}

/// A record and a file of the allocated model load into a model that its config prepares.
fn assert_loads(allocation: &Allocation<Net>, x: &Tensor<2>, device: &Device) {
    let Allocation { model, config, .. } = allocation;
    let states = |net: &Net| -> Vec<_> {
        let found = quantizers(net).into_iter();
        let found = found.map(|located| {
            let quantizer = located.quantizer;
            (
                located.path,
                quantizer.config().clone(),
                quantizer.is_enabled(),
                quantizer.is_observed(),
            )
        });
        found.collect()
    };
    let expected = values(model.valid().forward(x.clone()));
    let prepared = || config.prepare(Net::new(device)).unwrap();
    let record = model.clone().into_record();
    let loaded = load_record(prepared(), record).unwrap();
    assert_eq!(states(&loaded), states(model));
    assert_eq!(values(loaded.valid().forward(x.clone())), expected);

    let (_folder, path) = scratch("net.safetensors");
    save_safetensors(model, &path).unwrap();
    let loaded = load_safetensors(prepared(), &path).unwrap();
    assert_eq!(values(loaded.forward(x.clone())), expected);
}

#[test]
fn an_allocation_with_layers_in_float_loads_into_what_its_config_prepares() {
    on_each(|device| {
        let x = tensor(5, [16, 6], device);
        let with_activations = QatConfig::new().with_weight(WeightConfig::int(2));
        for config in [weights_only(2), with_activations] {
            let allocation = MixedPrecisionConfig::new(config)
                .with_keep_at(Precision::Float)
                .with_max_drop(0.5)
                .allocate(
                    Net::new(device),
                    |net| {
                        net.forward(x.clone());
                    },
                    |net| net.forward(x.clone()),
                    |net| {
                        let second = |at: &String| at == "second.weight";
                        if enabled(net).iter().any(second) {
                            0.0
                        } else {
                            1.0
                        }
                    },
                )
                .unwrap();
            assert_eq!(allocation.report.kept, ["second.weight"]);
            assert!(WeightQuantizer::of(&allocation.model.second.weight).is_none());
            assert_loads(&allocation, &x, device);
        }
    });
}

#[test]
fn kept_layers_may_have_activations_that_the_others_have_not() {
    on_each(|device| {
        let x = tensor(5, [16, 6], device);
        let allocation = MixedPrecisionConfig::new(weights_only(2))
            .with_keep_at(Precision::int8())
            .with_max_drop(0.5)
            .allocate(
                Net::new(device),
                |net| {
                    net.forward(x.clone());
                },
                |net| net.forward(x.clone()),
                |net| {
                    let coarse = quantizers(net).into_iter().any(|located| {
                        let quantizer = &located.quantizer;
                        let bits = quantizer.scheme().format.bits();
                        located.path.starts_with("second.") && quantizer.is_enabled() && bits == 2
                    });
                    if coarse { 0.0 } else { 1.0 }
                },
            )
            .unwrap();
        assert_eq!(allocation.report.kept, ["second.weight"]);
        let of_second = WeightQuantizer::of(&allocation.model.second.weight).unwrap();
        assert_eq!(of_second.weight.scheme().format.bits(), 8);
        assert!(of_second.input.as_ref().unwrap().is_observed());
        let of_first = WeightQuantizer::of(&allocation.model.first.weight).unwrap();
        assert!(of_first.input.is_none());
        assert_loads(&allocation, &x, device);
    });
}

#[test]
fn an_allocation_that_keeps_all_layers_in_float_is_the_float_model() {
    let device = Device::flex();
    let x = tensor(5, [16, 6], &device);
    let allocation = MixedPrecisionConfig::new(weights_only(2))
        .with_keep_at(Precision::Float)
        .with_max_drop(0.0)
        .allocate(
            Net::new(&device),
            |_| (),
            |net| net.forward(x.clone()),
            merit,
        )
        .unwrap();
    assert!(quantizers(&allocation.model).is_empty());
    let record = allocation.model.into_record();
    let loaded = Net::new(&device).try_load_record(record).unwrap();
    assert_eq!(
        values(loaded.forward(x.clone())),
        values(Net::new(&device).forward(x))
    );
    let error = allocation.config.prepare(Net::new(&device)).unwrap_err();
    assert_eq!(*error.error(), QuantError::NothingToQuantize);
}

/// The field for which an allocation is refused before anything is run; the model comes back unprepared.
fn refused(config: &MixedPrecisionConfig) -> &'static str {
    let device = Device::flex();
    let x = tensor(5, [16, 6], &device);
    let rejected = config
        .allocate(
            Net::new(&device),
            |_| -> Result<(), QuantError> { panic!("nothing is run to refuse it") },
            |net| net.forward(x.clone()),
            merit,
        )
        .unwrap_err();
    assert!(quantizers(rejected.value()).is_empty());
    match rejected.error() {
        QuantError::InvalidConfig { field, .. } => field,
        error => panic!("{error}"),
    }
}

#[test]
fn a_schedule_that_does_not_quantize_yet_is_refused_with_the_model() {
    let config = weights_only(2).with_schedule(Schedule::new().with_quantize_from(8));
    assert_eq!(refused(&MixedPrecisionConfig::new(config)), "quantize_from");
}

#[test]
fn a_bound_that_is_no_number_is_refused_with_the_model() {
    let config = MixedPrecisionConfig::new(weights_only(2)).with_max_drop(f64::NAN);
    assert_eq!(refused(&config), "max_drop");
}

#[test]
fn what_layers_are_kept_at_is_checked_before_anything_is_run() {
    let kept = Precision::Quantized {
        weight: WeightConfig::int(16),
        activation: None,
    };
    let config = MixedPrecisionConfig::new(weights_only(2)).with_keep_at(kept);
    assert_eq!(refused(&config), "bits");
}

/// The forward pass of the gradients is one after training, of a copy.
#[test]
fn gradient_scores_leave_running_statistics_alone() {
    on_tracked(|device| {
        let linear = with_numbers(LinearConfig::new(6, 3).init(&device), 7);
        let model = (linear, BatchNormConfig::new(3).init(&device));
        type Model = (Linear, BatchNorm);
        let x = tensor::<2>(9, [4, 6], &device) * 30.0;
        let inner = x.clone().without_autodiff();
        let forward = |model: &Model, x: Tensor<2>| {
            let y = model.0.forward_q(x);
            model.1.forward(y)
        };
        let prepared = weights_only(3).prepare(model).unwrap();
        let statistics = |model: &Model| {
            let mean = values(model.1.running_mean.value_sync());
            (mean, values(model.1.running_var.value_sync()))
        };
        let before = statistics(&prepared);
        let mut is_evaluation = false;
        let found = sensitivity(&prepared, |model| forward(model, inner.clone()), |_| 0.0)
            .unwrap()
            .with_gradient_scores(&prepared, |model| {
                // The old statistics normalize by nearly nothing.
                let y = forward(model, x.clone());
                is_evaluation = y.clone().abs().max().into_scalar::<f32>() > 10.0;
                y.powi_scalar(2).mean()
            });
        assert!(found.unwrap().layers[0].first_order.is_some());
        assert!(is_evaluation);
        assert_eq!(statistics(&prepared), before);
    });
}

/// Copies of one parameter have gradients of their own, by which each is scored.
#[test]
fn each_use_of_a_tied_weight_has_its_own_score() {
    let device = Device::flex().autodiff();
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 7);
    let model = (layer.clone(), layer);
    let x = tensor::<2>(5, [4, 6], &device);
    let loss = |(one, other): &(Linear, Linear)| {
        one.forward(x.clone()).sum() + other.forward(x.clone()).sum() * 10.0
    };
    let prepared = weights_only(3).prepare(model.clone()).unwrap();
    let quantized = (prepared.0.clone(), model.1.clone());
    let expected = values(loss(&quantized))[0] - values(loss(&model))[0];
    let inner = x.clone().without_autodiff();
    let output = |model: &(Linear, Linear)| model.0.forward(inner.clone());
    let found = sensitivity(&prepared, output, |_| 0.0).unwrap();
    let found = found.with_gradient_scores(&prepared, loss).unwrap();
    let scores: Vec<f64> = (found.layers.iter())
        .map(|layer| layer.first_order.unwrap())
        .collect();
    assert!(
        (scores[0] - f64::from(expected)).abs() < 1e-3,
        "{scores:?} {expected}"
    );
    assert!((scores[1] - 10.0 * scores[0]).abs() < 1e-3, "{scores:?}");
}

/// Their scores are read together, one on the tape and one off it.
#[test]
fn weights_with_learned_scales_and_with_ranges_are_scored_in_one_model() {
    on_tracked(|device| {
        let layer = |seed| with_numbers(LinearConfig::new(6, 6).init(&device), seed);
        let learned = WeightConfig::int(3).with_learned(Learned::Lsq);
        let learned = QatConfig::new().with_weight(learned).prepare(layer(1));
        let model = (learned.unwrap(), weights_only(3).prepare(layer(2)).unwrap());
        let forward =
            |model: &(Linear, Linear), x: Tensor<2>| model.1.forward(relu(model.0.forward(x)));
        let x = tensor(9, [4, 6], &device);
        // The first step of training begins to learn.
        forward(&model, x.clone());
        let inner = x.clone().without_autodiff();
        let found = sensitivity(&model, |model| forward(model, inner.clone()), |_| 0.0).unwrap();
        let loss = |model: &(Linear, Linear)| forward(model, x.clone()).square().mean();
        let found = found.with_gradient_scores(&model, loss).unwrap();
        assert!(
            found
                .layers
                .iter()
                .all(|layer| layer.second_order > Some(0.0))
        );
    });
}
