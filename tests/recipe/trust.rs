//! The report on a compressed model: its numbers against hand-computed ones.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::quant::{ConvertConfig, QatConfig, WeightConfig};
use burn_lean::recipe::{
    Answers, Bounds, Energy, EnergyPart, Perturbation, PruneStage, QuantizeStage, Recipe,
    RecipeError, Robustness, Task, TrainStage, Trust, TrustConfig,
};

use crate::problem::{Net, NetTask, batches, done, task};
use crate::support::{scratch, tensor, values, with_numbers};

/// Logits whose softmax has these probabilities.
fn answers(probabilities: &[[f32; 2]], labels: &[i64]) -> Answers {
    let device = Device::flex();
    let logits: Vec<f32> = probabilities.iter().flatten().map(|p| p.ln()).collect();
    let logits = TensorData::new(logits, [probabilities.len(), 2]);
    let labels = TensorData::new(labels.to_vec(), [labels.len()]);
    let batch = (
        Tensor::<2>::from_data(logits, &device),
        Tensor::from_data(labels, &device),
    );
    Answers::collect([Ok(batch)]).unwrap()
}

/// Two examples of confidence 0.9, one of them right; two of 0.6, both right.
#[test]
fn the_calibration_error_weighs_the_gaps_of_the_bins() {
    let answers = answers(
        &[[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]],
        &[0, 1, 1, 1],
    );
    assert_eq!(answers.correct(), 3);
    assert_eq!(answers.predicted(), [0, 0, 1, 1]);
    // ½·|0.5 − 0.9| + ½·|1 − 0.6|
    assert!((answers.calibration_error(15) - 0.4).abs() < 1e-6);
    let bins = answers.reliability(15);
    // 0.9 · 15 = 13.5 and 0.6 · 15 = 9, which ends its bin (up to the last bit of the softmax).
    assert_eq!(bins[13].examples, 2);
    assert_eq!(bins[8].examples + bins[9].examples, 2);
    assert!((bins[13].confidence - 0.9).abs() < 1e-6);
    assert_eq!(bins[13].accuracy, 0.5);
    // One bin: |3/4 − 3/4|.
    assert!(answers.calibration_error(1).abs() < 1e-6);
}

/// Their softmax in F32 is ½ and ½.
#[test]
fn the_class_is_that_of_the_largest_logit_however_near_the_others_are() {
    let device = Device::flex();
    let logits = Tensor::<2>::from_data([[0.0, 1e-9], [1e-9, 0.0], [7.0, 7.0]], &device);
    let labels = Tensor::from_data([1, 0, 0], &device);
    let answers = Answers::collect([Ok((logits, labels))]).unwrap();
    assert_eq!(answers.predicted(), [1, 0, 0]);
    assert_eq!(answers.correct(), 3);
}

#[test]
fn labels_of_another_number_and_logits_that_are_no_numbers_are_refused() {
    let device = Device::flex();
    let labels =
        |count: usize| Tensor::from_data(TensorData::new(vec![0i64; count], [count]), &device);
    let logits = Tensor::<2>::zeros([3, 2], &device);
    let error = Answers::collect([Ok((logits.clone(), labels(2)))]).unwrap_err();
    assert!(error.to_string().contains("3 rows of logits, but 2 labels"));
    let nan = logits.clone().mul_scalar(f32::NAN);
    let error = Answers::collect([Ok((nan, labels(3)))]).unwrap_err();
    assert!(error.to_string().contains("a logit of example 0"));
    // Counted from 1, nothing would be right, before compression and after it, and no bound broken.
    for label in [2, -1] {
        let labels = Tensor::from_data([0, 1, label], &device);
        let error = Answers::collect([Ok((logits.clone(), labels))]).unwrap_err();
        let expected =
            format!("the label of example 2 is {label}, but the logits are of 2 classes");
        assert_says!(error, &expected);
    }
}

/// A dense network and what a recipe makes of it.
fn compared(config: &TrustConfig, judge: impl FnOnce(&NetTask<'_>, &TrustConfig, Trust, Trust)) {
    let device = Device::flex();
    let task = task(&device);
    let recipe = Recipe::new()
        .with_train(TrainStage::new(6, 0.01))
        .with_prune(PruneStage::new(0.7))
        .with_quantize(QuantizeStage::new(
            "int4".parse().unwrap(),
            "uint8".parse().unwrap(),
        ));
    let outcome = done(&recipe, Net::new(24, &device.clone().autodiff()), &task);
    let test = || batches(0, &device);
    let mut config = config.clone();
    config.energy_time = std::time::Duration::from_millis(20);
    let small = config
        .compare(&task, outcome.dense(), outcome.last(), test)
        .unwrap();
    let same = config
        .compare(&task, outcome.dense(), outcome.dense(), test)
        .unwrap();
    // What the evaluation of the task says is what the report says.
    let accuracy = outcome.last().row.accuracy.unwrap();
    assert!((100.0 * small.compressed.accuracy.value - accuracy).abs() < 1e-9);
    judge(&task, &config, small, same);
}

#[test]
fn a_model_beside_itself_differs_in_nothing_and_a_smaller_one_in_something() {
    compared(&TrustConfig::new(), |_, _, small, same| {
        assert_eq!((same.disagreement.value, same.mcnemar_p), (0.0, 1.0));
        assert!(same.layers.iter().all(|layer| layer.sqnr == 200.0));
        assert!(
            same.robustness
                .iter()
                .all(|under| under.original == under.compressed)
        );
        assert_eq!(same.examples, 96);

        let drop = small.original.accuracy.value - small.compressed.accuracy.value;
        let counted = small.only_original as f64 - small.only_compressed as f64;
        assert!((96.0 * drop - counted).abs() < 1e-9);
        assert!(small.disagreement.value > 0.0);
        let paths: Vec<_> = small
            .layers
            .iter()
            .map(|layer| layer.path.as_str())
            .collect();
        assert_eq!(paths[..3], ["conv.weight", "body.weight", "head.weight"]);
        let input = |layer: &&burn_lean::recipe::LayerSqnr| layer.site == "input";
        let inputs = small.layers.iter().filter(input);
        // UINT8: about 40 dB and more.
        let found: Vec<_> = inputs
            .map(|layer| (layer.path.as_str(), layer.sqnr > 30.0))
            .collect();
        let layers = ["conv.weight", "body.weight", "head.weight"];
        assert_eq!(found, layers.map(|path| (path, true)));
        let examples = small.compressed.reliability.iter().map(|bin| bin.examples);
        assert_eq!(examples.sum::<usize>(), 96);

        let json = small.to_json();
        let read: Trust = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (read.layers.len(), read.only_original),
            (small.layers.len(), small.only_original)
        );
        let page = small.to_html().unwrap();
        assert!(page.contains("joules per task, in Burn"));
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(page.contains("pruned 70 %, W4A8") && page.contains("No bound was given"));
        let mut measured = small.clone();
        let part = |counter: &str, joules_per_task| EnergyPart {
            counter: counter.into(),
            joules_per_task,
        };
        measured.original.energy = Energy::Measured {
            joules_per_task: 3.0,
            tasks_per_kwh: 1.2e6,
            tasks_per_second_per_watt: 1.0 / 3.0,
            parts: vec![part("NVML (GPU)", 2.5), part("RAPL (CPU)", 0.5)],
            uncounted: Vec::new(),
        };
        measured.compressed.energy = Energy::NotMeasurable {
            reason: "not measurable here: NVML (GPU): no driver".into(),
        };
        let with_energy = measured.to_html().unwrap();
        let row =
            "<td>3.000 = 2.500 NVML (GPU) + 0.5000 RAPL (CPU)</td><td>not measurable here</td>";
        assert!(with_energy.contains(row));
        assert!(with_energy.contains("<td>1200000; 0.3333</td>"));
        assert!(with_energy.contains("not measurable here: NVML (GPU): no driver."));
        // What a small model takes is no zero.
        measured.original.energy = Energy::Measured {
            joules_per_task: 0.000123456,
            tasks_per_kwh: 3.6e6 / 0.000123456,
            tasks_per_second_per_watt: 1.0 / 0.000123456,
            parts: vec![part("RAPL (CPU)", 0.000123456)],
            uncounted: vec!["a counter".into()],
        };
        let with_energy = measured.to_html().unwrap();
        assert!(with_energy.contains("<td>0.0001235 RAPL (CPU)</td>"));
        assert!(with_energy.contains("; 8100</td>"));
        assert!(with_energy.contains("not in the sum: a counter."));
        // Neither all nor chance alone.
        let accuracy = &mut measured.original.accuracy;
        (accuracy.value, accuracy.low, accuracy.high) = (0.99996, 0.9998, 0.999_992);
        measured.mcnemar_p = 0.0004;
        measured.robustness[0].original = 0.9996;
        let rare = measured.to_html().unwrap();
        assert!(rare.contains("<td>99.996 % (99.98 to 99.999)</td>"));
        assert!(rare.contains("gives p &lt; 0.001."));
        assert!(rare.contains("99.96 %"));
        measured.mcnemar_p = 0.0214;
        assert!(measured.to_html().unwrap().contains("gives p = 0.021."));
        // Nothing is fetched.
        assert!(!page.contains("src=") && !page.contains("<script") && !page.contains("href="));
    });
}

/// The normalization multiplies channels by 2 and 5, and goes into the weights before they are rounded.
#[test]
fn weights_with_a_normalization_in_them_are_compared_with_folded_ones() {
    let device = Device::flex();
    let task = task(&device);
    let recipe = Recipe::new().with_quantize(QuantizeStage::new(
        "int8".parse().unwrap(),
        "none".parse().unwrap(),
    ));
    let mut net = Net::new(8, &device.clone().autodiff());
    net.norm.gamma = Param::from_data([2.0f32, 5.0, 2.0, 5.0], &device.clone().autodiff());
    let outcome = done(&recipe, net, &task);
    assert!(!outcome.dense().folded && outcome.last().folded);
    let mut config = TrustConfig::new().with_perturbations(Vec::new());
    config.energy_time = std::time::Duration::ZERO;
    let test = || batches(0, &device);
    let trust = config
        .compare(&task, outcome.dense(), outcome.last(), test)
        .unwrap();
    assert!(trust.robustness.is_empty());
    let found = trust.layers.iter();
    let found: Vec<_> = found
        .map(|layer| (layer.path.as_str(), layer.sqnr > 30.0))
        .collect();
    let weights = ["conv.weight", "body.weight", "head.weight"];
    assert_eq!(
        found,
        weights.map(|path| (path, true)),
        "{:?}",
        trust.layers
    );
}

/// 29 of 100 are 29 %, though 100 · 0.29 is 28.999999999999996.
#[test]
fn what_is_exactly_at_its_bound_keeps_it() {
    compared(&TrustConfig::new(), |_, _, small, _| {
        let mut trust = small;
        trust.examples = 100;
        trust.original.accuracy.value = 0.30;
        trust.compressed.accuracy.value = 0.29;
        trust.disagreement.value = 0.07;
        // 10 and 11 more are wrong.
        trust.robustness = vec![Robustness {
            perturbation: Perturbation::Noise(1.0),
            original: 0.20,
            compressed: 0.18,
        }];
        let bounds = Bounds {
            max_accuracy_drop: Some(1.0),
            min_accuracy: Some(29.0),
            max_disagreement: Some(7.0),
            max_robustness_drop: Some(1.0),
            ..Bounds::default()
        };
        let broken = bounds.broken(&trust);
        assert!(broken.is_empty(), "{broken:?}");
        let bounds = Bounds {
            max_accuracy_drop: Some(0.99),
            min_accuracy: Some(29.01),
            max_disagreement: Some(6.99),
            max_robustness_drop: Some(0.99),
            ..Bounds::default()
        };
        let broken = bounds.broken(&trust);
        let found: Vec<_> = broken.iter().map(|broken| broken.found).collect();
        assert_eq!(found, [Some(1.0), Some(7.0), Some(1.0), Some(29.0)]);
    });
}

#[test]
fn a_test_in_another_order_each_time_is_refused_and_equal_zeros_are_equal() {
    let device = Device::flex();
    let task = task(&device);
    let mut net = Net::new(8, &device.clone().autodiff());
    net.body.weight = Param::from_tensor(net.body.weight.val().zeros_like());
    let recipe = Recipe::new();
    let outcome = done(&recipe, net, &task);
    let dense = outcome.dense();
    let mut config = TrustConfig::new().with_perturbations(vec![Perturbation::Noise(0.5)]);
    config.energy_time = std::time::Duration::ZERO;
    let same = config.compare(&task, dense, dense, || batches(0, &device));
    let sqnr = same.unwrap().layers.into_iter();
    let sqnr: Vec<_> = sqnr.map(|layer| (layer.path, layer.sqnr)).collect();
    let weights = ["conv.weight", "body.weight", "head.weight"];
    assert_eq!(sqnr, weights.map(|path| (path.to_string(), 200.0)));

    let calls = std::cell::Cell::new(0);
    let shuffled = || {
        calls.set(calls.get() + 1);
        batches(calls.get(), &device)
    };
    let error = config.compare(&task, dense, dense, shuffled).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("same examples in the same order")
    );
    // The batches of the task are not asked for.
    let none = config.compare(&task, dense, dense, Vec::new).unwrap_err();
    let once = std::cell::RefCell::new(Some(batches(0, &device)));
    let once = config.compare(&task, dense, dense, || once.take().unwrap_or_default());
    for error in [none, once.unwrap_err()] {
        assert_matches!(error, RecipeError::NoTestExample);
        assert_says!(error, "`test` gave no example");
    }
}

/// What is stored are the floats of the original, and codes: blocks of Burn's have at most 255 weights,
/// and 257 have no divisor.
#[test]
fn weights_are_compared_as_the_forward_pass_has_them() {
    let device = Device::flex();
    let x = tensor::<2>(1, [8, 257], &device);
    let labels = Tensor::<1, burn::tensor::Int>::zeros([8], &device);
    let task = Task::new(
        |model: &Linear, x: Tensor<2>| model.forward(x),
        |y: Tensor<2>, _: Tensor<1, burn::tensor::Int>| y.square().mean(),
        |_| [(x.clone(), labels.clone())],
    )
    .with_logits(|logits: &Tensor<2>| logits.clone());
    let recipe = Recipe::new();
    let linear = LinearConfig::new(257, 4).init(&device.clone().autodiff());
    let outcome = done(&recipe, with_numbers(linear, 2), &task);
    let dense = outcome.dense();
    let plain = values(dense.model.valid().weight.val());
    let weight = WeightConfig::int(4);
    let plan = QatConfig::new().with_weight(weight).with_activation(None);
    let prepared = plan.prepare(dense.model.clone()).unwrap();
    let (converted, _) = ConvertConfig::new().convert(prepared.clone()).unwrap();
    for model in [prepared, converted] {
        let mut rounded = dense.clone();
        rounded.model = model;
        let mut config = TrustConfig::new().with_perturbations(Vec::new());
        config.energy_time = std::time::Duration::ZERO;
        let test = || [(x.clone(), labels.clone())];
        let trust = config.compare(&task, dense, &rounded, test).unwrap();
        let acting = values(rounded.model.valid().weight.val());
        let square = |x: f32| f64::from(x).powi(2);
        let signal: f64 = plain.iter().map(|x| square(*x)).sum();
        let pairs = plain.iter().zip(&acting);
        let noise: f64 = pairs.map(|(x, y)| square(x - y)).sum();
        let expected = 10.0 * (signal / noise).log10();
        assert!((15.0..30.0).contains(&expected), "{expected}");
        let found = trust.layers[0].sqnr;
        assert!((found - expected).abs() < 1e-3, "{found} {expected}");
    }
}

/// A shift of vectors is none: that accuracy stays says nothing.
#[test]
fn perturbations_that_change_no_input_of_a_kind_are_not_reported_as_survived() {
    let device = Device::flex();
    let x = Tensor::<2>::from_data([[1.0, -1.0], [-1.0, 1.0]], &device);
    let labels = Tensor::<1, burn::tensor::Int>::from_data([0, 1], &device);
    let task = Task::new(
        |model: &Linear, x: Tensor<2>| model.forward(x),
        |y: Tensor<2>, _: Tensor<1, burn::tensor::Int>| y.square().mean(),
        |_| [(x.clone(), labels.clone())],
    )
    .with_logits(|logits: &Tensor<2>| logits.clone());
    let recipe = Recipe::new();
    let model = LinearConfig::new(2, 2).init(&device.clone().autodiff());
    let outcome = done(&recipe, model, &task);
    let dense = outcome.dense();
    let judged = |perturbations: &[Perturbation]| {
        let bounds = Bounds {
            max_robustness_drop: Some(100.0),
            ..Bounds::default()
        };
        let mut config = TrustConfig::new().with_bounds(bounds);
        config = config.with_perturbations(perturbations.to_vec());
        config.energy_time = std::time::Duration::ZERO;
        let test = || [(x.clone(), labels.clone())];
        config.compare(&task, dense, dense, test).unwrap()
    };
    let trust = judged(&[Perturbation::Shift(1), Perturbation::Offset(0.5)]);
    let reported = trust.robustness.iter().map(|under| under.perturbation);
    assert_eq!(reported.collect::<Vec<_>>(), [Perturbation::Offset(0.5)]);
    assert!(trust.broken.is_empty(), "{:?}", trust.broken);
    let trust = judged(&[Perturbation::Shift(1)]);
    assert_eq!(trust.broken.len(), 1);
    assert_eq!(trust.broken[0].found, None);
    let ids = Tensor::<3, burn::tensor::Int>::from_data([[[1, 2]]], &device);
    assert!(!Perturbation::Noise(1.0).concerns(&ids));
    assert!(Perturbation::Shift(1).concerns(&ids.float()));
}

#[test]
fn a_bound_on_what_was_not_measured_is_broken() {
    let bounds = Bounds {
        max_robustness_drop: Some(1000.0),
        ..Bounds::default()
    };
    let config = TrustConfig::new().with_bounds(bounds);
    let config = config.with_perturbations(Vec::new());
    compared(&config, |_, _, small, _| {
        assert_eq!(small.broken.len(), 1);
        assert_eq!(small.broken[0].bound, "max_robustness_drop");
        assert_eq!(small.broken[0].found, None);
    });
}

#[test]
fn broken_bounds_are_named_and_fail_the_check() {
    let bounds = Bounds {
        max_disagreement: Some(0.0),
        max_bytes: Some(10),
        min_accuracy: Some(101.0),
        max_accuracy_drop: Some(100.0),
        // There is no latency in the rows: it is not known to be kept.
        max_latency_ms: Some(1e9),
        ..Bounds::default()
    };
    compared(&TrustConfig::new().with_bounds(bounds), |_, _, small, _| {
        let broken: Vec<_> = small
            .broken
            .iter()
            .map(|broken| broken.bound.as_str())
            .collect();
        assert_eq!(
            broken,
            [
                "max_disagreement",
                "max_bytes",
                "max_latency_ms",
                "min_accuracy"
            ]
        );
        let Err(RecipeError::BrokenBounds { broken }) = small.check() else {
            panic!("it is broken");
        };
        assert_eq!(broken, small.broken);
        assert_eq!(broken[2].found, None);
        let (_folder, path) = scratch("deep/report.html");
        small.save(&path).unwrap();
        let page = std::fs::read_to_string(&path).unwrap();
        assert!(page.contains("max_bytes is 10"));
        assert!(path.with_extension("trust.json").exists());
        // A number at the end of a name is no ending.
        for version in ["report-v1.0", "report-v1.1"] {
            small.save(path.with_file_name(version)).unwrap();
            let json = path.with_file_name(format!("{version}.trust.json"));
            assert!(json.exists(), "{json:?}");
        }
    });
}

/// The file of a recipe has those of the library, by their names.
#[test]
fn bounds_of_a_recipe_are_read_and_checked_and_a_broken_one_fails() {
    let recipe = Recipe::from_toml("[bounds]\nmax_bytes = 10\nmin_accuracy = 101.0").unwrap();
    let bounds = Bounds {
        max_bytes: Some(10),
        min_accuracy: Some(101.0),
        ..Bounds::default()
    };
    assert_eq!(recipe, Recipe::new().with_bounds(bounds));
    let text = recipe.to_toml().unwrap();
    assert_eq!(Recipe::from_toml(&text).unwrap(), recipe);
    assert_eq!(Recipe::from_json(&recipe.to_json()).unwrap(), recipe);
    for (text, said) in [
        ("max_bites = 10", ["max_bites", "max_bytes"]),
        ("max_ece = nan", ["max_ece", "a finite number"]),
    ] {
        let error = Recipe::from_toml(&format!("[bounds]\n{text}")).unwrap_err();
        assert_says!(error, said[0], said[1]);
    }
    let config = TrustConfig::new()
        .with_bounds(recipe.bounds)
        .with_perturbations(Vec::new());
    compared(&config, |_, _, small, _| {
        let Err(RecipeError::BrokenBounds { broken }) = small.check() else {
            panic!("it is broken");
        };
        let names: Vec<_> = broken.iter().map(|one| one.bound.as_str()).collect();
        assert_eq!(names, ["max_bytes", "min_accuracy"]);
    });
}

#[test]
fn strengths_and_bounds_that_are_no_numbers_are_refused_before_a_model_runs() {
    let device = Device::flex();
    let task = task(&device);
    let outcome = done(
        &Recipe::new(),
        Net::new(8, &device.clone().autodiff()),
        &task,
    );
    let dense = outcome.dense();
    let calls = std::cell::Cell::new(0);
    let refused = |config: TrustConfig, field: &str| {
        let test = || {
            calls.set(calls.get() + 1);
            batches(0, &device)
        };
        let error = config.compare(&task, dense, dense, test).unwrap_err();
        assert_says!(error, field, "finite");
    };
    for strength in [f64::NAN, 1e39] {
        let noise = vec![Perturbation::Noise(strength)];
        refused(
            TrustConfig::new().with_perturbations(noise),
            "perturbations",
        );
    }
    let bounds = Bounds {
        max_ece: Some(f64::INFINITY),
        ..Bounds::default()
    };
    refused(TrustConfig::new().with_bounds(bounds), "max_ece");
    assert_eq!(calls.get(), 0);
}

#[test]
fn a_config_reads_back_from_json_and_what_it_does_not_say_is_the_default() {
    let bounds = Bounds {
        max_bytes: Some(10),
        ..Bounds::default()
    };
    let config = TrustConfig::new()
        .with_perturbations(vec![Perturbation::Shift(-2)])
        .with_bounds(bounds);
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<TrustConfig>(&json).unwrap(), config);
    let read: TrustConfig = serde_json::from_str(r#"{"bounds": {"max_bytes": 10}}"#).unwrap();
    assert_eq!(read, TrustConfig::new().with_bounds(bounds));
    assert!(serde_json::from_str::<TrustConfig>(r#"{"bound": {}}"#).is_err());
}
