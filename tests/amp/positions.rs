//! What half precision cannot count or address: sums over places that come often, positions in images.

use burn::module::{Initializer, Module};
use burn::nn::conv::{DeformConv2d, DeformConv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, IndexingUpdateOp, Int, Tensor};
use burn_lean::amp::audit::Finding;
use burn_lean::amp::{AutocastConfig, audit};
use burn_lean::graph::in_host_memory;

use crate::run::emulating;
use crate::support::{each_device, on_tracked, values};

const TIMES: usize = 4096;

/// Two layers that give what they take.
#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

impl Pair {
    fn new(device: &Device) -> Self {
        let one = || {
            let config = LinearConfig::new(1, 1).with_bias(false);
            config.with_initializer(Initializer::Ones).init(device)
        };
        Self {
            first: one(),
            second: one(),
        }
    }
}

#[test]
fn the_gradients_of_an_activation_that_is_read_often_are_summed_in_f32() {
    on_tracked(|device| {
        let model = Pair::new(&device);
        let indices = Tensor::<1, Int>::zeros([TIMES], &device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            for gathers in [false, true] {
                let x = Tensor::<2>::ones([1, 1], &device);
                let input = (x, indices.clone());
                let loss = emulating(dtype).run(&model, input, |model, (x, indices)| {
                    let nodes = model.first.forward(x);
                    let edges = match gathers {
                        true => nodes.gather(0, indices.unsqueeze_dim(1)),
                        false => nodes.select(0, indices),
                    };
                    model.second.forward(edges).sum()
                });
                let grads = loss.unwrap().backward();
                let gradient = model.first.weight.grad(&grads).unwrap();
                assert_eq!(values(gradient), [4096.0], "{dtype:?}");
            }
        }
    });
}

#[test]
fn what_comes_to_one_place_is_summed_in_f32() {
    each_device(|target| {
        let model = Pair::new(&target.device);
        let indices = Tensor::<1, Int>::zeros([TIMES], &target.device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            for scatters in [false, true] {
                let x = Tensor::<2>::ones([TIMES, 1], &target.device);
                let input = (x, indices.clone());
                let sums = emulating(dtype).run(&model, input, |model, (x, indices)| {
                    let edges = model.first.forward(x);
                    let nodes = edges.clone().slice([0..1]);
                    let nodes = match scatters {
                        true => {
                            let indices = indices.unsqueeze_dim(1);
                            nodes.scatter(0, indices, edges, IndexingUpdateOp::Add)
                        }
                        false => nodes.select_assign(0, indices, edges, IndexingUpdateOp::Add),
                    };
                    model.second.forward(nodes)
                });
                // 4,097, rounded to half for the second product.
                assert_eq!(values(sums.unwrap()), [4096.0], "{dtype:?}");
            }
        }
    });
}

#[test]
fn the_gradients_of_a_running_maximum_are_summed_in_f32() {
    on_tracked(|device| {
        let model = Pair::new(&device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            // The first one is the largest of all, so that all gradients go to it.
            let rest = Tensor::<2>::ones([TIMES - 1, 1], &device);
            let x = Tensor::cat(vec![Tensor::full([1, 1], 2.0, &device), rest], 0);
            let loss = emulating(dtype).run(&model, x, |model, x| {
                let largest = model.first.forward(x).cummax(0);
                model.second.forward(largest).sum()
            });
            let grads = loss.unwrap().backward();
            let gradient = model.first.weight.grad(&grads).unwrap();
            assert_eq!(values(gradient), [2.0 * TIMES as f32], "{dtype:?}");
        }
    });
}

#[test]
fn the_gradients_of_windows_that_overlap_are_summed_in_f32() {
    on_tracked(|device| {
        if !in_host_memory(&device) {
            // Burn's product there refuses operands whose places overlap.
            return;
        }
        let config = LinearConfig::new(5, 1).with_bias(false);
        let model: Linear = config.with_initializer(Initializer::Ones).init(&device);
        for (dtype, large) in [(FloatDType::F16, 2048f32), (FloatDType::BF16, 256.0)] {
            let factors = Tensor::<2>::from_floats([[large, 1.0, 1.0]], &device);
            let loss = emulating(dtype).run(&model, factors, |model, factors| {
                let windows = model.weight.val().reshape([5]).unfold::<2, _>(0, 3, 1);
                factors.matmul(windows).sum()
            });
            let grads = loss.unwrap().backward();
            let gradient = model.weight.grad(&grads).unwrap();
            // In all three windows: half precision does not count from the large one on.
            assert_eq!(values(gradient)[2], large + 2.0, "{dtype:?}");
        }
    });
}

/// Reads an image between its pixels.
fn between(device: &Device) -> DeformConv2d {
    let config = DeformConv2dConfig::new([1, 1], [1, 1]).with_bias(false);
    config.with_initializer(Initializer::Ones).init(device)
}

/// A wide image of zeros and ones in turn, and half a pixel to the right.
fn wide(device: &Device) -> (Tensor<4>, Tensor<4>) {
    let columns = Tensor::<1, Int>::arange(0..TIMES as i64, device);
    let image = columns.remainder_scalar(2).float();
    let shape = [1, 1, 1, TIMES];
    let right = Tensor::full(shape, 0.5, device);
    let offset = Tensor::cat(vec![Tensor::zeros(shape, device), right], 1);
    (image.reshape(shape), offset)
}

#[test]
fn a_deformable_convolution_finds_its_places_in_a_wide_image() {
    each_device(|target| {
        let layer = between(&target.device);
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let input = wide(&target.device);
            let y = emulating(dtype).run(&layer, input, |layer, (image, offset)| {
                layer.forward(image, offset, None)
            });
            // The last one lies half outside.
            assert_eq!(values(y.unwrap()), [0.5; TIMES], "{dtype:?}");
        }
    });
}

#[test]
fn the_audit_of_a_region_names_a_deformable_convolution() {
    let device = Device::flex();
    let config = AutocastConfig::new(FloatDType::F16);
    let (layer, autocast) = config.prepare(between(&device)).unwrap();
    let found = audit(
        &layer,
        &autocast,
        wide(&device),
        |layer, autocast, (image, offset)| {
            autocast.forward((image, offset), |(image, offset)| {
                layer.forward(image, offset, None)
            })
        },
    );
    let findings: Vec<Finding> = found
        .unwrap()
        .operations
        .iter()
        .flat_map(|operation| operation.findings.clone())
        .collect();
    assert_eq!(findings, [Finding::LosesPrecision]);
}
