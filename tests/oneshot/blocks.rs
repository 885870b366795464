//! A model with blocks: order, targets, what is left alone.

use burn::module::{Module, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::oneshot::{OneShot, OneShotError, Order, Preset, Target};

use crate::checkpoints::near;
use crate::support::{each_device, on_each, parameters, tensor, values, with_numbers};
use crate::{logit_error, parameter, small_llama, tokens};

#[test]
fn every_linear_layer_of_a_llama_in_order_and_nothing_else() {
    each_device(|target| {
        let model = small_llama(&target.device);
        let mut seen = Vec::new();
        let done = OneShot::new(Preset::w4a16().with_group(6))
            .with_progress(|block, number, of| seen.push((block.path.clone(), number, of)))
            .compress(model.clone(), tokens(&target.device), |model, x| {
                model.forward(x)
            })
            .unwrap();
        assert_eq!(seen, [("layers.0".into(), 1, 2), ("layers.1".into(), 2, 2)]);
        let paths = done.report.layers.iter().map(|one| one.path.as_str());
        let paths: Vec<&str> = paths.collect();
        let of = |block: usize| {
            [
                "attention.wq",
                "attention.wk",
                "attention.wv",
                "attention.wo",
                "feed_forward.w1",
                "feed_forward.w3",
                "feed_forward.w2",
            ]
            .map(|layer| format!("layers.{block}.{layer}.weight"))
        };
        assert_eq!(paths, [of(0), of(1)].concat());
        assert_eq!(done.report.rows, 8 * 16);
        for before in parameters(&model) {
            let after = parameter(&done.model, &before.path);
            assert_eq!(
                before != after,
                paths.contains(&before.path.as_str()),
                "{}",
                before.path
            );
        }
        // Each output has a code for each input, and the values are those of the codes.
        for weight in &done.weights {
            let grid = weight.grid.as_ref().unwrap();
            assert_eq!(
                grid.scales.len(),
                weight.outputs * weight.inputs.div_ceil(6)
            );
            assert_eq!(grid.values(weight.inputs), weight.values);
            assert!(grid.codes.iter().all(|code| *code < 16));
        }
    });
}

#[test]
fn what_comes_later_makes_good_for_what_came_before() {
    let device = Device::flex();
    let model = small_llama(&device);
    let error = |edit: fn(&mut Preset)| {
        let mut preset: Preset = "sparse-0.4".parse().unwrap();
        edit(&mut preset);
        let done = OneShot::new(preset)
            .compress(model.clone(), tokens(&device), |model, x| model.forward(x));
        logit_error(&model, &done.unwrap().model, &device)
    };
    let own = error(|preset| {
        preset.target = Target::OwnInputs;
        preset.order = Order::Block;
    });
    let original = error(|_| {});
    assert!(original < 0.9 * own, "{original} against {own}");
}

#[test]
fn from_files_it_is_the_same_model() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let compress = |oneshot: OneShot<'_>| {
        let done = oneshot.compress(small_llama(&device), tokens(&device), |model, x| {
            model.forward(x)
        });
        done.unwrap()
    };
    let one = compress(OneShot::new("sparse-2:4".parse().unwrap()));
    let other = compress(OneShot::new("sparse-2:4".parse().unwrap()).spilling_to(folder.path()));
    assert_eq!(parameters(&one.model), parameters(&other.model));
    assert_eq!(other.report.blocks[1].activation_bytes, 0);
    assert!(one.report.blocks[1].activation_bytes > 0);
}

#[test]
fn skipped_paths_and_named_blocks() {
    let device = Device::flex();
    let mut preset = Preset::w8a16();
    preset.skip = vec![
        "layers.0.attention".into(),
        "layers.1.feed_forward.w2.weight".into(),
    ];
    preset.blocks = Some(vec!["layers.1".into(), "layers.0.feed_forward".into()]);
    let done = OneShot::new(preset).compress(small_llama(&device), tokens(&device), |model, x| {
        model.forward(x)
    });
    let done = done.unwrap();
    let blocks = done.report.blocks.iter().map(|one| one.path.as_str());
    let blocks: Vec<&str> = blocks.collect();
    assert_eq!(blocks, ["layers.0.feed_forward", "layers.1"]);
    let paths = done.report.layers.iter().map(|one| one.path.as_str());
    let paths: Vec<&str> = paths.collect();
    assert_eq!(paths.len(), 3 + 6);
    assert!(!paths.contains(&"layers.1.feed_forward.w2.weight"));
}

#[test]
fn a_group_of_parameters_stands_for_the_blocks_in_which_it_has_a_weight() {
    let device = Device::flex();
    let skipping = |skip: Vec<String>, group: ParamGroup| {
        let preset = Preset::w8a16().with_skip(skip);
        let oneshot = OneShot::new(preset).with_blocks_of(group);
        let done = oneshot.compress(small_llama(&device), tokens(&device), |model, x| {
            model.forward(x)
        });
        done.map(|done| done.report)
    };
    let compress = |group: ParamGroup| skipping(Vec::new(), group);
    let report = compress(ParamGroup::from_predicate("layers.1.attention")).unwrap();
    assert_eq!(report.blocks.len(), 1);
    assert_eq!(report.blocks[0].path, "layers.1");
    assert_eq!(report.layers.len(), 7);
    // All there is, the table of the tied head among it.
    let all = compress(ParamGroup::from_regex(".*").unwrap()).unwrap();
    assert_eq!(all.layers.len(), 2 * 7);
    // A block with weights of the group that all stay as they are.
    let report = skipping(vec!["layers.0".into()], ParamGroup::all()).unwrap();
    assert_eq!(report.blocks.len(), 1);
    assert_eq!(report.blocks[0].path, "layers.1");
    let none = compress(ParamGroup::from_path("layers.2")).unwrap_err();
    assert_eq!(none.into_error(), OneShotError::NothingToCompress);
}

#[test]
fn burn_s_own_transformer_without_an_edit() {
    on_each(|device| {
        let model: TransformerEncoder = TransformerEncoderConfig::new(8, 16, 2, 2)
            .with_dropout(0.0)
            .init(device);
        let model = with_numbers(model, 9);
        let x = tensor::<3>(2, [6, 5, 8], device);
        let forward =
            |model: &TransformerEncoder, x| model.forward(TransformerEncoderInput::new(x));
        let done = OneShot::new(Preset::w8a16()).compress(model.clone(), [x.clone()], forward);
        let done = done.unwrap();
        assert_eq!(done.report.layers.len(), 2 * 6);
        assert_eq!(done.report.blocks.len(), 2);
        let (before, after) = (
            values(forward(&model, x.clone())),
            values(forward(&done.model, x)),
        );
        assert_near!(before.iter(), after, 0.1);
    });
}

#[test]
fn a_convolution_with_groups_keeps_two_of_four_taps() {
    let device = Device::flex();
    let conv: Conv2d = Conv2dConfig::new([4, 6], [2, 2])
        .with_groups(2)
        .with_bias(false)
        .init(&device);
    let conv = with_numbers(conv, 3);
    // Neighbours have something in common.
    let x = tensor::<4>(5, [3, 4, 6, 6], &device) + 1.0;
    let done = OneShot::new("sparse-2:4".parse().unwrap()).compress(
        conv.clone(),
        [x.clone()],
        |conv, x: Tensor<4>| conv.forward(x),
    );
    let done = done.unwrap();
    for kernel in values(done.model.weight.val()).chunks_exact(4) {
        assert_eq!(kernel.iter().filter(|w| **w != 0.0).count(), 2);
    }
    // What is kept makes good for what went: better than the same zeros with the values as they were.
    let masked = conv.weight.val() * done.model.weight.val().bool().float();
    let mut plain = conv.clone();
    plain.weight = plain.weight.map(|_| masked);
    let error = |other: &Conv2d| {
        let off = other.forward(x.clone()) - conv.forward(x.clone());
        values(off).iter().map(|e| e * e).sum::<f32>()
    };
    assert!(error(&done.model) < 0.9 * error(&plain));
}

/// Convolutions of one image, each with a kernel of its own.
#[derive(Module, Debug)]
struct Pyramid {
    kernels: Vec<Conv2d>,
}

#[test]
fn convolutions_of_one_image_each_see_their_own_patches() {
    let device = Device::flex();
    let conv = |size: usize, dilation: usize| {
        let around = dilation * (size - 1) / 2;
        Conv2dConfig::new([4, 4], [size, size])
            .with_dilation([dilation, dilation])
            .with_padding(PaddingConfig2d::Explicit(around, around, around, around))
            .with_bias(false)
            .init(&device)
    };
    let kernels = vec![conv(3, 1), conv(3, 2), conv(1, 1)];
    let model = with_numbers(Pyramid { kernels }, 3);
    let x = tensor::<4>(5, [3, 4, 6, 6], &device) + 1.0;
    let together = OneShot::new("sparse-2:4".parse().unwrap())
        .compress(model.clone(), [x.clone()], |model, x: Tensor<4>| {
            let kernels = model.kernels.iter();
            let outputs = kernels.map(|kernel| kernel.forward(x.clone()));
            outputs.reduce(|sum, output| sum + output).unwrap()
        })
        .unwrap();
    assert_eq!(together.weights.len(), 3);
    for (kernel, together) in model.kernels.iter().zip(&together.weights) {
        let alone = OneShot::new("sparse-2:4".parse().unwrap())
            .compress(kernel.clone(), [x.clone()], |kernel, x: Tensor<4>| {
                kernel.forward(x)
            })
            .unwrap();
        near(&alone.weights[0].values, &together.values);
    }
}

/// Each image has more places than are unfolded at a time.
#[test]
fn large_images_of_one_batch_are_summed_up_as_each_in_its_own() {
    let device = Device::flex();
    let conv = |inputs: usize, outputs: usize| {
        Conv2dConfig::new([inputs, outputs], [3, 3])
            .with_bias(false)
            .init(&device)
    };
    let kernels = vec![conv(2, 3), conv(3, 4)];
    let model = with_numbers(Pyramid { kernels }, 7);
    let x = tensor::<4>(5, [3, 2, 68, 68], &device) + 1.0;
    let weights = |batches: Vec<Tensor<4>>| {
        let done = OneShot::new(Preset::sparse(0.5)).compress(
            model.clone(),
            batches,
            |model, x: Tensor<4>| {
                let kernels = model.kernels.iter();
                kernels.fold(x, |x, kernel| relu(kernel.forward(x)))
            },
        );
        done.unwrap().weights
    };
    let whole = weights(vec![x.clone()]);
    let images = (0..3).map(|at| x.clone().slice([at..at + 1]));
    let images = weights(images.collect());
    assert_eq!(whole.len(), 2);
    for (whole, images) in whole.iter().zip(&images) {
        near(&whole.values, &images.values);
    }
}

/// Two layers of which the outputs are added up.
#[derive(Module, Debug)]
struct Sum {
    first: Linear,
    second: Linear,
}

/// For each layer its weight as it is solved alone, and beside the other one.
fn alone_and_together(preset: &Preset) -> Vec<[Vec<f32>; 2]> {
    let device = Device::flex();
    let linear = || LinearConfig::new(8, 6).init(&device);
    let sum = Sum {
        first: linear(),
        second: linear(),
    };
    let sum = with_numbers(sum, 4);
    let x = tensor::<2>(1, [40, 8], &device);
    let together = OneShot::new(preset.clone())
        .compress(sum.clone(), [x.clone()], |sum, x: Tensor<2>| {
            sum.first.forward(x.clone()) + sum.second.forward(x)
        })
        .unwrap();
    let layers = [&sum.first, &sum.second].into_iter().zip(together.weights);
    let both = layers.map(|(layer, together)| {
        let alone = OneShot::new(preset.clone())
            .compress(layer.clone(), [x.clone()], |layer, x| layer.forward(x))
            .unwrap();
        [alone.weights[0].values.clone(), together.values]
    });
    both.collect()
}

#[test]
fn layers_that_read_the_same_and_are_added_up_are_solved_as_each_alone() {
    let layers = alone_and_together(&Preset::sparse(0.5));
    assert_eq!(layers.len(), 2);
    for [alone, together] in layers {
        near(&alone, &together);
    }
}

#[test]
fn layers_that_read_the_same_are_rounded_as_each_alone() {
    let layers = alone_and_together(&Preset::w4a16().with_group(4).with_target(Target::OwnInputs));
    assert_eq!(layers.len(), 2);
    for [alone, together] in layers {
        assert_eq!(alone, together);
    }
}

/// To the nearest 8-bit number: a single row of calibration data is enough, and none is looked at.
#[test]
fn w8a16_rounds_to_nearest_and_asks_for_no_data() {
    let device = Device::flex();
    let model = with_numbers(LinearConfig::new(16, 8).init(&device), 3);
    let x = tensor::<2>(2, [1, 16], &device);
    let done =
        OneShot::new(Preset::w8a16()).compress(model.clone(), [x], |model, x| model.forward(x));
    let (before, after) = (
        values(model.weight.val()),
        values(done.unwrap().model.weight.val()),
    );
    for output in 0..8 {
        let column =
            |values: &[f32]| -> Vec<f32> { (0..16).map(|row| values[8 * row + output]).collect() };
        let (before, after) = (column(&before), column(&after));
        let scale = before.iter().fold(0f32, |most, w| most.max(w.abs())) / 127.0;
        for (before, after) in before.iter().zip(&after) {
            let nearest = (before / scale).round_ties_even() * scale;
            assert!(
                (after - nearest).abs() <= 1e-6 * scale * 127.0,
                "{after} for {nearest}"
            );
        }
    }
}
