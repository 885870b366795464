//! Pruning layer by layer at its edges: outputs without a number, parameters of one's own, constants.

use std::collections::BTreeMap;

use burn::module::{Module, Param, ParamGroup};
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig1d,
};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor};
use burn_lean::graph::GraphError;
use burn_lean::prune::{
    Budget, Effort, PruneError, Pruner, Shrink, SparseRecord, SparsityPattern,
    layerwise::{Candidate, JudgedCandidate, LayerwiseReport, Outputs, Refitted, SupportMethod},
};

use crate::layerwise::features;
use crate::support::{parameters, tensor, values, with_numbers};

/// A class that is ruled out has no part in a softmax, and costs nothing.
#[test]
fn classes_at_minus_infinity_change_no_divergence() {
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
    let judged = |is_masked: bool| -> Vec<JudgedCandidate> {
        let forward = |m: &Linear, x: Tensor<2>| {
            let y = m.forward(x);
            if !is_masked {
                return y;
            }
            let none = y.clone().narrow(1, 0, 1) * 0.0 - f32::INFINITY;
            Tensor::cat(vec![y, none], 1)
        };
        let mut pruner = Pruner::new(Budget::Sparsity(0.5));
        pruner.tuning = Some(2);
        let pruned = pruner.prune(layer.clone(), forward, features(3, 40, 6, &device));
        pruned.unwrap().report.candidates
    };
    let (plain, masked) = (judged(false), judged(true));
    assert_eq!((plain.len(), masked.len()), (3, 3));
    // What was not tuned is the same; a fourth column is a part of what is tuned for.
    for (plain, masked) in plain.iter().zip(&masked).take(2) {
        assert!(masked.divergence > 0.0 && masked.divergence.is_finite());
        assert_eq!(masked.divergence, plain.divergence);
        assert_eq!(masked.disagreement, plain.disagreement);
    }
    assert_eq!(masked[2].candidate, Candidate::Tuned);
    assert!(masked[2].divergence.is_finite(), "{masked:?}");
}

/// Weights 2 and 1 are fitted to (1, −3), which gives −1: a third is left of the second alone, and less
/// than 0 at (5, −1), where magnitude leaves 10 of 9.
#[test]
fn a_candidate_without_a_number_is_not_taken() {
    let device = Device::flex();
    let mut layer: Linear = LinearConfig::new(2, 1).with_bias(false).init(&device);
    layer.weight = Param::from_data([[2.0], [1.0]], &device);
    let inputs = [[[1.0, -3.0]], [[5.0, -1.0]]].map(|x| Tensor::<2>::from_floats(x, &device));
    let pruner = Pruner::new(Budget::Keep(1)).with_effort(Effort::Quick);
    let pruned = pruner.prune(layer, |m, x| m.forward(x).log(), inputs);
    let pruned = pruned.unwrap();
    let [configured, magnitude] = &pruned.report.candidates[..] else {
        panic!("two candidates")
    };
    assert!(configured.divergence.is_nan(), "{configured:?}");
    let expected = 0.5 * (10.0_f64 / 9.0).ln().powi(2);
    assert!((magnitude.divergence - expected).abs() < 1e-5);
    assert_eq!(pruned.report.chosen, Candidate::Magnitude);
    assert_eq!(values(pruned.model.weight.val()), [2.0, 0.0]);
}

/// A weight of no layer, multiplied from the right.
#[derive(Module, Debug)]
struct Own {
    weight: Param<Tensor<2>>,
}

/// N:M counts along its last axis; what a product sums over may be the other one.
#[test]
fn a_pattern_across_what_is_summed_over_has_the_support_of_magnitude() {
    let device = Device::flex();
    for (rows, is_turned, refitted) in [
        (8, false, Refitted::OtherAxis),
        (6, false, Refitted::OtherAxis),
        (8, true, Refitted::Fitted),
    ] {
        let own = Own {
            weight: Param::from_tensor(tensor(4, [rows, 8], &device)),
        };
        let forward = |m: &Own, x: Tensor<2>| match is_turned {
            true => x.matmul(m.weight.val().transpose()),
            false => x.matmul(m.weight.val()),
        };
        let mut pruner = Pruner::new(Budget::Pattern).with_effort(Effort::Quick);
        pruner.pattern = SparsityPattern::NM { n: 2, m: 4 };
        pruner.group = Some(ParamGroup::from_path("weight"));
        pruner.candidates = false;
        let pruned = pruner.prune(own, forward, features(3, 40, rows, &device));
        let pruned = pruned.unwrap();
        assert_eq!(pruned.report.layers[0].refitted, refitted, "{rows}");
        for block in values(pruned.model.weight.val()).chunks_exact(4) {
            assert_eq!(block.iter().filter(|w| **w != 0.0).count(), 2, "{rows}");
        }
    }
}

/// A layer with a norm behind it, and one without.
#[derive(Module, Debug)]
struct Normed {
    first: Conv2d,
    norm: BatchNorm,
    second: Conv2d,
}

impl Normed {
    fn new(device: &Device) -> Self {
        let conv = |channels, weights: &[f32]| {
            let mut conv = Conv2dConfig::new(channels, [1, 1])
                .with_bias(false)
                .init(device);
            let weights = Tensor::<1>::from_floats(weights, device);
            conv.weight = conv.weight.map(|old| weights.reshape(old.dims()));
            conv
        };
        Self {
            first: conv([2, 1], &[1.0, 1.0]),
            norm: BatchNormConfig::new(1).init(device),
            second: conv([1, 3], &[1.0, 1.0, 0.1]),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.second
            .forward(self.norm.forward(self.first.forward(x)))
    }
}

/// A batch norm has no mean of nothing, and a loss neither.
#[test]
fn a_batch_without_an_example_is_left_out() {
    let device = Device::flex();
    let full = [3, 4].map(|seed| tensor::<4>(seed, [6, 2, 1, 1], &device));
    let none = Tensor::<4>::zeros([0, 2, 1, 1], &device);
    let mut pruner = Pruner::new(Budget::Keep(3)).with_effort(Effort::Quick);
    pruner.tuning = Some(1);
    let prune =
        |batches: Vec<Tensor<4>>| pruner.prune(Normed::new(&device), |m, x| m.forward(x), batches);
    let [one, other] = full.clone();
    let expected = prune(full.into()).unwrap();
    let found = prune(vec![none.clone(), one, none.clone(), other, none.clone()]).unwrap();
    assert_eq!(found.report.calibration_examples, 6);
    assert_eq!(found.report.held_out_examples, 6);
    assert_eq!(parameters(&found.model), parameters(&expected.model));
    let error = prune(vec![none]).unwrap_err().into_error();
    assert_eq!(error, PruneError::NoSamples);
    let said = error.to_string();
    assert!(said.starts_with("no example was given"), "{said}");
}

#[test]
fn inputs_of_which_the_dense_network_makes_nan_judge_nothing() {
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
    let before = parameters(&layer);
    let good = tensor::<2>(1, [20, 6], &device);
    let inputs = [good.clone(), good * f32::NAN];
    let pruner = Pruner::new(Budget::Sparsity(0.5));
    let rejected = pruner
        .prune(layer, |m, x| m.forward(x), inputs)
        .unwrap_err();
    assert_eq!(*rejected.error(), PruneError::NaNOutputs { batch: 1 });
    assert_eq!(parameters(rejected.value()), before);
}

#[test]
fn a_last_batch_of_sequences_may_be_smaller() {
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(8, 4).init(&device), 6);
    let inputs = [24, 24, 8, 1].map(|batch| tensor::<3>(batch as u64, [batch, 5, 8], &device));
    let pruner = Pruner::new(Budget::Sparsity(0.5));
    let pruned = pruner.prune(layer, |m, x| m.forward(x), inputs).unwrap();
    assert_eq!(pruned.report.layers[0].kept, 16);
}

/// Weights that are no product's are pruned, too, and candidates are judged with their zeros.
#[test]
fn a_transposed_convolution_has_its_zeros_when_candidates_are_judged() {
    #[derive(Module, Debug)]
    struct Decoder {
        inner: Conv2d,
        up: ConvTranspose2d,
        head: Conv2d,
    }
    let device = Device::flex();
    let model = Decoder {
        inner: Conv2dConfig::new([3, 8], [3, 3]).init(&device),
        up: ConvTranspose2dConfig::new([8, 12], [3, 3]).init(&device),
        head: Conv2dConfig::new([12, 4], [1, 1]).init(&device),
    };
    let model = with_numbers(model, 7);
    let forward = |model: &Decoder, x: Tensor<4>| {
        let x = relu(model.inner.forward(x));
        let x = relu(model.up.forward(x));
        model.head.forward(x).permute([0, 2, 3, 1])
    };
    let batch = |seed| tensor::<4>(seed, [8, 3, 7, 7], &device);
    let mut pruner = Pruner::new(Budget::Sparsity(0.7));
    (pruner.examples, pruner.held_out) = (16, 8);
    for tuning in [0, 8] {
        pruner.tuning = Some(tuning);
        let pruned = pruner.prune(model.clone(), forward, (1..=3).map(batch));
        let pruned = pruned.unwrap();
        let zeros = values(pruned.model.up.weight.val());
        assert!(zeros.contains(&0.0));
        let outputs = |model: &Decoder| log_softmax(forward(model, batch(3)), 3);
        let (dense, now) = (outputs(&model), outputs(&pruned.model));
        let each = (dense.clone().exp() * (dense - now)).sum_dim(3);
        let expected = f64::from(each.mean().into_scalar::<f32>());
        let report = &pruned.report;
        let judged = report.candidates.iter();
        let mut chosen = judged.filter(|one| one.candidate == report.chosen);
        let found = chosen.next().unwrap().divergence;
        let off = (found - expected).abs() / expected;
        assert!(off < 1e-4, "{found} is said, {expected} is");
    }
}

/// A sparse file would keep them.
#[test]
fn what_is_pruned_is_a_positive_zero() {
    let device = Device::flex();
    let model = (
        EmbeddingConfig::new(40, 8).init(&device),
        LinearConfig::new(8, 6).init(&device),
    );
    let model = with_numbers(model, 5);
    let tokens = |seed: i64| {
        let tokens = Tensor::<1, Int>::arange(seed..seed + 64, &device);
        tokens.remainder_scalar(40).reshape([16, 4])
    };
    for support in [SupportMethod::Magnitude, SupportMethod::BestSubset] {
        let mut pruner = Pruner::new(Budget::Sparsity(0.8));
        pruner.support = Some(support);
        pruner.refit = false;
        pruner.tuning = Some(0);
        let forward = |m: &(Embedding, Linear), x| m.1.forward(m.0.forward(x));
        let pruned = pruner.prune(model.clone(), forward, [tokens(0), tokens(11)]);
        let pruned = pruned.unwrap();
        let record = SparseRecord::from_module(&pruned.model).unwrap();
        let nonzeros: usize = record
            .sizes()
            .unwrap()
            .tensors
            .iter()
            .map(|one| one.nonzeros)
            .sum();
        // And the bias.
        assert_eq!(nonzeros, pruned.masks.nonzeros() + 6);
    }
}

/// Burn's `reshape` takes an extent of 0 for the old one, and a product without an input has no rows.
#[test]
fn parameters_without_an_element_are_left_alone() {
    let device = Device::flex();
    let empty = |shape: [usize; 2]| Param::from_tensor(Tensor::<2>::zeros(shape, &device));
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
    let model = (layer, (empty([6, 0]), empty([0, 3])));
    type Model = (Linear, (Param<Tensor<2>>, Param<Tensor<2>>));
    let forward = |model: &Model, x: Tensor<2>| {
        let nothing = x.clone().matmul(model.1.0.val()).matmul(model.1.1.val());
        model.0.forward(x) + nothing
    };
    let batches = features(3, 40, 6, &device);
    let batch = batches[0].clone();
    let pruned = Pruner::new(Budget::Sparsity(0.5)).prune(model, forward, batches);
    let pruned = pruned.unwrap();
    assert_eq!((pruned.masks.nonzeros(), pruned.masks.weights()), (9, 18));
    let shrunk = Shrink::dead().shrink(pruned.model, forward, batch).unwrap();
    assert_eq!(shrunk.model.1.0.val().dims(), [6, 0]);
}

/// A head that is trained elsewhere, over frozen features.
#[test]
fn what_trains_but_is_not_read_is_not_tuned() {
    let device = Device::flex().autodiff();
    let model: (Linear, Linear) = (
        LinearConfig::new(6, 5).init(&device),
        LinearConfig::new(5, 3).init(&device),
    );
    let model = with_numbers(model, 5);
    let model = (model.0.no_grad(), model.1);
    let forward = |model: &(Linear, Linear), x| model.0.forward(x);
    let mut pruner = Pruner::new(Budget::Sparsity(0.5));
    pruner.tuning = Some(2);
    let pruned = pruner.prune(model, forward, features(3, 40, 6, &device.inner()));
    assert_eq!(pruned.unwrap().masks.nonzeros(), 22);
}

/// Squares of its gradients, and the optimizer's epsilon, are 0 there.
#[test]
fn weights_in_half_precision_are_not_tuned_to_nan() {
    let device = Device::flex().autodiff();
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).with_bias(false).init(&device), 5);
    let half = |w: Tensor<2>| w.cast(FloatDType::F16).detach().require_grad();
    let layer = Linear {
        weight: layer.weight.map(half),
        ..layer
    };
    let forward = |layer: &Linear, x: Tensor<2>| layer.forward(x.cast(FloatDType::F16));
    let mut pruner = Pruner::new(Budget::Sparsity(0.5));
    pruner.tuning = Some(2);
    let pruned = pruner.prune(layer, forward, features(3, 40, 6, &device.inner()));
    let judged = pruned.unwrap().report.candidates;
    assert!(
        judged.iter().all(|one| one.divergence.is_finite()),
        "{judged:?}"
    );
}

/// Every weight would do, and all of them would be zero.
#[test]
fn examples_that_are_all_the_same_are_refused() {
    let device = Device::flex();
    let new = || -> Vec<Linear> {
        let layers = [(6, 5), (5, 3)].map(|(i, o)| LinearConfig::new(i, o).init(&device));
        with_numbers(layers.to_vec(), 5)
    };
    let forward = |model: &Vec<Linear>, x| model[1].forward(relu(model[0].forward(x)));
    let one = features(1, 1, 6, &device);
    let same = vec![one[0].clone().repeat_dim(0, 8)];
    for batches in [one, same, vec![Tensor::ones([4, 6], &device)]] {
        let refused = Pruner::new(Budget::Sparsity(0.5)).prune(new(), forward, batches);
        let error = refused.unwrap_err().into_error().to_string();
        assert!(
            error.starts_with("`0.weight`: its inputs are the same"),
            "{error}"
        );
    }
    let two = features(1, 2, 6, &device);
    assert!(
        Pruner::new(Budget::Sparsity(0.5))
            .prune(new(), forward, two)
            .is_ok()
    );
}

/// Otherwise the examples that layers were fitted to would judge them.
#[test]
fn of_a_single_batch_the_last_quarter_judges_where_it_can_be_divided() {
    let device = Device::flex();
    let prune = |forward: fn(&Linear, Tensor<2>) -> Tensor<2>, rows| {
        let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
        let pruner = Pruner::new(Budget::Sparsity(0.5));
        let pruned = pruner.prune(layer, forward, features(1, rows, 6, &device));
        let report = pruned.unwrap().report;
        (report.calibration_examples, report.held_out_examples)
    };
    let alone: fn(&Linear, Tensor<2>) -> Tensor<2> = |layer, x| layer.forward(x);
    assert_eq!(prune(alone, 40), (30, 10));
    assert_eq!(prune(alone, 5), (4, 1));
    // One row says nothing of what varies.
    assert_eq!(prune(alone, 2), (2, 0));
    // Examples of a graph meet.
    let mixed: fn(&Linear, Tensor<2>) -> Tensor<2> = |layer, x| {
        let mean = x.clone().mean_dim(0);
        layer.forward(x - mean)
    };
    assert_eq!(prune(mixed, 40), (40, 0));
}

/// To a softmax, two numbers that are off by the same amount are the same.
#[test]
fn outputs_that_are_no_logits_are_judged_by_their_distance() {
    let device = Device::flex();
    let model = || -> Linear {
        let layer: Linear = with_numbers(LinearConfig::new(6, 1).init(&device), 5);
        layer
    };
    // One score, with two thresholds.
    let forward = |layer: &Linear, x: Tensor<2>| {
        let score = layer.forward(x);
        Tensor::cat(vec![score.clone(), score - 1.0], 1)
    };
    let pruned = |outputs| {
        let pruner = Pruner::new(Budget::Sparsity(0.5)).with_outputs(outputs);
        let pruned = pruner.prune(model(), forward, features(2, 40, 6, &device));
        pruned.unwrap().report
    };
    let logits = pruned(Outputs::Logits);
    assert!(
        logits.candidates.iter().all(|one| one.divergence < 1e-9),
        "{logits}"
    );
    let values = pruned(Outputs::Values);
    let of = |candidate| {
        let mut all = values.candidates.iter();
        all.find(|one| one.candidate == candidate)
            .unwrap()
            .divergence
    };
    assert_ne!(values.chosen, Candidate::Magnitude);
    assert!(
        of(Candidate::Configured) < 0.5 * of(Candidate::Magnitude),
        "{values}"
    );
}

/// The first batch is recorded without computing, and the second one has a word that is in no table.
#[test]
fn a_batch_that_an_operation_panics_at_costs_no_model() {
    let device = Device::flex();
    let model: (Embedding, Linear) = (
        EmbeddingConfig::new(5, 4).init(&device),
        LinearConfig::new(4, 3).init(&device),
    );
    let forward = |model: &(Embedding, Linear), words| model.1.forward(model.0.forward(words));
    let batches = [[0, 4], [1, 7]].map(|words| Tensor::<2, Int>::from_ints([words], &device));
    let refused = Pruner::new(Budget::Sparsity(0.5)).prune(model, forward, batches);
    let (model, error) = refused.unwrap_err().into_parts();
    // It was recorded, and gradients of a loss would meet the same word.
    assert_matches!(error, PruneError::Graph(GraphError::Panics { .. }));
    assert!(!error.to_string().contains("recorded"), "{error}");
    assert_eq!(model.0.weight.dims(), [5, 4]);
}

/// A score for each example, as recommenders give it: no softmax over the examples of a batch.
#[test]
fn outputs_of_one_axis_are_of_an_example_each() {
    let device = Device::flex();
    let model: [Linear; 2] =
        [LinearConfig::new(6, 8), LinearConfig::new(8, 1)].map(|one| one.init(&device));
    let model = with_numbers(model.to_vec(), 9);
    let column = |m: &Vec<Linear>, x: Tensor<2>| m[1].forward(relu(m[0].forward(x)));
    let pruner = Pruner::new(Budget::Sparsity(0.5));
    for batches in [1, 3] {
        let inputs = || features(batches, 24, 6, &device);
        let expected = pruner.prune(model.clone(), column, inputs()).unwrap();
        let scores = |m: &Vec<Linear>, x: Tensor<2>| column(m, x).squeeze_dim::<1>(1);
        let pruned = pruner.prune(model.clone(), scores, inputs()).unwrap();
        let judged = |report: &LayerwiseReport| -> Vec<(Candidate, f64)> {
            let candidates = report.candidates.iter();
            candidates
                .map(|one| (one.candidate, one.divergence))
                .collect()
        };
        assert_eq!(judged(&pruned.report), judged(&expected.report));
        assert_eq!(parameters(&pruned.model), parameters(&expected.model));
    }
}

/// Two linear layers without biases, of two features.
fn pair(weights: [[[f32; 2]; 2]; 2], device: &Device) -> (Linear, Linear) {
    let layer = |weights: [[f32; 2]; 2]| {
        let config = LinearConfig::new(2, 2).with_bias(false);
        let mut layer: Linear = config.init(device);
        layer.weight = Param::from_data(weights, device);
        layer
    };
    let [first, second] = weights.map(layer);
    (first, second)
}

/// A feature that varies a hundredth as much as the other one is nothing beside the ridge.
#[test]
fn a_layer_that_is_to_stay_dense_is_not_shrunk() {
    let device = Device::flex();
    let weights = [[[1.0, 0.001], [0.001, 1.0]], [[0.5, -0.7], [0.8, 0.3]]];
    let scale = Tensor::<2>::from_data([[100.0, 1.0]], &device);
    let inputs = [1, 2].map(|seed| tensor::<2>(seed, [64, 2], &device) * scale.clone());
    let pruned = |path: &str| {
        let targets = BTreeMap::from([(path.to_string(), 0.5)]);
        let mut pruner = Pruner::new(Budget::PerLayerTargets(targets));
        pruner.support = Some(SupportMethod::Magnitude);
        pruner.candidates = false;
        pruner.tuning = Some(0);
        let forward = |m: &(Linear, Linear), x: Tensor<2>| m.1.forward(m.0.forward(x));
        let pruned = pruner.prune(pair(weights, &device), forward, inputs.clone());
        pruned.unwrap()
    };
    // Nothing has changed before it.
    let second = pruned("1.weight");
    let dense = pair(weights, &device);
    assert_eq!(parameters(&second.model.0), parameters(&dense.0));
    let how: Vec<Refitted> = second.report.layers.iter().map(|l| l.refitted).collect();
    assert_eq!(how, [Refitted::Dense, Refitted::Fitted]);
    // Behind a pruned layer it makes up for that one, as far as its inputs say how.
    let first = pruned("0.weight");
    assert_eq!(first.report.layers[1].refitted, Refitted::Fitted);
    let found = values(first.model.1.weight.val());
    assert_near!(found.into_iter(), weights[1].concat(), 0.02);
}

/// Numbers along time, which is longer in one batch than in another.
#[test]
fn outputs_may_differ_in_width_from_batch_to_batch() {
    let device = Device::flex();
    let conv = Conv1dConfig::new(2, 3, 3)
        .with_padding(PaddingConfig1d::Explicit(1, 1))
        .init(&device);
    let conv: Conv1d = with_numbers(conv, 5);
    for outputs in [Outputs::Values, Outputs::Logits] {
        let lengths = [16, 16, 12].into_iter().zip(1..);
        let inputs = lengths.map(|(length, seed)| tensor::<3>(seed, [8, 2, length], &device));
        let mut pruner = Pruner::new(Budget::Sparsity(0.5)).with_outputs(outputs);
        (pruner.examples, pruner.held_out) = (8, 16);
        pruner.tuning = Some(1);
        let pruned = pruner.prune(conv.clone(), |m, x| m.forward(x), inputs);
        let report = pruned.unwrap().report;
        assert_eq!(report.held_out_examples, 16);
        assert!(report.constant_divergence > 0.0);
    }
}

/// As many positions as outputs: what is added to each position is no bias.
#[test]
fn a_vector_along_positions_is_no_bias() {
    #[derive(Module, Debug)]
    struct Placed {
        conv: Conv1d,
        linear: Linear,
        added: Param<Tensor<1>>,
    }
    let device = Device::flex();
    let conv = Conv1dConfig::new(2, 8, 3)
        .with_padding(PaddingConfig1d::Explicit(1, 1))
        .with_bias(false)
        .init(&device);
    let model = Placed {
        conv: with_numbers(conv, 5),
        linear: with_numbers(LinearConfig::new(2, 8).with_bias(false).init(&device), 6),
        added: Param::from_tensor(tensor(7, [8], &device)),
    };
    let before = values(model.added.val());
    let cases: [(bool, [usize; 3], bool); 3] = [
        (true, [1, 1, 8], false),
        (true, [1, 8, 1], true),
        (false, [1, 8, 1], false),
    ];
    for (is_convolution, shape, is_bias) in cases {
        let forward = |m: &Placed, x: Tensor<3>| {
            let y = match is_convolution {
                true => m.conv.forward(x),
                false => m.linear.forward(x.swap_dims(1, 2)),
            };
            y + m.added.val().reshape(shape)
        };
        let mut pruner = Pruner::new(Budget::PerLayer(0.5)).with_effort(Effort::Quick);
        pruner.candidates = false;
        // A mean that is lost with a weight is the bias's to give back.
        let inputs = [1, 2].map(|seed| tensor::<3>(seed, [24, 2, 8], &device) + 1.0);
        let pruned = pruner.prune(model.clone(), forward, inputs).unwrap();
        let after = values(pruned.model.added.val());
        assert_eq!(after != before, is_bias, "{is_convolution} {shape:?}");
    }
}

/// Candidates would differ by their draws more than by their weights.
#[test]
fn a_forward_pass_that_draws_numbers_is_refused() {
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
    let noisy = |m: &Linear, x: Tensor<2>| {
        let y = m.forward(x);
        y.clone() + y.random_like(Distribution::Normal(0.0, 1.0))
    };
    let pruner = Pruner::new(Budget::Sparsity(0.5)).with_outputs(Outputs::Values);
    let rejected = pruner.prune(layer.clone(), noisy, features(3, 40, 6, &device));
    let (back, error) = rejected.unwrap_err().into_parts();
    assert!(
        matches!(error, PruneError::NotLayerwise { ref what } if what.contains("random")),
        "{error}"
    );
    assert_eq!(parameters(&back), parameters(&layer));
}
