//! The report on a compressed model: its numbers against hand-computed ones.

use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::recipe::{
    Answers, Bounds, Energy, Latency, Perturbation, PruneStage, QuantizeStage, Rapl, Recipe,
    RecipeError, Run, TrainStage, Trust, TrustConfig,
};

use crate::problem::{Net, NetTask, batches, task};
use crate::support::values;

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

#[test]
fn labels_of_another_number_and_logits_that_are_no_numbers_are_refused() {
    let device = Device::flex();
    let labels =
        |count: usize| Tensor::from_data(TensorData::new(vec![0i64; count], [count]), &device);
    let logits = Tensor::<2>::zeros([3, 2], &device);
    let error = Answers::collect([Ok((logits.clone(), labels(2)))]).unwrap_err();
    assert!(error.to_string().contains("3 rows of logits, but 2 labels"));
    let nan = logits.mul_scalar(f32::NAN);
    assert!(Answers::collect([Ok((nan, labels(3)))]).is_err());
}

#[test]
fn perturbations_do_what_they_say_and_the_same_again() {
    let device = Device::flex();
    let x = Tensor::<3>::from_data([[[1.0, 2.0, 3.0, 6.0]]], &device);
    let apply = |perturbation: Perturbation| values(perturbation.apply(&x, 0));
    assert_eq!(apply(Perturbation::Shift(1)), [1.0, 1.0, 2.0, 3.0]);
    assert_eq!(apply(Perturbation::Shift(-2)), [3.0, 6.0, 6.0, 6.0]);
    assert_eq!(apply(Perturbation::Shift(9)), [1.0; 4]);
    // The variance is (4 + 1 + 0 + 9) / 4.
    let deviation = 3.5f32.sqrt();
    for (found, plain) in apply(Perturbation::Offset(-2.0))
        .iter()
        .zip([1.0, 2.0, 3.0, 6.0])
    {
        assert!((found - (plain - 2.0 * deviation)).abs() < 1e-5);
    }
    let large = Tensor::<2>::from_data(
        TensorData::new(
            (0..10_000).map(|at| (at % 2) as f32).collect::<Vec<_>>(),
            [100, 100],
        ),
        &device,
    );
    let noisy = Perturbation::Noise(0.5).apply(&large, 7);
    assert_eq!(
        values(noisy.clone()),
        values(Perturbation::Noise(0.5).apply(&large, 7))
    );
    assert_ne!(
        values(noisy.clone()),
        values(Perturbation::Noise(0.5).apply(&large, 8))
    );
    let noise: Vec<f32> = values(noisy - large);
    let mean = noise.iter().sum::<f32>() / 1e4;
    let deviation = (noise.iter().map(|x| x * x).sum::<f32>() / 1e4).sqrt();
    // Half of a deviation of 0.5; four standard errors.
    assert!(
        mean.abs() < 0.01 && (deviation - 0.25).abs() < 0.008,
        "{mean} {deviation}"
    );
    // Labels and other integers stay.
    let ids = Tensor::<2, burn::tensor::Int>::from_data([[1, 2]], &device);
    assert_eq!(
        Perturbation::Noise(9.0).apply(&ids, 0).into_data(),
        ids.into_data()
    );
}

#[test]
fn energy_is_what_the_counters_of_all_packages_say() {
    let folder = tempfile::tempdir().unwrap();
    let error = Rapl::open_in(folder.path()).unwrap_err();
    assert!(error.contains("not measurable here"), "{error}");
    let write = |package: &str, file: &str, number: u64| {
        let package = folder.path().join(package);
        std::fs::create_dir_all(&package).unwrap();
        std::fs::write(package.join(file), format!("{number}\n")).unwrap();
    };
    for package in ["intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"] {
        write(package, "energy_uj", 900);
        write(package, "max_energy_range_uj", 1000);
    }
    let rapl = Rapl::open_in(folder.path()).unwrap();
    let joules = rapl.joules(|| {
        write("intel-rapl:0", "energy_uj", 950);
        // It has begun again after 1000; a part of a package does not count twice.
        write("intel-rapl:1", "energy_uj", 50);
        write("intel-rapl:0:0", "energy_uj", 999);
    });
    assert!((joules.unwrap() - 200e-6).abs() < 1e-15);
    let Energy::Measured {
        joules_per_task,
        tasks_per_kwh,
        tasks_per_second_per_watt,
    } = Energy::of(36.0, 12)
    else {
        panic!("there are joules");
    };
    assert_eq!((joules_per_task, tasks_per_kwh), (3.0, 1.2e6));
    assert!((tasks_per_second_per_watt - 1.0 / 3.0).abs() < 1e-15);
    assert!(matches!(Energy::of(0.0, 12), Energy::NotMeasurable { .. }));
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
    let outcome = Run::new(&recipe)
        .with_latency(Latency::None)
        .run(Net::new(24, &device.clone().autodiff()), &task)
        .unwrap();
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
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(page.contains("pruned 70 %, W4A8") && page.contains("No bound is broken"));
        // Nothing is fetched.
        assert!(!page.contains("src=") && !page.contains("<script") && !page.contains("href="));
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
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/report.html");
        small.save(&path).unwrap();
        let page = std::fs::read_to_string(&path).unwrap();
        assert!(page.contains("max_bytes is 10"));
        assert!(path.with_extension("trust.json").exists());
    });
}
