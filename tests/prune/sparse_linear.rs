//! Sparse inference of a linear layer.

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::prune::{LayerKind, Layout, Masks, PruneError, SparseLinear};
use proptest::prelude::*;

use crate::support::cases::cases;
use crate::support::{each_device, numbers, tensor, values};

/// A layer of which every `keep`th weight is kept.
fn pruned(size: [usize; 2], keep: usize, bias: bool, device: &Device) -> Linear {
    let weights = numbers(1, size[0] * size[1]).into_iter().enumerate();
    let weights = weights.map(|(at, weight)| if at % keep == 0 { weight } else { 0.0 });
    let weights = TensorData::new(weights.collect::<Vec<f32>>(), size);
    let bias =
        bias.then(|| Param::from_data(TensorData::new(numbers(2, size[1]), [size[1]]), device));
    Linear {
        weight: Param::from_data(weights, device),
        bias,
    }
}

/// Asserts that both sum the same products, in any order.
///
/// A sum of k + 1 numbers in F32, each below 1 in magnitude here, is off by less than
/// (k + 1)² · 2⁻²⁴ whatever the order; both sides may be.
fn assert_same(sparse: Vec<f32>, dense: Vec<f32>, d_input: usize) {
    let tolerance = 2.0 * ((d_input + 1) * (d_input + 1)) as f32 * 2f32.powi(-24);
    assert_eq!(sparse.len(), dense.len());
    for (sparse, dense) in sparse.iter().zip(&dense) {
        let difference = (sparse - dense).abs();
        assert!(difference <= tolerance, "{sparse} instead of {dense}");
    }
}

#[test]
fn values_are_those_of_the_dense_layer_on_every_device() {
    each_device(|target| {
        // Every way to go through the rows, with a rest.
        for rows in [1, 3, 4, 9, 17, 70] {
            for bias in [false, true] {
                let linear = pruned([37, 23], 5, bias, &target.device);
                let sparse = SparseLinear::from_linear(&linear).unwrap();
                assert_eq!(sparse.nonzeros(), (37 * 23_usize).div_ceil(5));
                let x = tensor::<2>(3, [rows, 37], &target.device);
                let found = sparse.forward(x.clone()).unwrap();
                assert_eq!(found.device(), x.device());
                assert_same(values(found), values(linear.forward(x)), 37);
            }
        }
    });
}

#[test]
fn leading_axes_stay_and_masks_count() {
    let device = Device::flex();
    let linear = pruned([6, 4], 1, true, &device);
    let mut layout = Layout::new();
    layout.push("weight", [6, 4], LayerKind::Linear, 2.0);
    let linear = Masks::from_support(&layout, &[0, 9, 23])
        .unwrap()
        .attach(linear)
        .unwrap();
    let sparse = SparseLinear::from_linear(&linear).unwrap();
    assert_eq!(sparse.nonzeros(), 3);
    let x = tensor::<4>(3, [2, 3, 5, 6], &device);
    let found = sparse.forward(x.clone()).unwrap();
    assert_eq!(found.dims(), [2, 3, 5, 4]);
    assert_same(values(found), values(linear.forward(x)), 6);
}

#[test]
fn a_layer_without_weights_puts_out_its_bias() {
    let device = Device::flex();
    let mut linear = LinearConfig::new(3, 2).init(&device);
    linear.weight = Param::from_tensor(Tensor::zeros([3, 2], &device));
    let sparse = SparseLinear::from_linear(&linear).unwrap();
    let bias = values(linear.bias.as_ref().unwrap().val());
    let found = sparse.forward(tensor::<2>(3, [5, 3], &device)).unwrap();
    assert_eq!(values(found), bias.repeat(5));
}

#[test]
fn an_input_of_another_width_is_refused() {
    let device = Device::flex();
    let sparse = SparseLinear::from_linear(&pruned([6, 4], 2, true, &device)).unwrap();
    let error = sparse.forward(tensor::<2>(3, [2, 5], &device)).unwrap_err();
    let expected = PruneError::Mismatch {
        what: "features of the input",
        expected: 6,
        found: 5,
    };
    assert_eq!(error, expected);
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn any_size_and_sparsity_computes_the_same(
        inputs in 1usize..40,
        outputs in 1usize..40,
        rows in 1usize..40,
        keep in 1usize..60,
    ) {
        let device = Device::flex();
        let linear = pruned([inputs, outputs], keep, true, &device);
        let sparse = SparseLinear::from_linear(&linear).unwrap();
        let x = tensor::<2>(3, [rows, inputs], &device);
        let found = values(sparse.forward(x.clone()).unwrap());
        assert_same(found, values(linear.forward(x)), inputs);
    }
}
