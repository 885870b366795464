//! Pruning layer by layer where modules share a weight, and how a budget is shared.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::prune::{
    Budget, Effort, GradualPruner, PruneError, Pruner, Shares, SparsityPattern,
    layerwise::{Candidate, Refitted},
};

use crate::layerwise::features;
use crate::support::{on_each, parameters, values, with_numbers};

/// All of them.
pub(crate) const SHARES: [Shares; 3] = [Shares::Auto, Shares::Magnitude, Shares::Lamp];

/// Without other candidates.
fn pruner(budget: Budget, shares: Shares) -> Pruner {
    let mut pruner = Pruner::new(budget).with_effort(Effort::Quick);
    pruner.shares = shares;
    pruner.candidates = false;
    pruner
}

/// Two places of one layer, of which the forward pass reads the second.
#[derive(Module, Debug)]
struct Holder {
    teacher: Linear,
    student: Linear,
}

#[test]
fn a_layer_of_which_another_copy_comes_first_is_pruned_as_alone() {
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
    let inputs = features(2, 50, 6, &device);
    for shares in SHARES {
        let pruner = pruner(Budget::Sparsity(0.5), shares);
        let alone = pruner
            .prune(layer.clone(), |m, x| m.forward(x), inputs.clone())
            .unwrap();
        let holder = Holder {
            teacher: layer.clone(),
            student: layer.clone(),
        };
        let forward = |m: &Holder, x: Tensor<2>| m.student.forward(x);
        let held = pruner.prune(holder, forward, inputs.clone()).unwrap();
        assert_eq!(held.masks.nonzeros(), 9);
        for copy in [&held.model.teacher, &held.model.student] {
            assert_eq!(parameters(copy), parameters(&alone.model), "{shares:?}");
        }
    }
}

/// Each copy counts in the gradient, and all of them take the step.
#[test]
fn copies_of_a_layer_are_tuned_as_the_one_layer_that_they_are() {
    type Alone = fn(&Linear, Tensor<2>) -> Tensor<2>;
    type Held = fn(&Holder, Tensor<2>) -> Tensor<2>;
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(6, 6).init(&device), 5);
    let inputs = features(3, 40, 6, &device);
    let mut pruner = pruner(Budget::Sparsity(0.5), Shares::Magnitude);
    pruner.tuning = Some(3);
    let once: Alone = |m, x| m.forward(x);
    let twice: Alone = |m, x| m.forward(relu(m.forward(x)));
    let first: Held = |m, x| m.teacher.forward(x);
    let second: Held = |m, x| m.student.forward(x);
    let both: Held = |m, x| m.student.forward(relu(m.teacher.forward(x)));
    for (of_one, of_copies) in [(once, first), (once, second), (twice, both)] {
        let alone = pruner.prune(layer.clone(), of_one, inputs.clone());
        let alone = alone.unwrap().report.candidates;
        let holder = Holder {
            teacher: layer.clone(),
            student: layer.clone(),
        };
        let held = pruner.prune(holder, of_copies, inputs.clone()).unwrap();
        assert_eq!((alone.len(), held.report.candidates.len()), (2, 2));
        assert_eq!(alone[1].candidate, Candidate::Tuned);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-5 * a.abs();
        assert!(!near(alone[0].divergence, alone[1].divergence));
        for (alone, held) in alone.iter().zip(&held.report.candidates) {
            let same = near(alone.divergence, held.divergence);
            assert!(same, "{alone:?} {held:?}");
        }
        let [teacher, student] = [&held.model.teacher, &held.model.student];
        assert_eq!(parameters(teacher), parameters(student));
    }
}

/// Three places of one normalization, of which the forward pass reads the second.
#[derive(Module, Debug)]
struct Normalized {
    layer: Linear,
    before: BatchNorm,
    norm: BatchNorm,
    after: BatchNorm,
    head: Linear,
}

#[test]
fn copies_of_a_batch_norm_that_are_not_read_get_the_statistics_of_the_one_that_is() {
    let device = Device::flex();
    let norm = BatchNormConfig::new(8).init(&device);
    let model = Normalized {
        layer: with_numbers(LinearConfig::new(6, 8).init(&device), 5),
        before: norm.clone(),
        norm: norm.clone(),
        after: norm,
        head: with_numbers(LinearConfig::new(8, 3).init(&device), 6),
    };
    let forward = |m: &Normalized, x: Tensor<2>| {
        let hidden = m.norm.forward(m.layer.forward(x));
        m.head.forward(relu(hidden))
    };
    let statistics = |norm: &BatchNorm| {
        let both = [&norm.running_mean, &norm.running_var];
        both.map(|one| values(one.value_sync()))
    };
    let before = statistics(&model.norm);
    for tuning in [None, Some(3)] {
        let mut pruner = pruner(Budget::Sparsity(0.7), Shares::Magnitude);
        pruner.tuning = tuning;
        let inputs = features(3, 40, 6, &device);
        let pruned = pruner.prune(model.clone(), forward, inputs).unwrap();
        let found = statistics(&pruned.model.norm);
        assert_ne!(found, before);
        for copy in [&pruned.model.before, &pruned.model.after] {
            assert_eq!(statistics(copy), found, "{tuning:?}");
        }
    }
}

/// A layer that is called twice, which cannot be fitted.
#[derive(Module, Debug)]
struct Reused {
    layer: Linear,
    head: Linear,
}

impl Reused {
    fn new(width: usize, device: &Device) -> Self {
        let reused = Self {
            layer: LinearConfig::new(width, width).init(device),
            head: LinearConfig::new(width, 4).init(device),
        };
        with_numbers(reused, 9)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.layer.forward(x));
        self.head.forward(relu(self.layer.forward(x)))
    }
}

#[test]
fn what_cannot_be_fitted_shares_as_all_layers_do() {
    let device = Device::flex();
    let reused = Reused::new(6, &device);
    let forward = |m: &Reused, x| m.forward(x);
    let kept = |scale: f32, shares: Shares| {
        let mut scaled = reused.clone();
        scaled.layer.weight = scaled.layer.weight.map(|weight| weight * scale);
        let pruned =
            pruner(Budget::Keep(30), shares).prune(scaled, forward, features(3, 40, 6, &device));
        let masks = pruned.unwrap().masks;
        ["layer.weight", "head.weight"].map(|path| masks.get(path).unwrap().nonzeros())
    };
    let adaptive = kept(1.0, Shares::Lamp);
    assert_eq!(adaptive.iter().sum::<usize>(), 30);
    assert!(adaptive.iter().all(|kept| *kept > 0));
    assert_eq!(kept(100.0, Shares::Lamp), adaptive);
    assert_eq!(kept(100.0, Shares::Magnitude), [30, 0]);
}

/// Factors of a recommender are far larger than weights, which magnitude would leave nothing.
#[test]
fn large_embeddings_leave_the_layers_behind_them_their_weights() {
    let device = Device::flex();
    let embedding: Embedding = with_numbers(EmbeddingConfig::new(20, 4).init(&device), 1);
    let head: Linear = with_numbers(LinearConfig::new(4, 3).init(&device), 2);
    let mut model = (embedding, head);
    model.0.weight = model.0.weight.map(|weight| weight * 30.0);
    let ids = (0..4).map(|batch| {
        let ids = (0..32)
            .map(|at| (at * 7 + batch * 3) % 20)
            .collect::<Vec<i64>>();
        Tensor::<2, Int>::from_data(TensorData::new(ids, [32, 1]), &device)
    });
    let pruned = pruner(Budget::Sparsity(0.3), Shares::Auto)
        .prune(
            model,
            |m: &(Embedding, Linear), ids| m.1.forward(m.0.forward(ids)),
            ids,
        )
        .unwrap();
    assert_eq!(pruned.report.shares, Shares::Lamp);
    assert!(pruned.masks.get("1.weight").unwrap().nonzeros() > 4);
}

/// A table that rows are taken of, which all rows are then compared with.
#[derive(Module, Debug)]
struct Recommender {
    items: Embedding,
}

#[test]
fn a_table_that_is_looked_up_and_multiplied_is_judged_as_it_is_returned() {
    on_each(|device| {
        let items = EmbeddingConfig::new(20, 8).init(device);
        let model = with_numbers(Recommender { items }, 4);
        let forward = |m: &Recommender, ids: Tensor<1, Int>| {
            let table = m.items.weight.val();
            let taken = table.clone().select(0, ids).tanh();
            taken.matmul(table.transpose())
        };
        let ids = |first: i64| {
            let ids: Vec<i64> = (0..40).map(|at| (at * 7 + first) % 20).collect();
            Tensor::<1, Int>::from_data(TensorData::new(ids, [40]), device)
        };
        let pruned = Pruner::new(Budget::Sparsity(0.5))
            .with_effort(Effort::Quick)
            .prune(model.clone(), forward, [ids(0), ids(3)])
            .unwrap();
        let report = &pruned.report;
        assert_eq!(report.layers[0].refitted, Refitted::Shared);
        // By the last batch, which judges.
        let [p, q] = [&model, &pruned.model].map(|m| log_softmax(forward(m, ids(3)), 1));
        let nats = values((p.clone().exp() * (p - q)).sum_dim(1));
        let expected = f64::from(nats.iter().sum::<f32>()) / 40.0;
        let mut candidates = report.candidates.iter();
        let chosen = candidates.find(|one| one.candidate == report.chosen);
        let divergence = chosen.unwrap().divergence;
        assert!(expected > 1e-3, "{expected}");
        let off = (divergence - expected).abs();
        assert!(off < 1e-4 * expected + 1e-6, "{divergence} and {expected}");
    });
}

/// Layers by magnitude: one of a hundredth of the others' weights gets nothing, which is right where nothing
/// is computed with it.
#[test]
fn magnitude_may_empty_what_is_not_needed_alone() {
    #[derive(Module, Debug)]
    struct Three {
        small: Linear,
        first: Linear,
        last: Linear,
    }
    let device = Device::flex();
    let three = Three {
        small: LinearConfig::new(6, 6).init(&device),
        first: LinearConfig::new(6, 8).init(&device),
        last: LinearConfig::new(8, 3).init(&device),
    };
    let mut three = with_numbers(three, 4);
    three.small.weight = three.small.weight.map(|weight| weight * 0.01);
    let pruned = |reads: bool| {
        let forward = |m: &Three, x: Tensor<2>| {
            let x = if reads { m.small.forward(x) * 100.0 } else { x };
            m.last.forward(relu(m.first.forward(x)))
        };
        let inputs = features(6, 64, 6, &device);
        let pruner = pruner(Budget::Sparsity(0.6), Shares::Auto);
        pruner.prune(three.clone(), forward, inputs).unwrap()
    };
    let kept = |reads: bool| pruned(reads).masks.get("small.weight").unwrap().nonzeros();
    assert!(kept(true) > 4);
    assert_eq!(kept(false), 0);
}

#[test]
fn a_budget_of_each_layer_is_not_shared_in_another_way() {
    let device = Device::flex();
    let layer = LinearConfig::new(6, 3).init(&device);
    let targets = BTreeMap::from([("weight".to_string(), 0.5)]);
    for budget in [Budget::PerLayer(0.5), Budget::PerLayerTargets(targets)] {
        let prune = |shares: Shares| {
            let inputs = features(2, 50, 6, &device);
            pruner(budget.clone(), shares).prune(layer.clone(), |m, x| m.forward(x), inputs)
        };
        assert_eq!(prune(Shares::Magnitude).unwrap().masks.nonzeros(), 9);
        let error = prune(Shares::Lamp).unwrap_err().into_error();
        assert_matches!(
            error,
            PruneError::InvalidConfig {
                field: "shares",
                ..
            }
        );
    }
}

/// One input, three hidden units, one output, whose weights are a hundredth of the first layer's.
fn uneven(device: &Device) -> (Linear, Linear) {
    let layer = |inputs, outputs, scale: f32| {
        let mut layer = LinearConfig::new(inputs, outputs)
            .with_bias(false)
            .init(device);
        layer.weight = layer.weight.map(|weight| {
            let numbers = Tensor::<1>::from_floats([1.0, 2.0, 3.0], device) * scale;
            numbers.reshape(weight.dims())
        });
        layer
    };
    (layer(1, 3, 1.0), layer(3, 1, 0.01))
}

#[test]
fn layer_adaptive_shares_leave_patterns_and_magnitude_as_they_are() {
    let device = Device::flex();
    let mut reused = Reused::new(8, &device);
    reused.head.weight = reused.head.weight.map(|weight| weight * 0.1);
    let forward = |m: &Reused, x| m.forward(x);
    let inputs = features(3, 40, 8, &device);
    // What is read twice is not fitted, and keeps what magnitude leaves it of the pattern.
    let mut by_pattern = pruner(Budget::Pattern, Shares::Lamp);
    by_pattern.pattern = SparsityPattern::NM { n: 2, m: 4 };
    let pruned = by_pattern.prune(reused.clone(), forward, inputs.clone());
    let masks = pruned.unwrap().masks;
    let kept = masks.get("layer.weight").unwrap().kept();
    for output in 0..8 {
        for first in [0, 4] {
            let block = (first..first + 4).filter(|input| kept[input * 8 + output]);
            assert_eq!(block.count(), 2);
        }
    }
    // Of a pruner that is to be by magnitude in stages, shares are not looked at.
    let by_magnitude = |shares| {
        let mut gradual = GradualPruner::new(Budget::Keep(30), 1, 0, 0);
        gradual.pruner.shares = shares;
        let pruned = gradual.prune(reused.clone(), forward, |_| inputs.clone(), |m, _| Ok(m));
        pruned.unwrap().masks
    };
    assert_eq!(by_magnitude(Shares::Lamp), by_magnitude(Shares::Auto));
}

#[test]
fn layer_adaptive_magnitude_compares_squares_with_those_of_the_larger_weights() {
    let device = Device::flex();
    let inputs = features(2, 20, 1, &device);
    let counts = |shares, sparsity| {
        let pruner = pruner(Budget::Sparsity(sparsity), shares);
        let forward = |m: &(Linear, Linear), x: Tensor<2>| m.1.forward(m.0.forward(x));
        let pruned = pruner.prune(uneven(&device), forward, inputs.clone());
        let masks = pruned.unwrap().masks;
        ["0.weight", "1.weight"].map(|path| masks.get(path).unwrap().nonzeros())
    };
    // 1, 4/13 and 1/14 in both layers.
    assert_eq!(counts(Shares::Lamp, 1.0 / 3.0), [2, 2]);
    assert_eq!(counts(Shares::Lamp, 2.0 / 3.0), [1, 1]);
    assert_eq!(counts(Shares::Magnitude, 1.0 / 3.0), [3, 1]);
    // Nothing comes through, and the outputs say so.
    assert_eq!(counts(Shares::Magnitude, 2.0 / 3.0), [2, 0]);
    assert_eq!(counts(Shares::Auto, 2.0 / 3.0), [1, 1]);
}

/// A constant diverges less than a layer of which half a difference is left, until that is fitted.
#[test]
fn no_layer_is_emptied_where_other_values_make_up_for_what_goes() {
    let device = Device::flex();
    let layer = |shape: [usize; 2], weights: Vec<f32>| {
        let config = LinearConfig::new(shape[0], shape[1]).with_bias(false);
        let mut layer: Linear = config.init(&device);
        layer.weight = Param::from_data(TensorData::new(weights, shape), &device);
        layer
    };
    let small = layer([2, 1], vec![0.04, -0.035]);
    let large = layer([1, 3], vec![10.0, -20.0, 15.0]);
    // Two features that are the same.
    let inputs = features(2, 40, 1, &device).into_iter();
    let inputs = inputs.map(|x| Tensor::cat(vec![x.clone(), x], 1));
    let pruned = pruner(Budget::Keep(2), Shares::Auto)
        .prune(
            (small, large),
            |m: &(Linear, Linear), x: Tensor<2>| m.1.forward(m.0.forward(x)),
            inputs,
        )
        .unwrap();
    assert_eq!(pruned.report.shares, Shares::Lamp);
    assert_eq!(pruned.masks.get("0.weight").unwrap().nonzeros(), 1);
}
