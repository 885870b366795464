//! The rows that arrive at products while batches are walked through.

use crate::support::{each_device, on_each, tensor, values, with_numbers};
use crate::walk::{all_rows, near};
use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout, PaddingConfig1d,
    PaddingConfig2d, PaddingConfig3d,
};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_lean::graph::{AsRecorded, Pass, Product, Walk, record};

/// One layer of each kind that has rows.
#[derive(Module, Debug)]
struct Layers {
    usual: Linear,
    stored_transposed: Linear,
    table: Embedding,
}

#[test]
fn rows_times_weight_is_what_a_linear_layer_computes() {
    on_each(|device| {
        let model = Layers {
            usual: LinearConfig::new(3, 5).with_bias(false).init(device),
            stored_transposed: LinearConfig::new(5, 4)
                .with_bias(false)
                .with_layout(LinearLayout::Col)
                .init(device),
            table: EmbeddingConfig::new(6, 4).init(device),
        };
        let model = with_numbers(model, 3);
        // On the left, too: a tied head as users write it.
        let forward = |model: &Layers, x: Tensor<3>| {
            let x = model.stored_transposed.forward(model.usual.forward(x));
            let head = model.table.weight.val().unsqueeze::<3>();
            let y = x.clone().matmul(head.clone().transpose());
            (y, head.matmul(x.transpose()))
        };
        let batches = [1, 2].map(|seed| tensor::<3>(seed, [2, 7, 3], device));
        let mut walk = Walk::record(&model, batches, forward).unwrap();
        assert!(walk.products().iter().all(|one| walk.row_count(one) == 28));
        let mut seen = Vec::new();
        while let Some(mut step) = walk.next_product().unwrap() {
            let product = step.product().unwrap();
            let x = all_rows(&mut step, &product, 0, 5);
            assert_eq!(x.dims(), [28, product.inputs]);
            let weight = step.weight(&product, Pass::Replaced).unwrap();
            let y = x.matmul(weight.transpose());
            let (folded, left) = (seen.len() < 2, seen.len() == 3);
            let mut own = |batch: usize| -> Tensor<2> {
                // The rows of a linear layer are folded.
                if folded {
                    return step.result::<2>(batch, 0, Pass::Replaced).unwrap();
                }
                let y = step.result::<3>(batch, 0, Pass::Replaced).unwrap();
                let y = if left { y.transpose() } else { y };
                y.reshape([14, product.outputs])
            };
            let own = vec![own(0), own(1)];
            near(
                &values(Tensor::cat(own, 0)),
                &values(y),
                &product.parameter.path,
            );
            seen.push(product.parameter.path);
        }
        assert_eq!(
            seen,
            [
                "usual.weight",
                "stored_transposed.weight",
                "table.weight",
                "table.weight"
            ]
        );
    });
}

#[test]
fn an_embedding_counts_its_indices() {
    on_each(|device| {
        let table: Embedding = EmbeddingConfig::new(6, 4).init(device);
        let indices = Tensor::<2, Int>::from_data([[1, 3, 3], [5, 1, 1]], device);
        let mut walk = Walk::record(&table, [indices], |table, x| table.forward(x)).unwrap();
        assert_eq!(walk.row_count(&walk.products()[0]), 6);
        let mut step = walk.next_product().unwrap().unwrap();
        let product = step.product().unwrap();
        assert!(product.is_embedding());
        let x = all_rows(&mut step, &product, 0, 4);
        assert_eq!(values(x.clone().sum_dim(0)), [0.0, 3.0, 0.0, 2.0, 0.0, 1.0]);
        let y = x.matmul(step.weight(&product, Pass::Replaced).unwrap().transpose());
        let own = step.result::<3>(0, 0, Pass::Replaced).unwrap();
        near(&values(own), &values(y), "the table");
    });
}

/// Every third row from the second on of each batch, without the others.
fn sampled_are_the_same(
    step: &mut burn_lean::graph::Step<'_, Tensor<3>>,
    product: &Product,
    group: usize,
    all: &[f32],
) {
    let mut all: Vec<&[f32]> = all.chunks_exact(product.inputs).collect();
    for batch in 0..step.batches() {
        let count = step.row_count(product, batch, Pass::Replaced).unwrap();
        let own: Vec<&[f32]> = all.drain(..count).collect();
        let sampled = step.sampled_rows(product, batch, Pass::Replaced, group, 1, 3);
        let expected: Vec<&[f32]> = own.into_iter().skip(1).step_by(3).collect();
        assert_eq!(sampled.unwrap(), expected.concat());
    }
    assert!(all.is_empty());
}

/// `X Wᵀ` of each group, as the convolution returns it: `[examples, outputs, positions]`.
fn by_rows(
    step: &mut burn_lean::graph::Step<'_, Tensor<3>>,
    product: &Product,
    chunk: usize,
    examples: usize,
) -> Tensor<3> {
    let weight = step.weight(product, Pass::Replaced).unwrap();
    let per_group = product.outputs_per_group();
    let groups = (0..product.groups).map(|group| {
        let x = all_rows(step, product, group, chunk);
        sampled_are_the_same(step, product, group, &values(x.clone()));
        let own = weight
            .clone()
            .slice([group * per_group..(group + 1) * per_group]);
        let positions = x.dims()[0] / examples;
        x.matmul(own.transpose())
            .reshape([examples, positions, per_group])
            .swap_dims(1, 2)
    });
    Tensor::cat(groups.collect(), 1)
}

fn convolution_by_rows<M: Module>(
    model: &M,
    x: [Tensor<5>; 2],
    forward: impl Fn(&M, Tensor<5>) -> Tensor<3>,
    groups: usize,
) {
    let own: Vec<Tensor<3>> = x.iter().map(|x| forward(model, x.clone())).collect();
    let examples: usize = x.iter().map(|x| x.dims()[0]).sum();
    for chunk in [1, 7, 10_000] {
        let mut walk = Walk::record(model, x.clone(), &forward).unwrap();
        let rows = walk.row_count(&walk.products()[0]);
        let mut step = walk.next_product().unwrap().unwrap();
        let product = step.product().unwrap();
        assert!(product.is_convolution());
        assert_eq!(product.groups, groups);
        let y = by_rows(&mut step, &product, chunk, examples);
        assert_eq!(rows, examples * y.dims()[2]);
        near(
            &values(Tensor::cat(own.clone(), 0)),
            &values(y),
            "patches times kernel",
        );
    }
}

#[test]
fn patches_times_kernel_is_what_a_convolution_computes() {
    on_each(|device| {
        let shape =
            |d: [usize; 3]| [2, 1].map(|n| tensor(n as u64, [n, 4, d[0], d[1], d[2]], device));
        let one: Conv1d = Conv1dConfig::new(4, 6, 3)
            .with_stride(2)
            .with_dilation(2)
            .with_groups(2)
            .with_padding(PaddingConfig1d::Explicit(1, 2))
            .with_bias(false)
            .init(device);
        convolution_by_rows(
            &with_numbers(one, 1),
            shape([1, 1, 11]),
            |conv, x| {
                let [n, c, _, _, length] = x.dims();
                conv.forward(x.reshape([n, c, length]))
            },
            2,
        );
        let two: Conv2d = Conv2dConfig::new([4, 8], [3, 2])
            .with_stride([2, 1])
            .with_dilation([1, 2])
            .with_groups(4)
            .with_padding(PaddingConfig2d::Explicit(1, 0, 1, 0))
            .with_bias(false)
            .init(device);
        convolution_by_rows(
            &with_numbers(two, 2),
            shape([1, 7, 8]),
            |conv, x| {
                let [n, c, _, height, width] = x.dims();
                conv.forward(x.reshape([n, c, height, width])).flatten(2, 3)
            },
            4,
        );
        let three: Conv3d = Conv3dConfig::new([4, 3], [2, 3, 2])
            .with_stride([1, 2, 1])
            .with_padding(PaddingConfig3d::Explicit(1, 1, 0))
            .with_bias(false)
            .init(device);
        convolution_by_rows(
            &with_numbers(three, 3),
            shape([4, 5, 4]),
            |conv, x| conv.forward(x).flatten(2, 4),
            1,
        );
    });
}

#[test]
fn the_gram_matrix_of_a_convolution_is_that_of_its_patches_by_hand() {
    let device = Device::flex();
    let conv: Conv2d = Conv2dConfig::new([2, 2], [2, 2])
        .with_groups(2)
        .with_stride([2, 2])
        .with_bias(false)
        .init(&device);
    // Channel 0 is 1..16, channel 1 is its negative.
    let x: Vec<f32> = (1..=16)
        .map(|x| x as f32)
        .chain((1..=16).map(|x| -x as f32))
        .collect();
    let x = Tensor::<1>::from_floats(x.as_slice(), &device).reshape([1, 2, 4, 4]);
    let mut walk = Walk::record(&conv, [x], |conv, x: Tensor<4>| conv.forward(x)).unwrap();
    let mut step = walk.next_product().unwrap().unwrap();
    let product = step.product().unwrap();
    for group in 0..2 {
        let x = all_rows(&mut step, &product, group, 100);
        let mut expected = [[0.0f32; 4]; 4];
        for patch in [
            [1., 2., 5., 6.],
            [3., 4., 7., 8.],
            [9., 10., 13., 14.],
            [11., 12., 15., 16.],
        ] {
            for i in 0..4 {
                for j in 0..4 {
                    expected[i][j] += patch[i] * patch[j];
                }
            }
        }
        assert_eq!(
            values(x.clone().transpose().matmul(x)),
            expected.as_flattened()
        );
    }
}

#[test]
fn what_a_product_is_added_to_is_known_where_its_rows_are() {
    let device = &Device::flex();
    let layer = with_numbers(LinearConfig::new(4, 4).with_bias(false).init(device), 3);
    let x = tensor::<2>(1, [4, 4], device);
    let residuals = |is_left: bool| {
        let mut walk = Walk::record(&layer, [x.clone()], |layer: &Linear, x: Tensor<2>| {
            let weight = layer.weight.val();
            let shown = x.clone().exp();
            shown
                + match is_left {
                    true => weight.matmul(x),
                    false => x.matmul(weight),
                }
        })
        .unwrap();
        let step = walk.next_product().unwrap().unwrap();
        let product = step.product().unwrap();
        walk.residual(&product, product.node).is_some()
    };
    assert!(residuals(false));
    // Its outputs are on the other axis, whose size is the same here.
    assert!(!residuals(true));
}

#[test]
fn one_number_that_is_added_to_all_columns_is_no_bias_of_each() {
    each_device(|target| {
        let layer = LinearConfig::new(8, 8)
            .with_bias(false)
            .init(&target.device);
        let model = with_numbers(
            (layer, Param::from_tensor(Tensor::ones([1], &target.device))),
            3,
        );
        let forward = |model: &(Linear, Param<Tensor<1>>), x: Tensor<3>| {
            model.0.forward(x) + model.1.val().unsqueeze()
        };
        for batch in [1, 24] {
            let x = tensor::<3>(2, [batch, 5, 8], &target.device);
            let recording = record(&model, &x, forward).unwrap().fold_rows();
            let found = recording.execute(&model, &x, &AsRecorded).unwrap();
            near(&values(forward(&model, x)), &values(found), "sum");
        }
    });
}

/// Burn on CubeCL casts it to F32, as which it is stored, by leaving it as it is.
#[test]
fn rows_in_flex32_are_read_as_f32() {
    each_device(|target| {
        let device = &target.device;
        if !target.is_gpu() || !device.supports_dtype(DType::Flex32) {
            return;
        }
        let of = |shape: [usize; 2], number: f32| -> Tensor<2> {
            Tensor::full(shape, number, (device, DType::Flex32))
        };
        let mut layer: Linear = LinearConfig::new(3, 2).with_bias(false).init(device);
        layer.weight = Param::from_tensor(of([3, 2], 0.5));
        let walk = Walk::record(&layer, [of([4, 3], 1.5)], |layer, x| layer.forward(x));
        let mut walk = walk.unwrap();
        let mut step = walk.next_product().unwrap().unwrap();
        let product = step.product().unwrap();
        let rows = step.sampled_rows(&product, 0, Pass::Original, 0, 0, 1);
        assert_eq!(rows.unwrap(), [1.5; 12]);
    });
}

/// Two layers of sequences, the second one used twice.
#[derive(Module, Debug)]
struct Sequences {
    first: Linear,
    second: Linear,
    last: Linear,
}

#[test]
fn batches_of_sequences_have_the_same_operations_whatever_their_sizes() {
    on_each(|device| {
        let layer = |inputs, outputs| LinearConfig::new(inputs, outputs);
        let net = with_numbers(
            Sequences {
                first: layer(8, 8).init(device),
                second: layer(8, 8).init(device),
                last: layer(8, 3).with_bias(false).init(device),
            },
            9,
        );
        let forward = |net: &Sequences, x: Tensor<3>| {
            let x = net.second.forward(relu(net.first.forward(x)));
            net.last.forward(relu(net.second.forward(x)))
        };
        let sizes = [[24, 5], [8, 5], [1, 5], [3, 32], [2, 7]];
        let inputs = sizes.map(|[batch, length]| tensor::<3>(3, [batch, length, 8], device));
        let mut walk = Walk::record(&net, inputs.clone(), forward).unwrap();
        while walk.advance(|_| false).unwrap().is_some() {}
        for (batch, x) in inputs.into_iter().enumerate() {
            let found = values(walk.result(batch, Pass::Replaced).unwrap());
            near(
                &values(forward(&net, x)),
                &found,
                &format!("{:?}", sizes[batch]),
            );
        }
        let products: Vec<_> = walk.products();
        let paths: Vec<_> = products
            .iter()
            .map(|one| one.parameter.path.as_str())
            .collect();
        let expected = [
            "first.weight",
            "second.weight",
            "second.weight",
            "last.weight",
        ];
        assert_eq!(paths, expected);
    });
}
