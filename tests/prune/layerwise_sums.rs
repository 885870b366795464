//! Behind a residual sum a layer makes up for what pruning took from the other summand.

use burn::module::{Module, Param, RunningState};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{Budget, Effort, Pruner, layerwise::Candidate};

use crate::support::{farthest, on_each, tensor, values};

/// Two inputs, three features of which the third one is small: it goes, and the second layer, which
/// keeps all weights, can make it of the others.
const STEM: [[f32; 2]; 3] = [[2.0, 1.0], [1.0, -2.0], [0.03, -0.01]];
const INNER: [[f32; 3]; 3] = [[0.5, -0.7, 0.9], [0.3, 0.8, -0.4], [0.1, 0.1, 0.1]];

fn pruner() -> Pruner {
    let mut pruner = Pruner::new(Budget::Keep(13)).with_effort(Effort::Quick);
    pruner.ridge = 1e-7;
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
    farthest(&found, &expected) / largest
}

#[derive(Module, Debug)]
struct Features {
    stem: Linear,
    inner: Linear,
    norm: BatchNorm,
}

impl Features {
    fn new(device: &Device) -> Self {
        let layer = |size: [usize; 2]| {
            let config = LinearConfig::new(size[0], size[1]).with_bias(false);
            config.init(device)
        };
        let mut model = Self {
            stem: layer([2, 3]),
            inner: layer([3, 3]),
            norm: BatchNormConfig::new(3).init(device),
        };
        model.stem.weight = Param::from_tensor(Tensor::from_data(STEM, device).transpose());
        model.inner.weight = Param::from_tensor(Tensor::from_data(INNER, device).transpose());
        model
    }

    /// The third sum alone: of the others a tenth of a percent is lost.
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let h = self.stem.forward(x);
        let sum = h.clone() + self.norm.forward(self.inner.forward(h));
        sum.narrow(1, 2, 1)
    }
}

#[test]
fn a_linear_layer_makes_up_for_a_feature_that_the_sum_lost() {
    on_each(|device| {
        let x = tensor(7, [20, 2], device);
        let expected = Features::new(device).forward(x.clone());
        let forward = |model: &Features, x: Tensor<2>| model.forward(x);
        let pruned = pruner().prune(Features::new(device), forward, batches([40, 2], device));
        let pruned = pruned.unwrap();
        assert_eq!(pruned.report.chosen, Candidate::Configured);
        let stem = values(pruned.model.stem.weight.val());
        assert_eq!(stem.iter().filter(|w| **w == 0.0).count(), 2);
        // A tenth of it is the feature that went.
        let off = off(expected, pruned.model.forward(x));
        assert!(off < 1e-3, "{off}");
    });
}

/// Classes that a mask rules out: -∞ in both passes is no change.
#[test]
fn a_summand_of_minus_infinity_changes_nothing() {
    let device = Device::flex();
    let ruled_out = Tensor::<2>::from_data([[0.0, f32::NEG_INFINITY, 0.0]], &device);
    let mask = |examples| ruled_out.clone().repeat_dim(0, examples);
    let forward = |model: &Features, (x, mask): (Tensor<2>, Tensor<2>)| {
        let h = model.stem.forward(x);
        // What is pruned has a part in the mask's tensor.
        let mask = mask + h.clone() * 0.0;
        model.norm.forward(model.inner.forward(h)) + mask
    };
    let inputs = batches::<2>([40, 2], &device).into_iter();
    let inputs = inputs.map(|x| (x, mask(40)));
    let pruned = pruner().prune(Features::new(&device), forward, inputs);
    let pruned = pruned.unwrap();
    let inner = values(pruned.model.inner.weight.val());
    assert!(inner.iter().all(|w| w.is_finite()), "{inner:?}");
    assert!(pruned.report.candidates[0].divergence < 1e-3);
}

#[test]
fn a_convolution_makes_up_for_it_through_the_norm_behind_it() {
    #[derive(Module, Debug)]
    struct Sum {
        stem: Conv2d,
        inner: Conv2d,
        norm: BatchNorm,
    }
    on_each(|device| {
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

/// A BatchNorm counts channels on the second axis, so that tokens become rows before it: the sum has them on
/// the last one. As many tokens as channels, and fewer, and more.
#[test]
fn a_linear_layer_over_flattened_tokens_makes_up_for_it_in_its_channels() {
    let device = Device::flex();
    let forward = |model: &Features, x: Tensor<3>| {
        let h = model.stem.forward(x);
        let [batch, tokens, channels] = h.dims();
        let rows = h.clone().reshape([batch * tokens, channels]);
        let rows = model.norm.forward(model.inner.forward(rows));
        let sum = h + rows.reshape([batch, tokens, channels]);
        sum.narrow(2, 2, 1)
    };
    for tokens in [2, 3, 4] {
        let x = tensor(7, [10, tokens, 2], &device);
        let expected = forward(&Features::new(&device), x.clone());
        let inputs = batches([40, tokens, 2], &device);
        let pruned = pruner().prune(Features::new(&device), forward, inputs);
        let pruned = pruned.unwrap();
        let stem = values(pruned.model.stem.weight.val());
        assert_eq!(stem.iter().filter(|w| **w == 0.0).count(), 2);
        let off = off(expected, forward(&pruned.model, x));
        assert!(off < 1e-3, "{tokens} tokens: {off}");
    }
}
