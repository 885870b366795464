//! Values of a pruned network tuned together, towards the outputs of the dense one.

use std::time::Duration;

use burn::module::{Module, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, Effort, Pruner, Shares,
    layerwise::{Candidate, LayerwisePruned, Outputs},
};

use crate::support::{each_device, on_each, parameters, tensor, values, with_numbers};

#[derive(Module, Debug)]
pub(crate) struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    dropout: Dropout,
    hidden: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([2, 8], [3, 3])
                .with_bias(false)
                .init(device),
            norm: BatchNormConfig::new(8).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            hidden: LinearConfig::new(8, 12).init(device),
            head: LinearConfig::new(12, 4).init(device),
        };
        with_numbers(net, 4)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(x)));
        let x = self
            .dropout
            .forward(x.mean_dim(3).mean_dim(2).flatten(1, 3));
        self.head.forward(relu(self.hidden.forward(x))) * 3.0
    }
}

fn images(device: &Device) -> Vec<Tensor<4>> {
    (0..5)
        .map(|seed| tensor(60 + seed, [48, 2, 6, 6], device))
        .collect()
}

pub(crate) fn pruned(pruner: &Pruner, device: &Device) -> LayerwisePruned<Net> {
    let model = Net::new(device);
    let pruned = pruner.prune(model, |m, x| m.forward(x), images(device));
    pruned.unwrap()
}

#[test]
fn tuning_brings_the_outputs_nearer_and_keeps_the_zeros() {
    each_device(|target| {
        let mut pruner = Pruner::new(Budget::Sparsity(0.7));
        pruner.tuning = Some(12);
        pruner.shares = Shares::Magnitude;
        let pruned = pruned(&pruner, &target.device);
        let report = &pruned.report;
        let of = |candidate| {
            let found = report
                .candidates
                .iter()
                .find(|one| one.candidate == candidate);
            found.unwrap().divergence
        };
        assert_eq!(report.chosen, Candidate::Tuned, "{report}");
        let (before, after) = (of(Candidate::Configured), of(Candidate::Tuned));
        assert!(after < 0.9 * before, "{after} {before}");
        // Over the 4 batches of 48 that do not judge.
        assert_eq!(report.tuning_steps, 12 * 4);
        let weights = values(pruned.selection.flatten(&pruned.model).unwrap());
        let masks = pruned.masks.parameters().iter();
        let kept: Vec<bool> = masks.flat_map(|mask| mask.kept().to_vec()).collect();
        let zeros = weights.iter().zip(kept).filter(|(_, kept)| !kept);
        let zeros: Vec<f32> = zeros.map(|(weight, _)| *weight).collect();
        let pruned_away = pruned.selection.layout().len() - pruned.masks.nonzeros();
        assert_eq!(zeros, vec![0.0; pruned_away]);
    });
}

/// Its statistics are those of the tuned network, and its layers train as they were told to.
#[test]
fn a_tuned_network_is_as_the_caller_has_it() {
    let device = Device::flex();
    let model = Net::new(&device.clone().autodiff());
    let before = values(model.norm.running_mean.value_sync());
    let inputs = images(&device);
    let pruned = Pruner::new(Budget::Sparsity(0.7))
        .prune(model.clone(), |m, x| m.forward(x), inputs.clone())
        .unwrap();
    assert_eq!(pruned.report.chosen, Candidate::Tuned);
    assert_eq!(values(model.norm.running_mean.value_sync()), before);
    let tuned = &pruned.model;
    assert!(tuned.devices().iter().all(Device::is_autodiff));
    let x = tensor::<2>(7, [64, 8], &device.clone().autodiff());
    let dropped = values(tuned.dropout.forward(x));
    assert!(dropped.contains(&0.0), "dropout is on again");
    let seen = tuned
        .valid()
        .conv
        .forward(Tensor::cat(inputs[..4].to_vec(), 0));
    let mean = seen.swap_dims(0, 1).reshape([8, -1]).mean_dim(1);
    let found = values(tuned.norm.running_mean.value_sync());
    assert_near!(found.iter(), values(mean), 1e-4);
}

#[test]
fn only_the_named_parameters_change() {
    let device = Device::flex();
    let model = Net::new(&device);
    let mut pruner = Pruner::new(Budget::Sparsity(0.7));
    pruner.group = Some(ParamGroup::from_path("hidden.weight"));
    let pruned = pruner
        .prune(model.clone(), |m, x| m.forward(x), images(&device))
        .unwrap();
    assert!(pruned.report.tuning_steps > 0);
    assert_eq!(parameters(&pruned.model.head), parameters(&model.head));
    assert_eq!(parameters(&pruned.model.conv), parameters(&model.conv));
    // Nothing is pruned before it.
    assert_eq!(parameters(&pruned.model.norm), parameters(&model.norm));
}

#[test]
fn a_frozen_network_is_pruned_and_not_tuned() {
    let device = Device::flex();
    let model = Net::new(&device.clone().autodiff()).no_grad();
    let pruned = Pruner::new(Budget::Sparsity(0.7))
        .prune(model, |m, x| m.forward(x), images(&device))
        .unwrap();
    assert_eq!(pruned.report.tuning_steps, 0);
    assert_eq!(pruned.report.chosen, Candidate::Configured);
}

#[test]
fn efforts_and_times_bound_it() {
    let device = Device::flex();
    let quick = Pruner::new(Budget::Sparsity(0.7)).with_effort(Effort::Quick);
    let report = pruned(&quick, &device).report;
    assert_eq!((report.tuning_steps, report.candidates.len()), (0, 2));
    let standard = Pruner::new(Budget::Sparsity(0.7));
    let report = pruned(&standard, &device).report;
    assert_eq!((report.tuning_steps, report.candidates.len()), (32 * 4, 3));
    let mut late = Pruner::new(Budget::Sparsity(0.7));
    late.time = Some(Duration::ZERO);
    let report = pruned(&late, &device).report;
    assert_eq!((report.tuning_steps, report.candidates.len()), (0, 1));
    assert_eq!(report.chosen, Candidate::Configured);
    // A time that no clock reaches is no bound.
    late.time = Some(Duration::MAX);
    late.tuning = Some(1);
    assert_eq!(pruned(&late, &device).report.tuning_steps, 4);
    let mut twice = Pruner::new(Budget::Sparsity(0.7));
    twice.tuning = Some(2);
    assert_eq!(pruned(&twice, &device).report.tuning_steps, 2 * 4);
    let thorough = Pruner::new(Budget::Sparsity(0.7)).with_effort(Effort::Thorough);
    let report = pruned(&thorough, &device).report;
    assert_eq!((report.tuning_steps, report.candidates.len()), (128 * 4, 4));
}

/// What is nearly the dense network gets no better: the first passes show it.
#[test]
fn passes_that_do_not_help_are_left_out() {
    let device = Device::flex();
    let mut pruner = Pruner::new(Budget::Keep(287));
    (pruner.refit, pruner.recalibrate) = (false, false);
    pruner.tuning = Some(32);
    let report = pruned(&pruner, &device).report;
    assert_eq!(report.chosen, Candidate::Configured, "{report}");
    assert_eq!(report.tuning_steps, 8 * 4);
}

/// Distances of numbers that are no logits: a network with one output.
#[test]
fn one_output_is_tuned_by_its_distance() {
    let device = Device::flex();
    let model = Net::new(&device);
    let forward = |m: &Net, x: Tensor<4>| m.forward(x).narrow(1, 0, 1);
    let pruned = Pruner::new(Budget::Sparsity(0.7))
        .prune(model, forward, images(&device))
        .unwrap();
    let report = &pruned.report;
    assert_eq!(report.chosen, Candidate::Tuned, "{report}");
}

/// That first axes are equally long does not say that the rows of the outputs follow them.
#[test]
fn a_batch_is_cut_only_where_its_parts_give_the_same() {
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(6, 3).init(&device), 5);
    let mut pruner = Pruner::new(Budget::Sparsity(0.5));
    pruner.tuning = Some(1);
    // One loss alone.
    pruner.outputs = Outputs::Values;
    let steps = |forward: fn(&Linear, Tensor<2>) -> Tensor<2>| {
        let batches = [0, 1, 2].map(|seed| tensor::<2>(80 + seed, [128, 6], &device));
        let pruned = pruner.prune(layer.clone(), forward, batches).unwrap();
        pruned.report.tuning_steps
    };
    // Two batches that do not judge, in parts of 64; whole where each row depends on all others.
    assert_eq!(steps(|layer, x| layer.forward(x)), 4);
    let centered = steps(|layer, x| {
        let y = layer.forward(x);
        y.clone() - y.mean_dim(0)
    });
    assert_eq!(centered, 2);
    // Nodes of a graph, with all of their neighbours.
    let batches = [0, 1, 2].map(|seed| {
        let nodes = tensor::<2>(80 + seed, [100, 6], &device);
        (nodes, tensor::<2>(90 + seed, [100, 100], &device))
    });
    let forward =
        |layer: &Linear, (nodes, edges): (Tensor<2>, Tensor<2>)| edges.matmul(layer.forward(nodes));
    let pruned = pruner.prune(layer.clone(), forward, batches).unwrap();
    assert_eq!(pruned.report.tuning_steps, 2);
    // Sequences whose places come first, as many of them as there are places.
    let batches = [0, 1, 2].map(|seed| tensor::<3>(80 + seed, [128, 128, 6], &device));
    let forward = |layer: &Linear, x: Tensor<3>| {
        let places = layer.forward(x).mean_dim(0);
        places.reshape([128, 3])
    };
    let pruned = pruner.prune(layer.clone(), forward, batches).unwrap();
    assert_eq!(pruned.report.tuning_steps, 2);
}

#[derive(Module, Debug)]
struct TwoHeads {
    body: Linear,
    small: Linear,
    large: Linear,
}

impl TwoHeads {
    fn new(device: &Device) -> Self {
        let net = Self {
            body: LinearConfig::new(12, 24).init(device),
            small: LinearConfig::new(24, 4).init(device),
            large: LinearConfig::new(24, 6).init(device),
        };
        with_numbers(net, 5)
    }

    /// Outputs of two magnitudes.
    fn forward(&self, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let x = relu(self.body.forward(x));
        (
            self.small.forward(x.clone()),
            self.large.forward(x) * 1000.0,
        )
    }
}

/// A network with several outputs is judged by and tuned towards all of them, each in its own magnitude,
/// whichever comes first.
#[test]
fn all_outputs_count_alike_in_any_order() {
    on_each(|device| {
        let batches = || (0..4).map(|seed| tensor::<2>(70 + seed, [32, 12], device));
        let mut pruner = Pruner::new(Budget::Sparsity(0.7)).with_outputs(Outputs::Values);
        pruner.tuning = Some(8);
        let forward = |net: &TwoHeads, x| net.forward(x);
        let one = pruner
            .prune(TwoHeads::new(device), forward, batches())
            .unwrap();
        let swapped = |net: &TwoHeads, x| {
            let (small, large) = net.forward(x);
            (large, small)
        };
        let two = pruner
            .prune(TwoHeads::new(device), swapped, batches())
            .unwrap();
        assert_eq!(one.report.chosen, two.report.chosen);
        let divergences = [&one, &two].map(|pruned| {
            let judged = pruned.report.candidates.iter().map(|one| one.divergence);
            judged.collect::<Vec<f64>>()
        });
        for (one, two) in divergences[0].iter().zip(&divergences[1]) {
            assert!((one - two).abs() <= 1e-2 * one, "{one} {two}");
        }
        // Relative to the mean square of each output, not dominated by the large one: 0.5 of each is all.
        assert!(
            divergences[0].iter().all(|one| *one < 1.0),
            "{divergences:?}"
        );

        // The relative error of both heads falls by tuning.
        pruner.tuning = Some(0);
        let fitted = pruner
            .prune(TwoHeads::new(device), forward, batches())
            .unwrap();
        let error = |pruned: &LayerwisePruned<TwoHeads>, head: usize| {
            let dense = TwoHeads::new(device);
            let of = |net: &TwoHeads| {
                let x = tensor::<2>(99, [64, 12], device);
                let (small, large) = net.forward(x);
                values([small, large][head].clone())
            };
            let (dense, pruned) = (of(&dense), of(&pruned.model));
            let pairs = dense.iter().zip(&pruned);
            let off: f32 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
            off / dense.iter().map(|a| a.powi(2)).sum::<f32>()
        };
        for head in 0..2 {
            let (before, after) = (error(&fitted, head), error(&one, head));
            assert!(after < before, "head {head}: {before} {after}");
        }
    });
}

/// A number for each example has an axis of one place: it is no lone loss in the part of one example that judges.
#[test]
fn a_single_batch_with_a_number_for_each_example_is_divided() {
    let device = Device::flex();
    let net: Linear = with_numbers(LinearConfig::new(4, 6).init(&device), 2);
    let forward = |net: &Linear, x: Tensor<2>| {
        let y = net.forward(x);
        (y.clone(), y.clone().mean_dim(1), y.square().mean())
    };
    let mut pruner = Pruner::new(Budget::Sparsity(0.5)).with_outputs(Outputs::Values);
    pruner.tuning = Some(0);
    let batches = [tensor::<2>(1, [6, 4], &device)];
    let pruned = pruner.prune(net, forward, batches).unwrap();
    assert_eq!(pruned.report.calibration_examples, 5);
}
