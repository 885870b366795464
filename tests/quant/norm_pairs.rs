//! Which batch normalizations a forward pass shows behind which layers, and which can be folded.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{audit, fold::NotFoldable, fold_for};

use crate::support::{tensor, values, with_numbers};

#[test]
fn a_norm_is_not_folded_into_a_layer_that_is_used_without_it() {
    #[derive(Module, Debug)]
    struct Shared {
        linear: Linear,
        norm: BatchNorm,
    }
    let device = Device::flex();
    let model = Shared {
        linear: LinearConfig::new(4, 4).init(&device),
        norm: BatchNormConfig::new(4).init(&device),
    };
    let reason = |forward: fn(&Shared, Tensor<2>) -> Tensor<2>| {
        let x = Tensor::ones([8, 4], &device);
        audit(&model, x, forward).unwrap().norm_pairs[0].not_foldable
    };
    assert_eq!(
        reason(|model, x| model.norm.forward(model.linear.forward(x))),
        None
    );
    assert_eq!(
        reason(|model, x| {
            let y = model.linear.forward(x);
            y.clone() + model.norm.forward(y)
        }),
        Some(NotFoldable::OutputShared)
    );
    assert_eq!(
        reason(|model, x| {
            let y = model.norm.forward(model.linear.forward(x));
            model.linear.forward(y)
        }),
        Some(NotFoldable::LayerShared)
    );
    assert_eq!(
        reason(|model, x| {
            let y = model.norm.forward(model.linear.forward(x));
            model.norm.forward(relu(y))
        }),
        Some(NotFoldable::NormShared)
    );
    // Twice the whole pair is the pair.
    assert_eq!(
        reason(|model, x| {
            let y = model.norm.forward(model.linear.forward(x));
            model.norm.forward(model.linear.forward(y))
        }),
        None
    );
}

#[derive(Module, Debug)]
struct Layers {
    conv: Conv2d,
    linear: Linear,
    norm: BatchNorm,
}

impl Layers {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([4, 4], [1, 1]).init(device),
            linear: LinearConfig::new(4, 4).init(device),
            norm: BatchNormConfig::new(4).init(device),
        }
    }

    fn bias(&self) -> Tensor<2> {
        self.linear.bias.as_ref().unwrap().val().unsqueeze()
    }
}

#[test]
fn a_norm_over_another_axis_than_the_layers_outputs_is_not_folded() {
    let device = Device::flex();
    // All axes have the same length: sizes say nothing.
    let model = Layers::new(&device);
    type Forward = fn(&Layers, Tensor<4>) -> Tensor<4>;
    let pairs = |forward: Forward| {
        let x = Tensor::ones([4, 4, 4, 4], &device);
        let pairs = audit(&model, x, forward).unwrap().norm_pairs;
        let reasons = pairs.into_iter().map(|pair| pair.not_foldable);
        reasons.collect::<Vec<_>>()
    };
    let other_axis = [Some(NotFoldable::OtherAxis)];
    assert_eq!(
        pairs(|model, x| model.norm.forward(model.conv.forward(x))),
        [None]
    );
    assert_eq!(
        pairs(|model, x| model.norm.forward(model.conv.forward(x).swap_dims(1, 2))),
        other_axis
    );
    assert_eq!(
        pairs(|model, x| model
            .norm
            .forward(model.conv.forward(x).swap_dims(1, 2).permute([0, 2, 1, 3]))),
        [None]
    );
    assert_eq!(
        pairs(|model, x| model.norm.forward(model.linear.forward(x))),
        other_axis
    );
    assert_eq!(
        pairs(|model, x| model
            .norm
            .forward(model.linear.forward(x).permute([0, 3, 1, 2]))),
        [None]
    );
    let merged: Forward = |model, x| {
        let rows = model.linear.forward(x).reshape([64, 4]);
        model.norm.forward(rows).reshape([4, 4, 4, 4])
    };
    assert_eq!(pairs(merged), [None]);
    let columns: Forward = |model, x| {
        let rows = model.linear.forward(x).reshape([4, 16, 4]);
        let y = model.norm.forward(rows.swap_dims(1, 2));
        y.reshape([4, 4, 4, 4])
    };
    assert_eq!(pairs(columns), [None]);
    let halves: Forward = |model, x| {
        let parts = model.conv.forward(x).reshape([4, 2, 2, 4, 4]);
        let parts: Tensor<4> = parts.swap_dims(1, 2).reshape([4, 4, 4, 4]);
        model.norm.forward(parts)
    };
    assert_eq!(pairs(halves), other_axis);
    assert_eq!(
        pairs(|model, x| model.norm.forward(model.conv.forward(x).flip([1]))),
        []
    );
}

#[test]
fn a_parameter_that_is_added_to_a_layers_output_is_not_its_bias() {
    #[derive(Module, Debug)]
    struct Shifted {
        linear: Linear,
        shift: Param<Tensor<1>>,
        norm: BatchNorm,
    }
    let device = Device::flex();
    let model = Shifted {
        linear: LinearConfig::new(4, 4).with_bias(false).init(&device),
        shift: Param::from_tensor(Tensor::ones([4], &device)),
        norm: BatchNormConfig::new(4).init(&device),
    };
    let audit = audit(&model, Tensor::<2>::ones([8, 4], &device), |model, x| {
        let y = model.linear.forward(x);
        model.norm.forward(y + model.shift.val().unsqueeze())
    });
    assert_eq!(audit.unwrap().norm_pairs, []);
}

#[test]
fn a_norm_is_not_folded_into_a_weight_or_a_bias_that_the_forward_pass_computes() {
    let device = Device::flex();
    let model = Layers::new(&device);
    let reason = |forward: fn(&Layers, Tensor<2>) -> Tensor<2>| {
        let x = Tensor::ones([8, 4], &device);
        audit(&model, x, forward).unwrap().norm_pairs[0].not_foldable
    };
    // By hand what the layer does.
    assert_eq!(
        reason(|model, x| {
            let y = x.matmul(model.linear.weight.val()) + model.bias();
            model.norm.forward(y)
        }),
        None
    );
    let standardized = reason(|model, x| {
        let weight = model.conv.weight.val();
        let weight = weight.clone() / weight.abs().mean_dim(1);
        let bias = model.conv.bias.as_ref().map(|bias| bias.val());
        let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        let y = conv2d(x.reshape([8, 4, 1, 1]), weight, bias, options);
        model.norm.forward(y).reshape([8, 4])
    });
    assert_eq!(standardized, Some(NotFoldable::WeightComputed));
    let adapted = reason(|model, x| {
        let weight = model.linear.weight.val();
        let low_rank = weight
            .clone()
            .slice([0..4, 0..1])
            .matmul(weight.clone().slice([0..1]));
        model
            .norm
            .forward(x.matmul(weight + low_rank) + model.bias())
    });
    assert_eq!(adapted, Some(NotFoldable::WeightComputed));
    let transposed = reason(|model, x| {
        let y = x.matmul(model.linear.weight.val().transpose()) + model.bias();
        model.norm.forward(y)
    });
    assert_eq!(transposed, Some(NotFoldable::WeightComputed));
    let scaled = reason(|model, x| {
        let y = x.matmul(model.linear.weight.val()) + model.bias() * 0.5;
        model.norm.forward(y)
    });
    assert_eq!(scaled, Some(NotFoldable::BiasComputed));
    let left_out = reason(|model, x| model.norm.forward(x.matmul(model.linear.weight.val())));
    assert_eq!(left_out, Some(NotFoldable::BiasComputed));
}

/// A matrix of one's own, before a norm of its own.
#[derive(Module, Debug)]
struct Own {
    matrix: Param<Tensor<2>>,
    own_norm: BatchNorm,
    linear: Linear,
    norm: BatchNorm,
}

#[test]
fn a_layer_of_ones_own_before_a_norm_does_not_keep_the_others_from_being_folded() {
    let device = Device::flex();
    let model = Own {
        matrix: Param::from_tensor(Tensor::ones([4, 4], &device)),
        own_norm: BatchNormConfig::new(4).init(&device),
        linear: LinearConfig::new(4, 3).init(&device),
        norm: BatchNormConfig::new(3).init(&device),
    };
    let model = with_numbers(model, 3);
    let forward = |model: &Own, x: Tensor<2>| {
        let x = model.own_norm.forward(x.matmul(model.matrix.val()));
        model.norm.forward(model.linear.forward(x))
    };
    let x = tensor::<2>(5, [6, 4], &device);
    let pairs = audit(&model, x.clone(), forward).unwrap().norm_pairs;
    let reasons: Vec<_> = pairs.iter().map(|pair| pair.not_foldable).collect();
    assert_eq!(reasons, [Some(NotFoldable::OtherLayer), None]);
    let expected = values(forward(&model, x.clone()));
    let folded = fold_for(model.clone(), x.clone(), forward).unwrap();
    assert_ne!(
        values(folded.linear.weight.val()),
        values(model.linear.weight.val())
    );
    let found = values(forward(&folded, x));
    assert_near!(found.iter(), expected, 1e-4);
}
