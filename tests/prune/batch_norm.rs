//! Running statistics computed anew.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::prune::{PruneError, mean_loss, recompute_batch_norm};
use burn_lean::quant::{QatConfig, QuantizedForward, Schedule};

use crate::support::{each_device, on_each, parameters, tensor, values, with_numbers};

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

/// A layer for long sequences and one for short ones, and one that runs at each step.
#[derive(Module, Debug)]
struct Steps {
    short: BatchNorm,
    long: BatchNorm,
    each: BatchNorm,
}

#[test]
fn a_layer_that_does_not_always_run_has_the_average_over_what_it_saw() {
    on_each(|device| {
        let device = &device.clone().autodiff();
        let norm = || BatchNormConfig::new(1).init(device);
        let model = Steps {
            short: norm(),
            long: norm(),
            each: norm(),
        };
        // `[batch, steps]` of one value, and half of the examples one more, the others one less.
        let batch = |examples: usize, steps: usize, value: f32| {
            let signs = (0..examples).map(|index| if index % 2 == 0 { 1.0 } else { -1.0 });
            let rows = signs.flat_map(|sign| vec![value + sign; steps]);
            let data = TensorData::new(rows.collect::<Vec<f32>>(), [examples, steps]);
            Tensor::<2>::from_data(data, device)
        };
        let forward = |model: &Steps, x: &Tensor<2>| {
            let [_, steps] = x.dims();
            let first = x.clone().slice([0..x.dims()[0], 0..1]);
            match steps > 2 {
                true => model.long.forward(first),
                false => model.short.forward(first),
            };
            for step in 0..steps {
                model
                    .each
                    .forward(x.clone().slice([0..x.dims()[0], step..step + 1]));
            }
        };
        let batches = [batch(4, 4, 2.0), batch(6, 1, 6.0), batch(2, 2, 8.0)];
        let renewed = recompute_batch_norm(model, forward, batches).unwrap();
        let mean = |norm: &BatchNorm| values(norm.running_mean.value_sync())[0];
        let variance = |norm: &BatchNorm| values(norm.running_var.value_sync())[0];
        // Of short ones (6·6 + 2·8)/8, of all (4·2 + 6·6 + 2·8)/12.
        for (norm, expected) in [
            (&renewed.long, 2.0),
            (&renewed.short, 6.5),
            (&renewed.each, 5.0),
        ] {
            assert!(
                (mean(norm) - expected).abs() < 1e-4,
                "{} {expected}",
                mean(norm)
            );
        }
        // Burn's is divided by n.
        let found = variance(&renewed.long);
        assert!((found - 1.0).abs() < 1e-4, "{found}");
    });
}

/// What an example decides shows in two of them; what their number decides, in all.
#[test]
fn a_layer_that_runs_by_the_size_of_the_batch_has_its_own_average() {
    let device = Device::flex().autodiff();
    let norm = || BatchNormConfig::new(1).init(&device);
    let batch = |value: f32, examples: usize| {
        let signs = (0..examples).map(|index| if index % 2 == 0 { 1.0 } else { -1.0 });
        let rows: Vec<f32> = signs.map(|sign| value + sign).collect();
        Tensor::<2>::from_data(TensorData::new(rows, [examples, 1]), &device)
    };
    let forward = |(four, others): &(BatchNorm, BatchNorm), x: &Tensor<2>| match x.dims()[0] {
        4 => four.forward(x.clone()),
        _ => others.forward(x.clone()),
    };
    let batches = [batch(2.0, 4), batch(6.0, 6)];
    let (four, others) = recompute_batch_norm((norm(), norm()), forward, batches).unwrap();
    for (norm, expected) in [(four, 2.0), (others, 6.0)] {
        let found = values(norm.running_mean.value_sync())[0];
        assert!((found - expected).abs() < 1e-4, "{found} {expected}");
    }
}

/// The schedule of its quantizers freezes them in training.
#[test]
fn a_frozen_batch_norm_of_a_quantized_model_is_measured_anew() {
    let device = Device::flex();
    let schedule = Schedule::new().with_freeze_batch_norm_at(Some(0));
    let config = QatConfig::new()
        .with_activation(None)
        .with_schedule(schedule);
    let net = config
        .prepare(Net::new(&device.clone().autodiff()))
        .unwrap();
    let batch = tensor::<4>(1, [6, 2, 3, 3], &device) + 2.0;
    let quantized = QuantizedForward::new();
    let forward = |net: &Net, x: &Tensor<4>| {
        let run = quantized.run(net, x.clone(), |net, x| net.forward(&x));
        run.unwrap()
    };
    let renewed = recompute_batch_norm(net, forward, [batch.clone()]).unwrap();
    let expected = recompute_batch_norm(Net::new(&device), Net::forward, [batch]).unwrap();
    let mean = |net: &Net| values(net.norm.running_mean.value_sync());
    for (found, expected) in mean(&renewed).iter().zip(mean(&expected)) {
        // The weights are rounded to 8 bits.
        assert!((found - expected).abs() < 0.02, "{found} {expected}");
    }
}

/// A norm for each few examples, as where a batch is computed in parts.
#[test]
fn a_layer_that_runs_by_parts_of_a_batch_has_its_average() {
    let device = Device::flex().autodiff();
    let norm = BatchNormConfig::new(1).init(&device);
    let batch = |examples| Tensor::<2>::full([examples, 1], 5.0, &device);
    let forward = |norm: &BatchNorm, x: &Tensor<2>| {
        for part in x.clone().split(8, 0) {
            norm.forward(part);
        }
    };
    let renewed = recompute_batch_norm(norm, forward, [batch(32), batch(16)]).unwrap();
    let found = values(renewed.running_mean.value_sync())[0];
    assert!((found - 5.0).abs() < 1e-4, "{found}");
}

#[test]
fn a_loss_for_each_example_is_refused() {
    let device = Device::flex();
    let x = Tensor::<2>::from_floats([[1.0], [3.0]], &device);
    let model = BatchNormConfig::new(1).init(&device);
    let error = mean_loss(&model, |_, x: &Tensor<2>| x.clone().flatten(0, 1), &[x]);
    assert_matches!(error.unwrap_err(), PruneError::Loss { .. });
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
