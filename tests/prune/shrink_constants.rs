//! Units that give the same numbers whatever comes in: what reads them makes up for them in its bias.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::{gelu, relu, sigmoid};
use burn::tensor::{Bool, Device, Tensor};
use burn_lean::prune::Shrink;

use crate::shrink_whole::without;
use crate::support::{tensor, with_numbers};

#[test]
fn constants_move_into_the_bias_of_the_reader_unless_it_pads() {
    let device = Device::flex();
    let linear = |seed, size: [usize; 2]| {
        let linear = LinearConfig::new(size[0], size[1]).init(&device);
        let bias = tensor::<1>(seed, [size[1]], &device);
        Linear {
            bias: Some(Param::from_tensor(bias)),
            ..with_numbers(linear, seed)
        }
    };
    let mut model = vec![linear(1, [5, 8]), linear(2, [8, 3])];
    model[0].weight = without(model[0].weight.clone(), 1, &[1, 6]);
    model[1].weight = without(model[1].weight.clone(), 0, &[3, 6]);
    let forward = |model: &Vec<Linear>, x: Tensor<2>| model[1].forward(gelu(model[0].forward(x)));
    let x = tensor(3, [7, 5], &device);
    let expected = forward(&model, x.clone());
    let shrunk = Shrink::dead().shrink(model, forward, x.clone()).unwrap();
    // Features 1 and 6 are constant, 3 and 6 are not read.
    assert_eq!(shrunk.model[0].weight.dims(), [5, 5]);
    let off = (forward(&shrunk.model, x) - expected)
        .abs()
        .max()
        .into_scalar::<f32>();
    assert!(off < 1e-5, "{off}");

    for (padding, left) in [(PaddingConfig2d::Valid, 3), (PaddingConfig2d::Same, 4)] {
        let conv = |seed, channels, padding| {
            let conv = Conv2dConfig::new(channels, [3, 3])
                .with_padding(padding)
                .init(&device);
            let bias = tensor::<1>(seed, [channels[1]], &device);
            Conv2d {
                bias: Some(Param::from_tensor(bias)),
                ..with_numbers(conv, seed)
            }
        };
        let mut model = vec![
            conv(4, [2, 4], PaddingConfig2d::Same),
            conv(5, [4, 2], padding),
        ];
        model[0].weight = without(model[0].weight.clone(), 0, &[2]);
        let forward =
            |model: &Vec<Conv2d>, x: Tensor<4>| model[1].forward(gelu(model[0].forward(x)));
        let x = tensor(6, [2, 2, 6, 6], &device);
        let expected = forward(&model, x.clone());
        let shrunk = Shrink::dead().shrink(model, forward, x.clone()).unwrap();
        assert_eq!(shrunk.model[0].weight.dims()[0], left);
        let off = (forward(&shrunk.model, x) - expected)
            .abs()
            .max()
            .into_scalar::<f32>();
        assert!(off < 1e-5, "{off}");
    }
}

#[test]
fn a_unit_under_a_gate_is_no_constant_of_one_example() {
    #[derive(Module, Debug)]
    struct Gated {
        up: Linear,
        gate: Linear,
        down: Linear,
    }
    let device = Device::flex();
    let model = Gated {
        up: LinearConfig::new(3, 4).init(&device),
        gate: LinearConfig::new(3, 1).init(&device),
        down: LinearConfig::new(4, 2).init(&device),
    };
    let mut model = with_numbers(model, 3);
    model.up.weight = without(model.up.weight, 1, &[1]);
    model.up.bias = Some(Param::from_data([0.5_f32; 4], &device));
    let forward = |model: &Gated, x: Tensor<2>| {
        let gate = sigmoid(model.gate.forward(x.clone()));
        model.down.forward(relu(model.up.forward(x)) * gate)
    };
    let one = tensor(4, [1, 3], &device);
    let shrunk = Shrink::dead().shrink(model, forward, one).unwrap();
    assert_eq!(shrunk.report.removed(), 0);
}

#[test]
fn a_unit_under_a_mask_or_in_a_sum_is_no_constant_of_one_batch() {
    #[derive(Module, Debug)]
    struct Pooled {
        up: Linear,
        down: Linear,
    }
    let device = Device::flex();
    let model = Pooled {
        up: LinearConfig::new(3, 4).init(&device),
        down: LinearConfig::new(4, 2).init(&device),
    };
    let mut model = with_numbers(model, 3);
    model.up.weight = without(model.up.weight, 1, &[1]);
    model.up.bias = Some(Param::from_data([0.5_f32; 4], &device));

    // Nothing is padding in the batch that is looked at.
    let masked = |model: &Pooled, (x, padding): (Tensor<3>, Tensor<2, Bool>)| {
        let hidden = relu(model.up.forward(x));
        let padding = padding.unsqueeze_dim::<3>(2).expand(hidden.dims());
        model.down.forward(hidden.mask_fill(padding, 0.0))
    };
    let x = tensor(4, [2, 5, 3], &device);
    let none = Tensor::<2, Bool>::from_data([[false; 5]; 2], &device);
    let some = Tensor::<2, Bool>::from_data([[false, true, false, true, true]; 2], &device);
    let expected = masked(&model, (x.clone(), some.clone()));
    let shrunk = Shrink::dead().shrink(model.clone(), masked, (x.clone(), none));
    let off = (masked(&shrunk.unwrap().model, (x.clone(), some)) - expected).abs();
    assert!(off.max().into_scalar::<f32>() < 1e-5);

    // A sum over sequences of another length.
    let summed = |model: &Pooled, x: Tensor<3>| {
        let hidden = relu(model.up.forward(x));
        model.down.forward(hidden.sum_dim(1))
    };
    let longer = tensor(5, [2, 9, 3], &device);
    let expected = summed(&model, longer.clone());
    let shrunk = Shrink::dead().shrink(model, summed, x).unwrap();
    let off = (summed(&shrunk.model, longer) - expected).abs();
    assert!(off.max().into_scalar::<f32>() < 1e-5);
}
