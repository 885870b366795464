//! Physically smaller layers compute what the masked ones do.

use burn::module::{Module, Param, RunningState};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_lean::prune::{
    Groups, LayerKind, Layout, Masks, PruneError, SparsityPattern, shrink_conv, shrink_conv_linear,
    shrink_heads, shrink_linear,
};

use crate::support::{each_device, numbers, tensor, values, with_numbers};

/// Sums of a few dozen products of numbers around 1, in another order.
const ROUNDING: f32 = 1e-5;

fn assert_close(found: Vec<f32>, expected: Vec<f32>) {
    assert_eq!(found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() <= ROUNDING,
            "element {at}: {found} instead of {expected}"
        );
    }
}

/// The weight without some indices of an axis.
fn without<const D: usize>(weight: &Tensor<D>, axis: usize, pruned: &[usize]) -> Param<Tensor<D>> {
    let dims = weight.dims();
    let stride: usize = dims[axis + 1..].iter().product();
    let mut numbers = values(weight.clone());
    for (at, number) in numbers.iter_mut().enumerate() {
        if pruned.contains(&(at / stride % dims[axis])) {
            *number = 0.0;
        }
    }
    Param::from_data(TensorData::new(numbers, dims), &weight.device())
}

fn linear(seed: u64, size: [usize; 2], device: &Device) -> Linear {
    let linear = LinearConfig::new(size[0], size[1]).init(device);
    let bias = TensorData::new(numbers(seed + 99, size[1]), [size[1]]);
    Linear {
        bias: Some(Param::from_data(bias, device)),
        ..with_numbers(linear, seed)
    }
}

/// 8 hidden features: 1 and 6 are silent, 3 and 6 are unread.
fn linear_pair(device: &Device) -> (Linear, Linear) {
    let (mut first, mut second) = (linear(1, [5, 8], device), linear(2, [8, 3], device));
    first.weight = without(&first.weight.val(), 1, &[1, 6]);
    second.weight = without(&second.weight.val(), 0, &[3, 6]);
    (first, second)
}

#[test]
fn linear_layers_lose_silent_and_unread_features() {
    each_device(|target| {
        let x = tensor::<2>(5, [4, 5], &target.device);
        let (first, second) = linear_pair(&target.device);
        let expected = second.forward(gelu(first.forward(x.clone())));
        let (small, after) = shrink_linear(first, second, gelu).unwrap();
        assert_eq!(small.weight.dims(), [5, 5]);
        assert_eq!(small.bias.as_ref().unwrap().dims(), [5]);
        assert_eq!(after.weight.dims(), [5, 3]);
        let found = after.forward(gelu(small.forward(x)));
        assert_close(values(found), values(expected));
    });
}

#[test]
fn a_bias_appears_only_where_something_moves_into_it() {
    each_device(|target| {
        let (first, mut second) = linear_pair(&target.device);
        second.bias = None;
        let bare = Linear {
            bias: None,
            ..first.clone()
        };
        let x = tensor::<2>(5, [4, 5], &target.device);
        // Without biases a silent feature is zero: nothing moves, and what is left is exact.
        let expected = second.forward(relu(bare.forward(x.clone())));
        let (small, after) = shrink_linear(bare, second.clone(), relu).unwrap();
        assert!(after.bias.is_none());
        assert_eq!(after.weight.dims(), [5, 3]);
        assert_close(
            values(after.forward(relu(small.forward(x.clone())))),
            values(expected),
        );

        let expected = second.forward(first.forward(x.clone()));
        let (small, after) = shrink_linear(first, second, |x| x).unwrap();
        assert!(after.bias.is_some());
        assert_close(values(after.forward(small.forward(x))), values(expected));
    });
}

#[test]
fn masks_are_folded_in_and_training_goes_on() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let (first, second) = (linear(1, [5, 8], &device), linear(2, [8, 3], &device));
        let mut layout = Layout::new();
        layout.push("weight", [5, 8], LayerKind::Linear, 2.0);
        let pattern = SparsityPattern::Groups(Groups::Outputs);
        let columns = pattern.groups(&layout).unwrap();
        let support: Vec<usize> = columns[..6].concat();
        let first = Masks::from_support(&layout, &support)
            .unwrap()
            .attach(first)
            .unwrap();
        let ids = [first.weight.id, second.weight.id];
        let x = tensor::<2>(5, [4, 5], &device);
        let expected = second.forward(relu(first.forward(x.clone())));
        let (first, second) = shrink_linear(first, second, relu).unwrap();
        assert_eq!(first.weight.dims(), [5, 6]);
        assert!(!ids.contains(&first.weight.id) && !ids.contains(&second.weight.id));
        let y = second.forward(relu(first.forward(x)));
        assert_close(values(y.clone()), values(expected));
        let grads = y.square().sum().backward();
        for param in [&first.weight, &second.weight] {
            assert!(param.grad(&grads).is_some());
        }
        assert!(second.bias.unwrap().grad(&grads).is_some());
    });
}

#[test]
fn one_feature_stays_when_all_are_gone() {
    let device = Device::flex();
    let (mut first, second) = (linear(1, [5, 4], &device), linear(2, [4, 3], &device));
    first.weight = without(&first.weight.val(), 1, &[0, 1, 2, 3]);
    let x = tensor::<2>(5, [4, 5], &device);
    let expected = second.forward(relu(first.forward(x.clone())));
    let (first, second) = shrink_linear(first, second, relu).unwrap();
    assert_eq!(first.weight.dims(), [5, 1]);
    assert_close(
        values(second.forward(relu(first.forward(x)))),
        values(expected),
    );
}

#[test]
fn layers_that_do_not_fit_come_back() {
    let device = Device::flex();
    let (first, second) = (linear(1, [5, 8], &device), linear(2, [7, 3], &device));
    let rejected = shrink_linear(first, second, relu).unwrap_err();
    let expected = PruneError::CannotShrink {
        reason: "the first layer puts out 8, the second takes 7".into(),
    };
    assert_eq!(*rejected.error(), expected);
    assert_eq!(rejected.value().0.weight.dims(), [5, 8]);
}

fn conv(seed: u64, channels: [usize; 2], padding: PaddingConfig2d, device: &Device) -> Conv2d {
    let config = Conv2dConfig::new(channels, [3, 3]).with_padding(padding);
    with_numbers(config.init(device), seed)
}

fn norm(channels: usize, device: &Device) -> BatchNorm {
    let state = |seed, offset: f32| {
        let numbers: Vec<f32> = numbers(seed, channels)
            .iter()
            .map(|x| x * 0.5 + offset)
            .collect();
        Tensor::<1>::from_data(TensorData::new(numbers, [channels]), device)
    };
    BatchNorm {
        gamma: Param::from_tensor(state(11, 1.0)),
        beta: Param::from_tensor(state(12, 0.0)),
        running_mean: RunningState::new(state(13, 0.0)),
        running_var: RunningState::new(state(14, 1.0)),
        ..BatchNormConfig::new(channels).init(device)
    }
}

/// 6 channels: 0 and 4 are silent, 2 is unread.
fn conv_pair(padding: PaddingConfig2d, device: &Device) -> (Conv2d, BatchNorm, Conv2d) {
    let mut first = conv(1, [2, 6], PaddingConfig2d::Same, device);
    let mut second = conv(2, [6, 3], padding, device);
    first.weight = without(&first.weight.val(), 0, &[0, 4]);
    second.weight = without(&second.weight.val(), 1, &[2]);
    (first, norm(6, device), second)
}

#[test]
fn convolutions_lose_channels_with_their_batch_norm() {
    each_device(|target| {
        let x = tensor::<4>(5, [2, 2, 6, 6], &target.device);
        let (first, norm, second) = conv_pair(PaddingConfig2d::Valid, &target.device);
        let expected = second.forward(gelu(norm.forward(first.forward(x.clone()))));
        let ((first, norm), second) = shrink_conv((first, Some(norm)), second, gelu).unwrap();
        let norm = norm.unwrap();
        assert_eq!(first.weight.dims(), [3, 2, 3, 3]);
        assert_eq!(norm.running_var.value().dims(), [3]);
        assert_eq!(second.weight.dims(), [3, 3, 3, 3]);
        let found = second.forward(gelu(norm.forward(first.forward(x))));
        assert_close(values(found), values(expected));
    });
}

#[test]
fn constant_channels_stay_in_front_of_padding_unless_they_are_zero() {
    each_device(|target| {
        let x = tensor::<4>(5, [2, 2, 6, 6], &target.device);
        let padding = [PaddingConfig2d::Same, PaddingConfig2d::Explicit(0, 1, 0, 0)];
        for padding in padding {
            let (first, norm, second) = conv_pair(padding, &target.device);
            let expected = second.forward(gelu(norm.forward(first.forward(x.clone()))));
            let ((first, norm), second) = shrink_conv((first, Some(norm)), second, gelu).unwrap();
            assert_eq!(first.weight.dims()[0], 5, "only the unread channel goes");
            let found = second.forward(gelu(norm.unwrap().forward(first.forward(x.clone()))));
            assert_close(values(found), values(expected));
        }
        let (mut first, _, second) = conv_pair(PaddingConfig2d::Same, &target.device);
        first.bias = None;
        let expected = second.forward(relu(first.forward(x.clone())));
        let ((first, _), second) = shrink_conv((first, None), second, relu).unwrap();
        assert_eq!(first.weight.dims()[0], 3);
        assert_close(
            values(second.forward(relu(first.forward(x)))),
            values(expected),
        );
    });
}

#[test]
fn a_convolution_in_front_of_a_linear_layer_loses_channels() {
    each_device(|target| {
        let (first, norm, _) = conv_pair(PaddingConfig2d::Same, &target.device);
        let mut second = linear(3, [6 * 4 * 4, 3], &target.device);
        let unread: Vec<usize> = (2 * 16..3 * 16).collect();
        second.weight = without(&second.weight.val(), 0, &unread);
        let x = tensor::<4>(5, [2, 2, 4, 4], &target.device);
        let hidden = gelu(norm.forward(first.forward(x.clone())));
        let expected = second.forward::<2>(hidden.flatten(1, 3));
        let ((first, norm), second) =
            shrink_conv_linear((first, Some(norm)), second, gelu).unwrap();
        assert_eq!(second.weight.dims(), [3 * 16, 3]);
        let hidden = gelu(norm.unwrap().forward(first.forward(x)));
        assert_close(
            values(second.forward::<2>(hidden.flatten(1, 3))),
            values(expected),
        );
    });
}

#[test]
fn convolutions_that_cannot_shrink_come_back() {
    let device = Device::flex();
    let grouped = Conv2dConfig::new([6, 6], [3, 3])
        .with_groups(6)
        .init(&device);
    let plain = || conv(1, [6, 6], PaddingConfig2d::Valid, &device);
    let reasons = [
        shrink_conv((grouped.clone(), None), plain(), relu)
            .map(|_| ())
            .map_err(PruneError::from),
        shrink_conv((plain(), None), grouped, relu)
            .map(|_| ())
            .map_err(PruneError::from),
        shrink_conv((plain(), Some(norm(5, &device))), plain(), relu)
            .map(|_| ())
            .map_err(PruneError::from),
        shrink_conv_linear((plain(), None), linear(1, [25, 3], &device), relu)
            .map(|_| ())
            .map_err(PruneError::from),
    ];
    for (reason, part) in reasons
        .into_iter()
        .zip(["groups", "groups", "takes 5", "multiple"])
    {
        let message = reason.unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

/// 4 heads of 2 features: head 1 is silent, head 2 is unread.
fn attention(quiet: bool, device: &Device) -> MultiHeadAttention {
    let config = MultiHeadAttentionConfig::new(8, 4)
        .with_dropout(0.0)
        .with_quiet_softmax(quiet);
    let mut attention = with_numbers(config.init(device), 1);
    let bias = TensorData::new(numbers(7, 8), [8]);
    attention.value.bias = Some(Param::from_data(bias, device));
    attention.value.weight = without(&attention.value.weight.val(), 1, &[2, 3]);
    attention.output.weight = without(&attention.output.weight.val(), 0, &[4, 5]);
    attention
}

#[test]
fn attention_loses_heads() {
    each_device(|target| {
        let x = tensor::<3>(5, [2, 3, 8], &target.device);
        let key = tensor::<3>(6, [2, 4, 8], &target.device);
        let pad = Tensor::<2, Bool>::from_data(
            [[false, false, true, false], [false, false, false, true]],
            &target.device,
        );
        let causal =
            Tensor::<3>::from_data(TensorData::new(numbers(9, 24), [2, 3, 4]), &target.device)
                .greater_elem(0.8);
        for quiet in [false, true] {
            let dense = attention(quiet, &target.device);
            let input = MhaInput::new(x.clone(), key.clone(), key.clone())
                .mask_pad(pad.clone())
                .mask_attn(causal.clone());
            let expected = dense.forward(input).context;
            let pruned = shrink_heads(dense).unwrap();
            // The weights of a quiet head do not sum to one: a constant head is not constant.
            assert_eq!(pruned.n_heads, if quiet { 3 } else { 2 });
            let masks = (Some(pad.clone()), Some(causal.clone()));
            let found = pruned.forward(x.clone(), key.clone(), key.clone(), masks.0, masks.1);
            assert_close(values(found), values(expected));
        }
    });
}

#[test]
fn a_head_with_one_weight_left_stays() {
    let device = Device::flex();
    let mut dense = attention(false, &device);
    dense.output.weight = without(&dense.output.weight.val(), 0, &[0, 4, 5]);
    let x = tensor::<3>(5, [2, 3, 8], &device);
    let expected = dense.forward(MhaInput::self_attn(x.clone())).context;
    let pruned = shrink_heads(dense).unwrap();
    assert_eq!(pruned.n_heads, 2);
    assert_eq!(pruned.query.weight.dims(), [8, 4]);
    assert_close(
        values(pruned.forward(x.clone(), x.clone(), x, None, None)),
        values(expected),
    );
}

#[test]
fn attention_of_another_width_comes_back() {
    let device = Device::flex();
    let mut dense = attention(false, &device);
    dense.value = linear(1, [8, 6], &device);
    let rejected = shrink_heads(dense).unwrap_err();
    assert!(matches!(rejected.error(), PruneError::CannotShrink { .. }));
    assert_eq!(
        rejected.into_value().num_params(),
        4 * (8 * 8 + 8) - 2 * (8 + 1)
    );
}
