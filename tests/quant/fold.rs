//! Batch normalization folded into the layer before it.

use burn::module::{Module, Param, Reparameterization, Reparameterizer, RunningState};
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig, ConvTranspose2d,
    ConvTranspose2dConfig,
};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::prune::{Masks, masks::ParameterMask};
use burn_lean::quant::{QuantError, fold, fold::FoldPair, fold_for};
use burn_lean::reparam::attach;

use crate::support::{
    cast, each_device, farthest, on_each, on_tracked, tensor, values, with_numbers,
};

#[derive(Module, Debug)]
struct Block<L: Module + burn::module::ModuleDisplay> {
    layer: L,
    norm: BatchNorm,
}

/// A normalization that does something: statistics and parameters away from 0 and 1.
fn norm(channels: usize, epsilon: f64, device: &Device) -> BatchNorm {
    let mut norm = BatchNormConfig::new(channels)
        .with_epsilon(epsilon)
        .init(device);
    let plain = match device.is_autodiff() {
        true => device.clone().inner(),
        false => device.clone(),
    };
    let of = |seed| tensor::<1>(seed, [channels], device);
    norm.gamma = Param::from_tensor(of(1) + 1.5);
    norm.beta = Param::from_tensor(of(2));
    norm.running_mean = RunningState::new(tensor::<1>(3, [channels], &plain).to_device(device));
    norm.running_var =
        RunningState::new((tensor::<1>(4, [channels], &plain) + 1.2).to_device(device));
    norm
}

fn pair() -> [FoldPair; 1] {
    [FoldPair::new("layer", "norm", 1e-5)]
}

/// The folded block computes what the block computes.
fn folds<L: Module + burn::module::ModuleDisplay, const D: usize>(
    layer: L,
    channels: usize,
    x: Tensor<D>,
    forward: impl Fn(&L, Tensor<D>) -> Tensor<D>,
    device: &Device,
) {
    let block = Block {
        layer,
        norm: norm(channels, 1e-5, device),
    };
    let run = |block: &Block<L>| {
        let y = block.norm.forward(forward(&block.layer, x.clone()));
        values(y)
    };
    let before = run(&block);
    let folded = fold(block.clone(), &pair()).unwrap();
    let after = run(&folded);
    // Sums of at most 54 products and a bias, all of magnitude 4 at most: a few F32 roundings of
    // numbers below 32.
    assert_near!(before.iter(), &after, 1e-5);
    // The clone that was kept is as it was.
    assert_eq!(run(&block), before);
    // What is left of the normalization is exact: identity, or one addition.
    let y = forward(&folded.layer, x.clone());
    let beta = values(folded.norm.beta.val());
    if beta.iter().all(|b| *b == 0.0) {
        assert_eq!(values(folded.norm.forward(y.clone())), values(y));
    }
}

#[test]
fn linear_layers_fold() {
    on_each(|device| {
        for bias in [true, false] {
            let layer = LinearConfig::new(6, 4).with_bias(bias).init(device);
            let x = tensor::<2>(9, [5, 6], device);
            folds(layer, 4, x, |l: &Linear, x| l.forward(x), device);
        }
    });
}

#[test]
fn convolutions_of_every_rank_fold_grouped_or_not() {
    on_each(|device| {
        for bias in [true, false] {
            let layer = Conv1dConfig::new(2, 4, 3).with_bias(bias).init(device);
            let x = tensor::<3>(9, [2, 2, 8], device);
            folds(layer, 4, x, |l: &Conv1d, x| l.forward(x), device);
            for groups in [1, 2] {
                let layer = Conv2dConfig::new([4, 6], [3, 3])
                    .with_groups(groups)
                    .with_bias(bias)
                    .init(device);
                let x = tensor::<4>(9, [2, 4, 5, 5], device);
                folds(layer, 6, x, |l: &Conv2d, x| l.forward(x), device);
            }
            let layer = Conv3dConfig::new([2, 3], [2, 2, 2])
                .with_bias(bias)
                .init(device);
            let x = tensor::<5>(9, [1, 2, 3, 3, 3], device);
            folds(layer, 3, x, |l: &Conv3d, x| l.forward(x), device);
        }
    });
}

#[test]
fn transposed_convolutions_fold_grouped_or_not() {
    on_each(|device| {
        for groups in [1, 2] {
            for bias in [true, false] {
                let layer = ConvTranspose2dConfig::new([4, 6], [3, 2])
                    .with_groups(groups)
                    .with_bias(bias)
                    .init(device);
                let x = tensor::<4>(9, [2, 4, 4, 4], device);
                folds(layer, 6, x, |l: &ConvTranspose2d, x| l.forward(x), device);
            }
        }
    });
}

#[test]
fn what_is_left_of_a_normalization_is_the_identity_for_any_epsilon() {
    each_device(|target| {
        for epsilon in [1e-12, 1e-7, 1e-5, 1e-3, 0.3] {
            let device = &target.device;
            let block = Block {
                layer: LinearConfig::new(3, 2).init(device),
                norm: norm(2, epsilon, device),
            };
            let pair = FoldPair::new("layer", "norm", epsilon);
            let folded = fold(block, &[pair]).unwrap();
            let y = tensor::<2>(11, [4, 2], device);
            assert_eq!(values(folded.norm.forward(y.clone())), values(y));
        }
    });
}

/// With weights that F32 does not have.
#[test]
fn a_model_in_f64_is_folded_in_f64() {
    on_each(|device| {
        if !device.supports_dtype(DType::F64) {
            return;
        }
        let wide = |y: Tensor<2>| -> Vec<f64> { y.into_data().iter().collect() };
        for (bias, epsilon) in [(true, 1e-5), (false, 1e-5), (true, 1e-12), (true, 0.3)] {
            let layer = LinearConfig::new(6, 4).with_bias(bias).init(device);
            let block = Block {
                layer: with_numbers(layer, 5),
                norm: norm(4, epsilon, device),
            };
            let mut block = cast(block, FloatDType::F64);
            block.layer.weight = block.layer.weight.map(|weight| weight / 3.0);
            let x = tensor::<2>(9, [5, 6], device).cast(DType::F64);
            let run = |block: &Block<Linear>| {
                let y = block.norm.forward(block.layer.forward(x.clone()));
                wide(y)
            };
            let before = run(&block);
            let pair = FoldPair::new("layer", "norm", epsilon);
            let folded = fold(block, &[pair]).unwrap();
            // A few roundings of numbers below 32.
            assert_near!(before.iter(), &run(&folded), 1e-12);
            if bias {
                let y = folded.layer.forward(x.clone());
                assert_eq!(wide(folded.norm.forward(y.clone())), wide(y));
            }
        }
    });
}

#[test]
fn a_folded_normalization_stays_as_it_is_in_training() {
    on_tracked(|device| {
        for bias in [true, false] {
            let block = Block {
                layer: LinearConfig::new(3, 2).with_bias(bias).init(&device),
                norm: norm(2, 1e-5, &device),
            };
            let folded = fold(block, &pair()).unwrap();
            assert!(!folded.norm.training.is_enabled());
            assert!(!folded.norm.gamma.is_require_grad());
            // After a layer without bias, β is the bias, and is trained as one.
            assert_eq!(folded.norm.beta.is_require_grad(), !bias);
            assert!(folded.layer.weight.is_require_grad());
            let before = values(folded.norm.running_mean.value().without_autodiff());
            folded
                .norm
                .forward(folded.layer.forward(tensor::<2>(5, [4, 3], &device)));
            let after = values(folded.norm.running_mean.value_sync().without_autodiff());
            assert_eq!(before, after);
        }
    });
}

#[test]
fn the_last_training_step_is_part_of_what_is_folded() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let block = Block {
            layer: LinearConfig::new(3, 2).init(&device),
            norm: norm(2, 1e-5, &device),
        };
        let forward = |block: &Block<Linear>, x| block.norm.forward(block.layer.forward(x));
        forward(&block, tensor::<2>(5, [4, 3], &device) * 4.0 + 3.0);
        // Before anything else takes the step in.
        let folded = fold(block.clone(), &pair()).unwrap();
        let x = tensor::<2>(6, [4, 3], &target.device);
        let expected = values(forward(&block.valid(), x.clone()));
        let found = values(forward(&folded.valid(), x));
        // Sums of three products below 8.
        assert_near!(found.iter(), &expected, 1e-5);
    });
}

#[test]
fn a_model_that_is_folded_in_inference_trains_its_other_normalizations_later() {
    let device = Device::flex().autodiff();
    let block = || Block {
        layer: LinearConfig::new(2, 2).init(&device),
        norm: norm(2, 1e-5, &device),
    };
    let two = Block {
        layer: block(),
        norm: norm(2, 1e-5, &device),
    };
    let pair = FoldPair::new("layer.layer", "layer.norm", 1e-5);
    let folded = fold(two.valid(), &[pair]).unwrap();
    assert!(!folded.norm.training.is_enabled());
    let trained = folded.train();
    assert!(trained.norm.training.is_enabled());
    assert!(!trained.layer.norm.training.is_enabled());
}

#[test]
fn a_plain_model_keeps_its_training_flags() {
    let device = Device::flex();
    let block = Block {
        layer: Block {
            layer: LinearConfig::new(3, 2).init(&device),
            norm: norm(2, 1e-5, &device),
        },
        norm: norm(2, 1e-5, &device),
    };
    let pair = FoldPair::new("layer.layer", "layer.norm", 1e-5);
    let folded = fold(block, &[pair]).unwrap();
    assert!(folded.norm.training.is_enabled());
    assert!(!folded.layer.norm.training.is_enabled());
}

#[test]
fn wrong_pairs_are_refused_and_give_the_model_back() {
    let device = Device::flex();
    let block = || Block {
        layer: LinearConfig::new(3, 2).init(&device),
        norm: norm(2, 1e-5, &device),
    };
    let refuse = |block: Block<Linear>, pair: FoldPair| {
        let rejected = fold(block, &[pair]).unwrap_err();
        assert_eq!(rejected.value().layer.weight.dims(), [3, 2]);
        rejected.into_error()
    };

    let error = refuse(block(), FoldPair::new("layr", "norm", 1e-5));
    assert!(matches!(&error, QuantError::UnknownParameter { path, .. } if path == "layr.weight"));
    let error = refuse(block(), FoldPair::new("layer", "bn", 1e-5));
    assert_eq!(
        error.to_string(),
        "the model has no parameter `bn.gamma`; did you mean `norm.gamma`?"
    );

    let mut wide = block();
    wide.norm = norm(3, 1e-5, &device);
    let error = refuse(wide, FoldPair::new("layer", "norm", 1e-5));
    assert_matches!(
        error,
        QuantError::ChannelMismatch {
            found: 2,
            expected: 3,
            ..
        }
    );

    let mut broken = block();
    broken.norm.gamma = Param::from_data([1.0, f32::NAN], &device);
    let error = refuse(broken, FoldPair::new("layer", "norm", 1e-5));
    assert!(error.to_string().starts_with("parameter `norm.gamma`: "));
    let mut broken = block();
    broken.norm.running_var = RunningState::new(Tensor::from_data([1.0, -2.0], &device));
    let error = refuse(broken, FoldPair::new("layer", "norm", 1e-5));
    assert_says!(error, "root of a negative variance");
    let mut broken = block();
    broken.layer.weight = Param::from_data([[1.0, f32::INFINITY], [0.0; 2], [0.0; 2]], &device);
    let error = refuse(broken, FoldPair::new("layer", "norm", 1e-5));
    assert_says!(error, "`layer.weight`: the folded value");

    let error = refuse(block(), FoldPair::new("layer", "norm", 0.0));
    assert_matches!(
        error,
        QuantError::InvalidConfig {
            field: "epsilon",
            ..
        }
    );
    let twice = [
        FoldPair::new("layer", "norm", 1e-5),
        FoldPair::new("layer", "norm", 1e-5),
    ];
    let error = fold(block(), &twice).unwrap_err().into_error();
    assert_matches!(error, QuantError::InvalidConfig { field: "pairs", .. });

    let embedding: Block<Embedding> = Block {
        layer: EmbeddingConfig::new(5, 2).init(&device),
        norm: norm(2, 1e-5, &device),
    };
    let error = fold(embedding, &pair()).unwrap_err().into_error();
    assert_matches!(error, QuantError::UnsupportedLayer { .. });
    assert_says!(error, "`Embedding`");
}

/// A weight over the mean of its magnitudes: a factor is nothing to it.
#[derive(Module, Debug)]
struct Standardized {}

impl Reparameterization for Standardized {
    const NAME: &'static str = "standardized";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let mean = base.clone().abs().mean_dim(0);
        base / mean
    }
}

struct OnMatrices;

impl Reparameterizer for OnMatrices {
    type Reparam = Standardized;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Standardized>) {
        (param, (D == 2).then_some(Standardized {}))
    }
}

#[test]
fn what_a_factor_does_not_pass_through_is_refused_and_a_mask_is_not() {
    let device = Device::flex();
    let block = || Block {
        layer: with_numbers(LinearConfig::new(3, 2).init(&device), 5),
        norm: norm(2, 1e-5, &device),
    };
    let standardized = attach(block(), OnMatrices).unwrap();
    let error = fold(standardized, &pair()).unwrap_err().into_error();
    assert_matches!(error, QuantError::UnsupportedLayer { .. });
    assert_says!(error, "`standardized`");

    let mask = |path: &str, shape: &[usize], kept: &[bool]| {
        let mask = ParameterMask::new(path, shape, kept.to_vec()).unwrap();
        Masks::new(vec![mask]).unwrap()
    };
    // A bias that is pruned would stay zero.
    let pruned = mask("layer.bias", &[2], &[true, false])
        .attach(block())
        .unwrap();
    let error = fold(pruned, &pair()).unwrap_err().into_error();
    assert_matches!(error, QuantError::UnsupportedLayer { .. });

    let kept = [true, false, true, true, false, true];
    let pruned = mask("layer.weight", &[3, 2], &kept)
        .attach(block())
        .unwrap();
    let x = tensor::<2>(6, [4, 3], &device);
    let run = |block: &Block<Linear>| values(block.norm.forward(block.layer.forward(x.clone())));
    let before = run(&pruned);
    let folded = fold(pruned, &pair()).unwrap();
    for (found, expected) in run(&folded).iter().zip(before) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

#[test]
fn a_large_epsilon_over_small_variances_is_folded_as_the_norm_has_it() {
    on_each(|device| {
        let mut norm = norm(2, 1e-3, device);
        norm.running_var = RunningState::new(Tensor::from_floats([1e-5, 2e-5], device));
        let block = Block {
            layer: LinearConfig::new(3, 2).init(device),
            norm,
        };
        let x = tensor::<2>(11, [4, 3], device) * 20.0;
        let run =
            |block: &Block<Linear>| values(block.norm.forward(block.layer.forward(x.clone())));
        let before = run(&block);
        let folded = |epsilon| {
            let pair = FoldPair::new("layer", "norm", epsilon);
            run(&fold(block.clone(), &[pair]).unwrap())
        };
        let off = |after: Vec<f32>| farthest(&after, &before);
        assert!(off(folded(block.norm.epsilon)) < 1e-2);
        // Burn's default would be off by far, which is why a pair has none.
        assert!(off(folded(1e-5)) > 10.0);
    });
}

#[test]
fn a_forward_pass_shows_what_is_folded_with_its_epsilon() {
    #[derive(Module, Debug)]
    struct Net {
        first: Conv2d,
        first_norm: BatchNorm,
        second: Conv2d,
        second_norm: BatchNorm,
        shared: Conv2d,
        shared_norm: BatchNorm,
    }
    fn forward(net: &Net, x: Tensor<4>) -> Tensor<4> {
        let x = net.first_norm.forward(net.first.forward(x));
        let y = net.second_norm.forward(net.second.forward(x.clone()));
        // The output of this one is also used without its norm.
        let z = net.shared.forward(x);
        y + z.clone() + net.shared_norm.forward(z)
    }
    each_device(|target| {
        for device in [target.device.clone(), target.device.clone().autodiff()] {
            let conv = |from| Conv2dConfig::new([from, 3], [2, 2]).init(&device);
            let net = Net {
                first: conv(2),
                first_norm: norm(3, 1e-3, &device),
                second: conv(3),
                second_norm: norm(3, 0.2, &device),
                shared: conv(3),
                shared_norm: norm(3, 1e-5, &device),
            };
            let x = tensor::<4>(5, [2, 2, 5, 5], &device);
            let before = values(forward(&net.valid(), x.clone().without_autodiff()));
            let folded = fold_for(net.clone(), x.clone(), forward).unwrap();
            let after = values(forward(&folded.valid(), x.clone().without_autodiff()));
            assert_near!(after.iter(), &before, 1e-4);
            let is_identity = |norm: &BatchNorm| {
                let gamma = values(norm.gamma.val());
                let mean = values(norm.running_mean.value());
                gamma.iter().all(|gamma| *gamma == 1.0) && mean.iter().all(|mean| *mean == 0.0)
            };
            assert!(is_identity(&folded.first_norm) && is_identity(&folded.second_norm));
            assert!(!is_identity(&folded.shared_norm));
            assert_eq!(
                values(folded.shared.weight.val()),
                values(net.shared.weight.val())
            );
        }
    });
}

#[test]
fn tied_layers_with_norms_of_their_own_stay_tied() {
    #[derive(Module, Debug)]
    struct Twins {
        left: Conv2d,
        left_norm: BatchNorm,
        right: Conv2d,
        right_norm: BatchNorm,
    }
    let device = Device::flex();
    let mut left = Conv2dConfig::new([2, 3], [2, 2]).init(&device);
    left.weight = Param::from_tensor(tensor(7, [3, 2, 2, 2], &device));
    let twins = Twins {
        right: left.clone(),
        right_norm: norm(3, 0.2, &device),
        left,
        left_norm: norm(3, 1e-3, &device),
    };
    let weight = values(twins.left.weight.val());
    let folded = fold_for(
        twins,
        tensor::<4>(5, [2, 2, 5, 5], &device),
        |twins: &Twins, x: Tensor<4>| {
            let left = twins.left_norm.forward(twins.left.forward(x.clone()));
            left + twins.right_norm.forward(twins.right.forward(x))
        },
    );
    let folded = folded.unwrap();
    assert_eq!(folded.left.weight.id, folded.right.weight.id);
    for layer in [&folded.left, &folded.right] {
        assert_eq!(values(layer.weight.val()), weight);
    }
}

#[test]
fn a_forward_pass_that_cannot_be_recorded_gives_the_model_back() {
    let device = Device::flex();
    let layer = LinearConfig::new(2, 2).init(&device);
    let x = Tensor::<2>::ones([1, 2], &device);
    let rejected = fold_for(layer, x, |layer: &Linear, x| {
        let y = layer.forward(x);
        let _ = y.clone().into_data();
        y
    })
    .unwrap_err();
    assert_matches!(rejected.error(), QuantError::Graph(_));
    assert_eq!(rejected.into_value().weight.dims(), [2, 2]);
}

#[test]
fn a_folded_number_that_half_precision_cannot_hold_is_refused() {
    let device = Device::flex();
    let block = |bias| {
        let mut layer = LinearConfig::new(3, 2).with_bias(bias).init(&device);
        layer.weight = layer.weight.map(|weight| weight.zeros_like() + 0.5);
        let mut norm = norm(2, 1e-5, &device);
        norm.gamma = Param::from_data([4.0, 4.0], &device);
        norm.running_var = RunningState::new(Tensor::from_data([1.0, 1.0], &device));
        Block { layer, norm }
    };
    let refused = |block: Block<Linear>| {
        assert!(fold(block.clone(), &pair()).is_ok());
        let rejected = fold(cast(block, FloatDType::F16), &pair()).unwrap_err();
        rejected.into_error().to_string()
    };
    let mut wide = block(true);
    wide.layer.weight = wide.layer.weight.map(|weight| weight * 1e5);
    assert!(refused(wide).contains("`layer.weight`: the folded value"));
    for (bias, path) in [(true, "`layer.bias`"), (false, "`norm.beta`")] {
        let mut low = block(bias);
        low.norm.running_mean = RunningState::new(Tensor::from_data([0.0, 2e4], &device));
        assert_says!(refused(low), path, "the folded value");
    }
}
