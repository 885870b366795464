//! Behind a residual sum a layer makes up for what pruning took from the other summand.

use burn::module::{Module, Param, RunningState};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{Budget, Effort, Pruner, layerwise::Candidate};

use crate::support::{each_device, tensor, values};

/// Two inputs, three features of which the third one is small: it goes, and the second layer, which
/// keeps all weights, can make it of the others.
const STEM: [[f32; 2]; 3] = [[2.0, 1.0], [1.0, -2.0], [0.03, -0.01]];
const INNER: [[f32; 3]; 3] = [[0.5, -0.7, 0.9], [0.3, 0.8, -0.4], [0.1, 0.1, 0.1]];

fn pruner() -> Pruner {
    let mut pruner = Pruner::new(Budget::Keep(13)).with_effort(Effort::Quick);
    pruner.damping = 1e-7;
    pruner.recalibrate = false;
    pruner
}

fn batches<const D: usize>(shape: [usize; D], device: &Device) -> Vec<Tensor<D>> {
    (1..=2).map(|seed| tensor(seed, shape, device)).collect()
}

/// By how much outputs are off, of the largest.
fn off<const D: usize>(expected: Tensor<D>, found: Tensor<D>) -> f32 {
    let (expected, found) = (values(expected), values(found));
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let pairs = expected.iter().zip(&found);
    pairs.fold(0.0_f32, |most, (x, y)| most.max((x - y).abs())) / largest
}

#[test]
fn a_linear_layer_makes_up_for_a_feature_that_the_sum_lost() {
    #[derive(Module, Debug)]
    struct Sum {
        stem: Linear,
        inner: Linear,
    }
    each_device(|target| {
        let device = &target.device;
        let layer = |size: [usize; 2]| {
            let config = LinearConfig::new(size[0], size[1]).with_bias(false);
            config.init(device)
        };
        let mut model = Sum {
            stem: layer([2, 3]),
            inner: layer([3, 3]),
        };
        model.stem.weight = Param::from_tensor(Tensor::from_data(STEM, device).transpose());
        model.inner.weight = Param::from_tensor(Tensor::from_data(INNER, device).transpose());
        // The third sum alone: of the others a tenth of a percent is lost.
        let forward = |model: &Sum, x: Tensor<2>| {
            let h = model.stem.forward(x);
            let sum = h.clone() + model.inner.forward(h);
            sum.narrow(1, 2, 1)
        };
        let x = tensor(7, [20, 2], device);
        let expected = forward(&model, x.clone());
        let pruned = pruner().prune(model, forward, batches([40, 2], device));
        let pruned = pruned.unwrap();
        assert_eq!(pruned.report.chosen, Candidate::Configured);
        let stem = values(pruned.model.stem.weight.val());
        assert_eq!(stem.iter().filter(|w| **w == 0.0).count(), 2);
        // A tenth of it is the feature that went.
        let off = off(expected, forward(&pruned.model, x));
        assert!(off < 1e-3, "{off}");
    });
}

#[test]
fn a_convolution_makes_up_for_it_through_the_norm_behind_it() {
    #[derive(Module, Debug)]
    struct Sum {
        stem: Conv2d,
        inner: Conv2d,
        norm: BatchNorm,
    }
    each_device(|target| {
        let device = &target.device;
        let layer = |channels| {
            let config = Conv2dConfig::new(channels, [1, 1]).with_bias(false);
            config.init(device)
        };
        let mut norm: BatchNorm = BatchNormConfig::new(3).init(device);
        norm.gamma = Param::from_data([0.5, 1.5, -0.7], device);
        norm.running_var = RunningState::new(Tensor::from_data([2.0, 0.5, 0.01], device));
        let mut model = Sum {
            stem: layer([2, 3]),
            inner: layer([3, 3]),
            norm,
        };
        let weight = |rows: Tensor<2>| {
            let [outputs, inputs] = rows.dims();
            Param::from_tensor(rows.reshape([outputs, inputs, 1, 1]))
        };
        model.stem.weight = weight(Tensor::from_data(STEM, device));
        model.inner.weight = weight(Tensor::from_data(INNER, device));
        let forward = |model: &Sum, x: Tensor<4>| {
            let h = model.stem.forward(x);
            let sum = model.norm.forward(model.inner.forward(h.clone())) + h;
            sum.narrow(1, 2, 1)
        };
        let x = tensor(7, [3, 2, 4, 4], device);
        let expected = forward(&model, x.clone());
        let pruned = pruner().prune(model, forward, batches([8, 2, 4, 4], device));
        let pruned = pruned.unwrap();
        let stem = values(pruned.model.stem.weight.val());
        assert_eq!(stem.iter().filter(|w| **w == 0.0).count(), 2);
        // Small gains count a little less.
        let off = off(expected, forward(&pruned.model, x));
        assert!(off < 1e-3, "{off}");
    });
}

/// What is added is there only afterwards: nothing to make up for yet, and the other layer does.
#[test]
fn of_two_layers_whose_outputs_are_added_the_second_makes_up() {
    #[derive(Module, Debug)]
    struct Sum {
        left: Linear,
        right: Linear,
    }
    let device = Device::flex();
    let layer = |rows: [[f32; 2]; 1]| {
        let mut layer: Linear = LinearConfig::new(2, 1).with_bias(false).init(&device);
        layer.weight = Param::from_tensor(Tensor::<2>::from_data(rows, &device).transpose());
        layer
    };
    let model = Sum {
        left: layer([[1.0, 0.1]]),
        right: layer([[2.0, 3.0]]),
    };
    let forward =
        |model: &Sum, x: Tensor<2>| model.left.forward(x.clone()) + model.right.forward(x);
    let mut pruner = pruner();
    pruner.budget = Budget::Keep(3);
    let pruned = pruner.prune(model, forward, batches([40, 2], &device));
    let model = pruned.unwrap().model;
    let [left, right] = [model.left, model.right].map(|layer| values(layer.weight.val()));
    assert_eq!(left[1], 0.0);
    let sums = [left[0] + right[0], left[1] + right[1]];
    assert!((sums[0] - 3.0).abs() < 1e-3, "{sums:?}");
    assert!((sums[1] - 3.1).abs() < 1e-3, "{sums:?}");
}
