//! An attention with fewer heads computes what the masked one does.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_lean::prune::{PruneError, shrink::shrink_heads};

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
    dense.value = LinearConfig::new(8, 6).init(&device);
    let rejected = shrink_heads(dense).unwrap_err();
    assert!(matches!(rejected.error(), PruneError::CannotShrink { .. }));
    assert_eq!(
        rejected.into_value().num_params(),
        4 * (8 * 8 + 8) - 2 * (8 + 1)
    );
}
