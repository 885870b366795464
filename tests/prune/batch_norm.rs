//! Running statistics computed anew.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{PruneError, mean_loss, recompute_batch_norm};

use crate::support::{each_device, parameters, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    dropout: Dropout,
    norm: BatchNorm,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([2, 3], [1, 1]).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            norm: BatchNormConfig::new(3).with_momentum(0.3).init(device),
        };
        with_numbers(net, 4)
    }

    fn forward(&self, images: &Tensor<4>) -> Tensor<4> {
        self.norm
            .forward(self.dropout.forward(self.conv.forward(images.clone())))
    }
}

#[test]
fn statistics_become_the_averages_over_the_batches() {
    each_device(|target| {
        for device in [target.device.clone(), target.device.clone().autodiff()] {
            let net = Net::new(&device);
            let old = values(net.norm.running_mean.value());
            let batches: Vec<Tensor<4>> = (0..3)
                .map(|seed| tensor(seed, [4 + seed as usize, 2, 3, 3], &device))
                .collect();
            let renewed =
                recompute_batch_norm(net.clone(), |net, x| net.forward(x), batches.clone())
                    .unwrap();

            // The mean of every batch, weighted by its examples.
            let mut expected = vec![0.0f64; 3];
            for batch in &batches {
                let plain = net.conv.forward(batch.clone());
                for (channel, expected) in expected.iter_mut().enumerate() {
                    let plane = values(plain.clone().slice_dim(1, channel..channel + 1));
                    let mean =
                        plane.iter().map(|x| f64::from(*x)).sum::<f64>() / plane.len() as f64;
                    *expected += mean * batch.dims()[0] as f64 / 15.0;
                }
            }
            let found = values(renewed.norm.running_mean.value_sync());
            for (found, expected) in found.iter().zip(&expected) {
                // Recovering μ·b / μ costs some roundings of numbers of order one.
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-5,
                    "{found} {expected}"
                );
            }
            let variances = values(renewed.norm.running_var.value_sync());
            assert!(
                variances
                    .iter()
                    .all(|variance| *variance > 0.0 && *variance < 1.0)
            );
            // The model that went in and its clones are as they were.
            assert_eq!(values(net.norm.running_mean.value_sync()), old);
            assert_eq!(renewed.conv.weight.is_require_grad(), device.is_autodiff());
            if device.is_autodiff() {
                assert!(
                    renewed.norm.training.is_enabled() && renewed.dropout.training.is_enabled()
                );
            }
        }
    });
}

#[derive(Module, Debug)]
struct Only {
    norm: BatchNorm,
}

/// Far from zero as near it: the layer's share of the old statistics is not lost in them.
#[test]
fn statistics_of_large_numbers_are_as_exact() {
    let device = Device::flex().autodiff();
    let norm = Only {
        norm: BatchNormConfig::new(2).init(&device),
    };
    // The second channel is 10⁴ times the first, which is near 0.
    let x = tensor::<2>(3, [50, 1], &device);
    let x = Tensor::cat(vec![x.clone(), x * 1e4], 1);
    let renewed = recompute_batch_norm(norm, |net, x| net.norm.forward(x.clone()), [x.clone()]);
    let renewed = renewed.unwrap().norm;
    let [found_mean, found_var] =
        [renewed.running_mean, renewed.running_var].map(|running| values(running.value_sync()));
    let expected_mean = values(x.clone().mean_dim(0));
    let expected_var = values(x.var_bias(0));
    let pairs = found_mean.iter().zip(&expected_mean);
    for (found, expected) in pairs.chain(found_var.iter().zip(&expected_var)) {
        assert!((found / expected - 1.0).abs() < 1e-5, "{found} {expected}");
    }
}

#[test]
fn no_batch_is_an_error_and_no_layer_is_none() {
    let device = Device::flex();
    let nothing = Vec::<Tensor<4>>::new();
    let net = Net::new(&device);
    let before = parameters(&net);
    let rejected = recompute_batch_norm(net, |net, x| net.forward(x), nothing).unwrap_err();
    assert_eq!(*rejected.error(), PruneError::NoSamples);
    assert_eq!(parameters(rejected.value()), before);
    let conv = Conv2dConfig::new([2, 3], [1, 1]).init(&device);
    let batches = [tensor::<4>(1, [1, 2, 3, 3], &device)];
    assert!(recompute_batch_norm(conv, |conv, x| conv.forward(x.clone()), batches).is_ok());
}

#[test]
fn a_batch_without_examples_counts_for_nothing_and_one_of_nan_is_an_error() {
    let device = Device::flex();
    let net = Net::new(&device);
    let before = parameters(&net);
    let batch = tensor::<4>(1, [5, 2, 3, 3], &device);
    let renewed = |batches: Vec<Tensor<4>>| {
        recompute_batch_norm(net.clone(), |net, x| net.forward(x), batches)
    };
    let expected = parameters(&renewed(vec![batch.clone()]).unwrap());
    assert_ne!(expected, before);
    let none = batch.clone().slice([0..0]);
    for batches in [[batch.clone(), none.clone()], [none.clone(), batch.clone()]] {
        assert_eq!(parameters(&renewed(batches.into()).unwrap()), expected);
    }
    let rejected = renewed(vec![none]).unwrap_err();
    assert_eq!(*rejected.error(), PruneError::NoSamples);

    for broken in [f32::NAN, f32::INFINITY] {
        let broken = batch.clone() * broken;
        for batches in [
            [batch.clone(), broken.clone()],
            [broken.clone(), batch.clone()],
        ] {
            let rejected = renewed(batches.into()).unwrap_err();
            let PruneError::NonFiniteStatistics { path } = rejected.error() else {
                panic!("{}", rejected.error())
            };
            assert!(path.starts_with("norm.running_"), "{path}");
            assert_eq!(parameters(rejected.value()), before);
        }
    }
}

/// The second batch has other channels than the model.
#[test]
fn a_forward_pass_that_panics_costs_no_model() {
    let device = Device::flex();
    let net = Net::new(&device);
    let batches = [2, 5].map(|channels| tensor::<4>(1, [3, channels, 4, 4], &device));
    let refused = recompute_batch_norm(net, Net::forward, batches.clone()).unwrap_err();
    let (net, error) = refused.into_parts();
    assert_matches!(
        error,
        PruneError::Panics {
            closure: "forward pass",
            ..
        }
    );
    let error = mean_loss(&net, |net, x| net.forward(x).mean(), &batches).unwrap_err();
    assert_matches!(
        error,
        PruneError::Panics {
            closure: "loss",
            ..
        }
    );
}
