//! Pruning layer by layer, from inputs alone.

use burn::module::{Module, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_lean::prune::{
    Budget, Effort, Groups, Masks, PruneError, Pruner, Selection, SparsityPattern,
    layerwise::{Candidate, JudgedCandidate, Refitted, SupportMethod},
    recompute_batch_norm,
};
use burn_lean::quant::fold_for;

use crate::layerwise_shared::SHARES;
use crate::support::{
    cast, each_device, numbers, on_each, parameters, tensor, values, with_numbers,
};

/// Inputs whose features depend on each other, in batches.
pub(crate) fn features(
    batches: usize,
    rows: usize,
    width: usize,
    device: &Device,
) -> Vec<Tensor<2>> {
    let mix = tensor::<2>(91, [width / 2, width], device);
    (0..batches as u64)
        .map(|seed| {
            let sources = tensor::<2>(100 + seed, [rows, width / 2], device);
            sources.matmul(mix.clone()) + tensor::<2>(200 + seed, [rows, width], device) * 0.1
        })
        .collect()
}

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        let mlp = Self {
            first: LinearConfig::new(12, 10).init(device),
            second: LinearConfig::new(10, 4).with_bias(false).init(device),
        };
        with_numbers(mlp, 3)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(x)))
    }
}

/// Mean squared distance of the outputs.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let pairs = a.iter().zip(b);
    let squares = pairs.map(|(a, b)| f64::from(a - b).powi(2));
    squares.sum::<f64>() / a.len() as f64
}

#[test]
fn outputs_stay_nearer_than_those_of_magnitude() {
    on_each(|device| {
        let model = Mlp::new(device);
        let inputs = features(5, 60, 12, device);
        let fresh = features(9, 60, 12, device).pop().unwrap();
        let dense = values(model.forward(fresh.clone()));
        let error = |support, refit| {
            let mut pruner = Pruner::new(Budget::Sparsity(0.6));
            pruner.support = Some(support);
            pruner.refit = refit;
            pruner.candidates = false;
            pruner.tuning = Some(0);
            let pruned = pruner.prune(model.clone(), |m, x| m.forward(x), inputs.clone());
            let pruned = pruned.unwrap();
            assert_eq!(pruned.masks.nonzeros(), 64);
            distance(&values(pruned.model.forward(fresh.clone())), &dense)
        };
        let magnitude = error(SupportMethod::Magnitude, false);
        let fitted = error(SupportMethod::Magnitude, true);
        let best = error(SupportMethod::BestSubset, true);
        assert!(fitted < 0.8 * magnitude, "{fitted} {magnitude}");
        assert!(best < 0.8 * fitted, "{best} {fitted}");
    });
}

/// The same numbers by hand: one layer, the support that was found, its normal equations.
#[test]
fn the_values_of_a_layer_are_least_squares() {
    on_each(|device| {
        let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(device), 5);
        let inputs = features(2, 50, 6, device);
        let mut pruner = Pruner::new(Budget::Sparsity(0.5)).with_effort(Effort::Quick);
        pruner.ridge = 1e-6;
        let pruned = pruner
            .prune(layer.clone(), |m, x| m.forward(x), inputs.clone())
            .unwrap();
        let report = &pruned.report;
        assert_eq!(
            (report.calibration_examples, report.held_out_examples),
            (50, 50)
        );
        let [line] = &report.layers[..] else {
            panic!("one layer")
        };
        assert_eq!(
            (line.path.as_str(), line.weights, line.kept),
            ("weight", 18, 9)
        );
        assert_eq!((line.refitted, line.rows), (Refitted::Fitted, 50));
        // At the minimum the residual is orthogonal to every kept feature, and its mean is 0.
        let x = inputs[0].clone();
        let residual = pruned.model.forward(x.clone()) - layer.forward(x.clone());
        let products = values(x.transpose().matmul(residual.clone()) / 50.0);
        let kept = pruned.masks.get("weight").unwrap().kept().to_vec();
        for (product, kept) in products.iter().zip(kept) {
            assert!(!kept || product.abs() < 1e-3, "{product}");
        }
        for mean in values(residual.mean_dim(0)) {
            assert!(mean.abs() < 1e-5, "{mean}");
        }
    });
}

#[derive(Module, Debug)]
struct ConvNet {
    first: Conv2d,
    norm: BatchNorm,
    second: Conv2d,
    head: Linear,
}

impl ConvNet {
    fn new(device: &Device) -> Self {
        let conv = |from, to, groups| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .with_groups(groups)
                .with_bias(groups > 1)
                .init(device)
        };
        let net = Self {
            first: conv(4, 8, 1),
            norm: BatchNormConfig::new(8).init(device),
            second: conv(8, 8, 2),
            head: LinearConfig::new(8, 5).init(device),
        };
        with_numbers(net, 6)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.first.forward(x)));
        let x = relu(self.second.forward(x));
        self.head.forward(x.mean_dim(3).mean_dim(2).flatten(1, 3))
    }
}

fn images(batches: usize, device: &Device) -> Vec<Tensor<4>> {
    let seeds = 0..batches as u64;
    seeds
        .map(|seed| tensor(40 + seed, [12, 4, 6, 6], device))
        .collect()
}

/// What folding leaves of a BatchNorm adds a number: measured anew it would normalize again, and the
/// network be another one.
#[test]
fn a_folded_batch_norm_is_no_normalization_and_stays() {
    on_each(|device| {
        let inputs = images(3, device);
        let forward = |model: &ConvNet, x| model.forward(x);
        let folded = fold_for(ConvNet::new(device), inputs[0].clone(), forward).unwrap();
        let expected = values(folded.forward(inputs[0].clone()));
        let state = |model: &ConvNet| {
            let norm = &model.norm;
            let running = [
                norm.running_mean.value_sync(),
                norm.running_var.value_sync(),
            ];
            running.map(values)
        };
        let before = state(&folded);
        let renewed = recompute_batch_norm(
            folded.clone(),
            |model: &ConvNet, x: &Tensor<4>| model.forward(x.clone()),
            inputs.clone(),
        );
        assert_eq!(state(&renewed.unwrap()), before);
        let pruner = Pruner::new(Budget::Sparsity(0.2));
        let pruned = pruner.prune(folded, forward, inputs.clone()).unwrap();
        assert_eq!(pruned.report.recalibrated, 0);
        assert_eq!(state(&pruned.model), before);
        let found = values(pruned.model.forward(inputs[0].clone()));
        let nothing = vec![0.0; expected.len()];
        assert!(distance(&found, &expected) < 0.1 * distance(&nothing, &expected));
    });
}

/// The statistics of what the pruned convolution returns; those of the caller's model stay.
#[test]
fn batch_norm_is_measured_behind_the_pruned_layer() {
    on_each(|device| {
        let model = ConvNet::new(device);
        let before = values(model.norm.running_mean.value_sync());
        let inputs = images(3, device);
        let mut pruner = Pruner::new(Budget::Sparsity(0.7)).with_effort(Effort::Quick);
        let pruned = pruner
            .prune(model.clone(), |m, x| m.forward(x), inputs.clone())
            .unwrap();
        assert_eq!(pruned.report.recalibrated, 1);
        assert_eq!(values(model.norm.running_mean.value_sync()), before);
        let seen = Tensor::cat(inputs[..2].to_vec(), 0);
        let seen = pruned
            .model
            .first
            .forward(seen)
            .swap_dims(0, 1)
            .reshape([8, -1]);
        let (variance, mean) = seen.var_mean_bias(1);
        let near = |found: Vec<f32>, expected: Vec<f32>| {
            assert_near!(found.iter(), &expected, 1e-4);
        };
        near(
            values(pruned.model.norm.running_mean.value_sync()),
            values(mean),
        );
        near(
            values(pruned.model.norm.running_var.value_sync()),
            values(variance),
        );
        // Without it they stay, and the weights are fitted to them.
        pruner.recalibrate = false;
        let pruned = pruner
            .prune(model.clone(), |m, x| m.forward(x), inputs)
            .unwrap();
        assert_eq!(pruned.report.recalibrated, 0);
        assert_eq!(values(pruned.model.norm.running_mean.value_sync()), before);
    });
}

/// 2:4 along the channels of a convolution and the inputs of a linear layer, groups included.
#[test]
fn patterns_hold_along_the_reduction_axis() {
    on_each(|device| {
        for candidates in [false, true] {
            let mut pruner = Pruner::new(Budget::Pattern);
            pruner.pattern = SparsityPattern::NM { n: 2, m: 4 };
            pruner.tuning = Some(2);
            pruner.candidates = candidates;
            let model = ConvNet::new(device);
            let pruned = pruner.prune(model, |m, x| m.forward(x), images(3, device));
            let pruned = pruned.unwrap();
            let layout = pruned.selection.layout();
            let weights = values(pruned.selection.flatten(&pruned.model).unwrap());
            for block in pruner.pattern.blocks(layout).unwrap() {
                let kept = block.iter().filter(|at| weights[**at] != 0.0).count();
                assert_eq!(kept, 2);
            }
            assert_eq!(pruned.masks.nonzeros(), layout.len() / 2);
        }
    });
}

#[derive(Module, Debug)]
struct Encoder {
    words: Embedding,
    body: TransformerEncoder,
    head: Linear,
}

impl Encoder {
    fn new(device: &Device) -> Self {
        let encoder = Self {
            words: EmbeddingConfig::new(20, 8).init(device),
            body: TransformerEncoderConfig::new(8, 16, 2, 1)
                .with_dropout(0.1)
                .init(device),
            head: LinearConfig::new(8, 3).init(device),
        };
        with_numbers(encoder, 8)
    }

    fn forward(&self, words: Tensor<2, Int>) -> Tensor<2> {
        let x = self
            .body
            .forward(TransformerEncoderInput::new(self.words.forward(words)));
        self.head.forward(x.mean_dim(1).flatten(1, 2))
    }
}

fn sentences(batches: usize, device: &Device) -> Vec<Tensor<2, Int>> {
    (0..batches as u64)
        .map(|seed| {
            let words: Vec<i64> = numbers(70 + seed, 96)
                .into_iter()
                .map(|x| (10.0 + 9.9 * x) as i64)
                .collect();
            Tensor::from_data(TensorData::new(words, [16, 6]), device)
        })
        .collect()
}

#[test]
fn an_encoder_with_layer_norm_is_pruned_as_it_is() {
    each_device(|target| {
        // Also on an autodiff device, in training.
        let device = target.device.clone().autodiff();
        let model = Encoder::new(&device);
        let inputs = sentences(6, &device);
        let mut pruner = Pruner::new(Budget::Sparsity(0.5));
        pruner.tuning = Some(4);
        let pruned = pruner
            .prune(model.clone(), |m, x| m.forward(x), inputs)
            .unwrap();
        let report = &pruned.report;
        let is_magnitude = |one: &&JudgedCandidate| one.candidate == Candidate::Magnitude;
        let magnitude = report.candidates.iter().find(is_magnitude).unwrap();
        let chosen = report
            .candidates
            .iter()
            .find(|one| one.candidate == report.chosen);
        assert!(
            chosen.unwrap().divergence < 0.7 * magnitude.divergence,
            "{report:?}"
        );
        let kind = |path: &str| {
            let line = report.layers.iter().find(|line| line.path == path);
            line.unwrap().refitted
        };
        assert_eq!(kind("words.weight"), Refitted::NoProduct);
        assert_eq!(kind("head.weight"), Refitted::Fitted);
        assert_eq!(
            report.layers.len(),
            pruned.selection.layout().layers().len()
        );
        let kept: usize = report.layers.iter().map(|line| line.kept).sum();
        assert_eq!(kept, pruned.masks.nonzeros());
        assert_eq!(pruned.masks.nonzeros(), pruned.selection.layout().len() / 2);
        let weights = values(pruned.selection.flatten(&pruned.model).unwrap());
        let mut masks = pruned
            .masks
            .parameters()
            .iter()
            .flat_map(|mask| mask.kept());
        assert!(weights.iter().all(|w| *masks.next().unwrap() || *w == 0.0));
        // It trains on, with the zeros held.
        assert!(pruned.model.devices().iter().all(Device::is_autodiff));
        pruned.masks.attach(pruned.model).unwrap();
    });
}

/// A network without norms, where nothing but weights is replaced.
#[test]
fn every_share_and_support_keeps_the_budget() {
    let device = Device::flex();
    let model = Mlp::new(&device);
    for shares in SHARES {
        for support in [
            SupportMethod::Magnitude,
            SupportMethod::Wanda,
            SupportMethod::SparseGpt,
            SupportMethod::Obs,
        ] {
            let mut pruner = Pruner::new(Budget::Keep(53));
            pruner.shares = shares;
            pruner.support = Some(support);
            pruner.candidates = false;
            pruner.tuning = Some(0);
            let inputs = features(3, 40, 12, &device);
            let pruned = pruner
                .prune(model.clone(), |m, x| m.forward(x), inputs)
                .unwrap();
            assert_eq!(pruned.masks.nonzeros(), 53, "{shares:?} {support:?}");
            assert_eq!(pruned.report.candidates.len(), 1);
        }
    }
    let mut pruner = Pruner::new(Budget::PerLayer(0.5));
    pruner.group = Some(ParamGroup::from_path("second.weight"));
    let pruned = pruner.prune(
        model.clone(),
        |m, x| m.forward(x),
        features(3, 40, 12, &device),
    );
    let pruned = pruned.unwrap();
    assert_eq!(pruned.masks.nonzeros(), 20);
    assert_eq!(parameters(&pruned.model.first), parameters(&model.first));
}

/// The judge sees what was not fitted, takes the least divergent, and says whether it could tell.
#[test]
fn held_out_examples_choose_among_candidates() {
    let device = Device::flex();
    let mut pruner = Pruner::new(Budget::Sparsity(0.6)).with_effort(Effort::Thorough);
    pruner.tuning = Some(0);
    let inputs = features(5, 60, 12, &device);
    let pruned = pruner
        .prune(Mlp::new(&device), |m, x| m.forward(x), inputs)
        .unwrap();
    let report = &pruned.report;
    assert_eq!(
        (report.calibration_examples, report.held_out_examples),
        (240, 60)
    );
    let [configured, fitted, magnitude] = &report.candidates[..] else {
        panic!("three candidates")
    };
    assert!(configured.divergence < fitted.divergence, "{report:?}");
    assert!(fitted.divergence < magnitude.divergence, "{report:?}");
    assert!(configured.disagreement <= magnitude.disagreement);
    assert!(configured.standard_error > 0.0 && report.can_tell);
    assert_eq!(report.chosen, Candidate::Configured);
    assert_says!(report, "* Configured", "  Magnitude");
    // Of candidates that are the same, none can be told from the other.
    pruner.support = Some(SupportMethod::Magnitude);
    let inputs = features(5, 60, 12, &device);
    let pruned = pruner
        .prune(Mlp::new(&device), |m, x| m.forward(x), inputs)
        .unwrap();
    assert!(!pruned.report.can_tell);
    assert_eq!(pruned.report.chosen, Candidate::Configured);
}

#[derive(Module, Debug)]
struct Twice {
    layer: Linear,
    unused: Linear,
}

#[test]
fn weights_that_are_read_twice_or_never_keep_dense_values() {
    let device = Device::flex();
    let twice = with_numbers(
        Twice {
            layer: LinearConfig::new(6, 6).init(&device),
            unused: LinearConfig::new(6, 2).init(&device),
        },
        9,
    );
    let forward = |m: &Twice, x| m.layer.forward(relu(m.layer.forward(x)));
    let pruner = Pruner::new(Budget::PerLayer(0.5)).with_effort(Effort::Quick);
    let pruned = pruner
        .prune(twice.clone(), forward, features(3, 40, 6, &device))
        .unwrap();
    let kinds: Vec<Refitted> = pruned
        .report
        .layers
        .iter()
        .map(|line| line.refitted)
        .collect();
    assert_eq!(kinds, [Refitted::Shared, Refitted::NoProduct]);
    assert_eq!(pruned.masks.nonzeros(), 18 + 6);
    let (before, after) = (
        values(twice.layer.weight.val()),
        values(pruned.model.layer.weight.val()),
    );
    let pairs = before.iter().zip(&after);
    assert!(
        pairs
            .clone()
            .all(|(before, after)| *after == 0.0 || after == before)
    );
    assert_eq!(
        values(pruned.model.unused.weight.val())
            .iter()
            .filter(|w| **w == 0.0)
            .count(),
        6
    );
}

#[test]
fn what_cannot_be_pruned_so_is_refused_with_the_way_that_is_left() {
    let device = Device::flex();
    let model = Mlp::new(&device);
    let inputs = || features(2, 20, 12, &device);
    let before = parameters(&model);
    let refused = |pruner: Pruner| {
        let rejected = pruner
            .prune(model.clone(), |m, x| m.forward(x), inputs())
            .unwrap_err();
        let (given, error) = rejected.into_parts();
        assert_eq!(parameters(&given), before);
        error
    };
    let mut groups = Pruner::new(Budget::Sparsity(0.5));
    groups.pattern = SparsityPattern::Groups(Groups::Outputs);
    let error = refused(groups);
    assert_matches!(error, PruneError::NotLayerwise { .. });
    assert_says!(error, "PrunerConfig");
    let flops = Budget::Flops {
        kept: 0.5,
        sparsity: None,
    };
    assert_matches!(refused(Pruner::new(flops)), PruneError::NotLayerwise { .. });
    let error = refused(Pruner::new(Budget::Sparsity(1.5)));
    assert_matches!(error, PruneError::Sparsity { .. });
    let mut pruner = Pruner::new(Budget::Sparsity(0.5));
    pruner.ridge = f64::NAN;
    assert_matches!(
        refused(pruner.clone()),
        PruneError::InvalidConfig { field: "ridge", .. }
    );
    pruner.ridge = 0.01;
    pruner.examples = 0;
    assert_matches!(
        refused(pruner),
        PruneError::InvalidConfig {
            field: "examples",
            ..
        }
    );

    let pruner = Pruner::new(Budget::Sparsity(0.5));
    let none: [Tensor<2>; 0] = [];
    let error = pruner
        .prune(model.clone(), |m, x| m.forward(x), none)
        .unwrap_err()
        .into_error();
    assert_eq!(error, PruneError::NoSamples);
    let reads = |m: &Mlp, x: Tensor<2>| {
        let scale = x.clone().sum().into_scalar::<f32>();
        m.forward(x * scale)
    };
    let error = pruner
        .prune(model.clone(), reads, inputs())
        .unwrap_err()
        .into_error();
    assert_matches!(error, PruneError::NotRecorded { .. });
    assert_says!(error, "PrunerConfig");
    let broken = inputs().into_iter().map(|x| x * f32::NAN);
    let error = pruner
        .prune(model.clone(), |m, x| m.forward(x), broken)
        .unwrap_err()
        .into_error();
    let named = matches!(&error, PruneError::LayerSystem { path, .. } if path == "first.weight");
    assert!(named, "{error}");
    let masked = Masks::keeping_all(Selection::of(&model, None).unwrap().layout());
    let masked = masked.attach(model.clone()).unwrap();
    let error = pruner
        .prune(masked, |m, x| m.forward(x), inputs())
        .unwrap_err()
        .into_error();
    assert_matches!(error, PruneError::CarriesReparameterization { .. });
}

#[test]
fn a_half_model_stays_half_with_the_statistics_of_its_batch_norms() {
    let device = Device::flex();
    let model = cast(ConvNet::new(&device), FloatDType::F16);
    let inputs = || {
        images(2, &device)
            .into_iter()
            .map(|x| x.cast(FloatDType::F16))
    };
    let mut pruner = Pruner::new(Budget::Sparsity(0.5)).with_effort(Effort::Quick);
    pruner.tuning = Some(0);
    let pruned = pruner.prune(model, |m, x| m.forward(x), inputs()).unwrap();
    assert_eq!(pruned.report.recalibrated, 1);
    let norm = &pruned.model.norm;
    assert_eq!(norm.running_mean.value().dtype(), DType::F16);
    assert_eq!(norm.running_var.value().dtype(), DType::F16);
    assert_eq!(pruned.model.second.weight.val().dtype(), DType::F16);
}
