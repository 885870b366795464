//! A walk over batches: the model's own values, replaced weights, rows of products.

use burn::module::Module;
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout, PaddingConfig1d,
    PaddingConfig2d, PaddingConfig3d,
};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::graph::{GraphError, Pass, Product, Walk};

use crate::models::{ConvNet, Decoder, Recurrent};
use crate::support::{Target, each_device, parameters, tensor, values, with_numbers};

/// Relative error of F32 sums in another order.
const ROUNDING: f32 = 1e-5;

fn near(expected: &[f32], found: &[f32], what: &str) {
    let size = expected.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
    assert_eq!(expected.len(), found.len(), "{what}");
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        let error = (expected - found).abs();
        assert!(
            error <= ROUNDING * size,
            "{what}[{index}]: {found} instead of {expected}"
        );
    }
}

/// Two layers, the second of which is also the third.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |a, b| LinearConfig::new(a, b).init(device);
        with_numbers(
            Self {
                first: layer(3, 4),
                second: layer(4, 4),
                third: layer(4, 2),
            },
            7,
        )
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward(x));
        let y = self.second.forward(relu(self.second.forward(x.clone())));
        self.third.forward(relu(x + y))
    }
}

fn batches(device: &Device) -> Vec<Tensor<2>> {
    let sizes = [5, 5, 2];
    (0..3)
        .map(|seed| tensor(seed, [sizes[seed as usize], 3], device))
        .collect()
}

/// The rows of a product over all batches, one after the other.
fn all_rows<O: burn_lean::graph::Tensors>(
    step: &mut burn_lean::graph::Step<'_, O>,
    product: &Product,
    group: usize,
    chunk: usize,
) -> Tensor<2> {
    let mut rows = Vec::new();
    for batch in 0..step.batches() {
        step.rows(product, batch, Pass::Replaced, group, chunk, |x| {
            rows.push(x)
        })
        .unwrap();
    }
    Tensor::cat(rows, 0)
}

fn same_as_own(target: &Target, folder: Option<&std::path::Path>) {
    let model = Net::new(&target.device);
    let walk = Walk::record(&model, batches(&target.device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    if let Some(folder) = folder {
        walk = walk.spilling_to(folder).unwrap();
    }
    let mut stops = Vec::new();
    while let Some(step) = walk
        .advance(|node| node.parameters().next().is_some())
        .unwrap()
    {
        stops.push(step.node().module().to_string());
    }
    stops.dedup();
    assert_eq!(stops, ["first", "second", "third"]);
    for (batch, x) in batches(&target.device).into_iter().enumerate() {
        let result = walk.result(batch, Pass::Replaced).unwrap();
        near(&values(model.forward(x)), &values(result), "the result");
    }
}

#[test]
fn the_model_s_own_values_for_batches_of_any_size() {
    each_device(|target| same_as_own(target, None));
}

#[test]
fn the_same_from_files() {
    let folder = tempfile::tempdir().unwrap();
    each_device(|target| same_as_own(target, Some(folder.path())));
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "files are left"
    );
}

#[test]
fn files_hold_what_memory_would() {
    let device = Device::flex();
    let model = Net::new(&device);
    let folder = tempfile::tempdir().unwrap();
    let bytes = |spills: bool| {
        let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x)).unwrap();
        let mut walk = match spills {
            true => walk.spilling_to(folder.path()).unwrap(),
            false => walk,
        };
        walk.next_product().unwrap();
        walk.next_product().unwrap();
        walk.live_bytes()
    };
    // 12 rows of 4 numbers arrive at the second layer.
    assert_eq!((bytes(true), bytes(false)), (0, 12 * 4 * 4));
}

#[test]
fn other_models_evaluate_as_they_are() {
    each_device(|target| {
        let model = with_numbers(ConvNet::new(&target.device), 4);
        let (x, _) = ConvNet::batch(&target.device);
        let walk = Walk::record(&model, [x.clone()], |model, x| model.forward(x));
        let mut walk = walk.unwrap();
        walk.finish().unwrap();
        let result = walk.result(0, Pass::Original).unwrap();
        near(&values(model.forward(x)), &values(result), "convolutions");

        let batch = Recurrent::batch(&target.device);
        let model = with_numbers(Decoder::new(&target.device), 4);
        let walk = Walk::record(&model, [batch.clone()], |model, batch| model.loss(batch));
        let mut walk = walk.unwrap();
        walk.finish().unwrap();
        let result = walk.result(0, Pass::Original).unwrap();
        near(
            &values(model.loss(batch.clone())),
            &values(result),
            "a decoder",
        );

        let model = with_numbers(Recurrent::new(&target.device), 4);
        let walk = Walk::record(&model, [batch.clone()], |model, batch| model.loss(batch));
        let mut walk = walk.unwrap();
        walk.finish().unwrap();
        let result = walk.result(0, Pass::Original).unwrap();
        near(&values(model.loss(batch)), &values(result), "a recurrence");
    });
}

/// The model with another weight in its third layer, or its second.
fn edited(model: &Net, path: &str, weight: &Tensor<2>) -> Net {
    let mut model = model.clone();
    let layer = match path {
        "second.weight" => &mut model.second,
        _ => &mut model.third,
    };
    layer.weight = layer.weight.clone().map(|_| weight.clone());
    model
}

#[test]
fn a_replaced_weight_changes_what_follows_and_the_original_stays_beside_it() {
    each_device(|target| {
        let device = &target.device;
        let model = Net::new(device);
        let other = tensor::<2>(40, [4, 4], device);
        let expected = edited(&model, "second.weight", &other);
        for spills in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let walk = Walk::record(&model, batches(device), |model, x| model.forward(x));
            let mut walk = walk.unwrap().with_original();
            if spills {
                walk = walk.spilling_to(folder.path()).unwrap();
            }
            walk.next_product().unwrap().unwrap();
            let mut step = walk.next_product().unwrap().unwrap();
            let before = step.operand::<2>(0, 0, Pass::Replaced).unwrap();
            near(
                &values(relu(model.first.forward(batches(device)[0].clone()))),
                &values(before),
                "what arrives is not changed",
            );
            step.replace("second.weight", other.clone()).unwrap();
            for (pass, model) in [(Pass::Replaced, &expected), (Pass::Original, &model)] {
                let x = relu(model.first.forward(batches(device)[2].clone()));
                let found = step.result::<2>(2, 0, pass).unwrap();
                let expected = x.matmul(model.second.weight.val());
                near(&values(expected), &values(found), "the product itself");
            }
            walk.finish().unwrap();
            for (batch, x) in batches(device).into_iter().enumerate() {
                for (pass, model) in [(Pass::Replaced, &expected), (Pass::Original, &model)] {
                    let result = walk.result(batch, pass).unwrap();
                    near(
                        &values(model.forward(x.clone())),
                        &values(result),
                        "the result",
                    );
                }
            }
            let compressed = walk.into_model(model.clone());
            assert_eq!(parameters(&compressed), parameters(&expected));
        }
    });
}

#[test]
fn without_the_original_a_replaced_weight_is_the_only_one() {
    let device = Device::flex();
    let model = Net::new(&device);
    let other = tensor::<2>(40, [4, 2], &device);
    let expected = edited(&model, "third.weight", &other);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    while let Some(mut step) = walk.next_product().unwrap() {
        let product = step.product().unwrap();
        if product.parameter.path == "third.weight" {
            step.replace_weight(&product, other.clone().transpose())
                .unwrap();
            assert_eq!(
                values(step.weight(&product, Pass::Original).unwrap().transpose()),
                values(other.clone())
            );
        }
    }
    let x = batches(&device)[1].clone();
    let result = walk.result(1, Pass::Original).unwrap();
    near(&values(expected.forward(x)), &values(result), "the result");
}

#[test]
fn back_to_a_mark_with_the_weights_of_now() {
    each_device(|target| {
        let device = &target.device;
        let model = Net::new(device);
        let other = tensor::<2>(40, [4, 4], device);
        let expected = edited(&model, "second.weight", &other);
        let walk = Walk::record(&model, batches(device), |model, x| model.forward(x));
        let mut walk = walk.unwrap().with_original();
        walk.next_product().unwrap().unwrap();
        walk.next_product().unwrap().unwrap();
        let mark = walk.mark();
        while let Some(mut step) = walk.next_product().unwrap() {
            if step.product().unwrap().parameter.path == "third.weight" {
                step.replace("second.weight", other.clone()).unwrap();
            }
        }
        walk.rewind(&mark);
        let step = walk.next_product().unwrap().unwrap();
        assert_eq!(step.node().module(), "second");
        walk.finish().unwrap();
        for (batch, x) in batches(device).into_iter().enumerate() {
            let result = walk.result(batch, Pass::Replaced).unwrap();
            near(&values(expected.forward(x)), &values(result), "the result");
        }
    });
}

#[test]
fn shared_weights_are_named_once_with_all_their_products() {
    let device = Device::flex();
    let mut model = Net::new(&device);
    let x = batches(&device);
    let walk = Walk::record(&model, x.clone(), |model, x| model.forward(x)).unwrap();
    let nodes: Vec<usize> = walk.products().iter().map(|one| one.node).collect();
    assert_eq!(
        walk.shared_weights(),
        [("second.weight".to_string(), nodes[1..3].to_vec())]
    );

    // A clone of a parameter is the same parameter at another path.
    model.third.weight = model.second.weight.clone();
    model.third.bias = None;
    let walk = Walk::record(&model, x, |model, x| model.forward(x)).unwrap();
    let [(path, nodes)] = &walk.shared_weights()[..] else {
        panic!("one weight is shared");
    };
    assert_eq!((path.as_str(), nodes.len()), ("second.weight", 3));
}

#[test]
fn a_clone_of_a_weight_is_replaced_with_it() {
    let device = Device::flex();
    let mut model = Net::new(&device);
    model.third.weight = model.second.weight.clone();
    model.third.bias = None;
    let other = tensor::<2>(40, [4, 4], &device);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    let mut step = walk.next_product().unwrap().unwrap();
    step.replace("second.weight", other.clone()).unwrap();
    walk.finish().unwrap();
    let model = walk.into_model(model);
    assert_eq!(values(model.third.weight.val()), values(other));
}

/// One layer of each kind that has rows.
#[derive(Module, Debug)]
struct Layers {
    usual: Linear,
    stored_transposed: Linear,
    table: Embedding,
}

#[test]
fn rows_times_weight_is_what_a_linear_layer_computes() {
    each_device(|target| {
        let device = &target.device;
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
        let mut seen = Vec::new();
        while let Some(mut step) = walk.next_product().unwrap() {
            let product = step.product().unwrap();
            let x = all_rows(&mut step, &product, 0, 5);
            assert_eq!(x.dims(), [28, product.inputs]);
            let weight = step.weight(&product, Pass::Replaced).unwrap();
            let y = x.matmul(weight.transpose());
            let left = seen.len() == 3;
            let own: Vec<Tensor<2>> = (0..2)
                .map(|batch| step.result::<3>(batch, 0, Pass::Replaced).unwrap())
                .map(|y| if left { y.transpose() } else { y })
                .map(|y| y.reshape([14, product.outputs]))
                .collect();
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
    each_device(|target| {
        let device = &target.device;
        let table: Embedding = EmbeddingConfig::new(6, 4).init(device);
        let indices = Tensor::<2, Int>::from_data([[1, 3, 3], [5, 1, 1]], device);
        let mut walk = Walk::record(&table, [indices], |table, x| table.forward(x)).unwrap();
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
        let mut step = walk.next_product().unwrap().unwrap();
        let product = step.product().unwrap();
        assert!(product.is_convolution());
        assert_eq!(product.groups, groups);
        let y = by_rows(&mut step, &product, chunk, examples);
        near(
            &values(Tensor::cat(own.clone(), 0)),
            &values(y),
            "patches times kernel",
        );
    }
}

#[test]
fn patches_times_kernel_is_what_a_convolution_computes() {
    each_device(|target| {
        let device = &target.device;
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
fn a_training_pass_is_refused() {
    let device = Device::flex().autodiff();
    let model = Net::new(&device);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    assert_eq!(walk.unwrap_err(), GraphError::Training);
}

#[test]
fn batches_that_do_other_things_are_refused() {
    let device = Device::flex();
    let model = Net::new(&device);
    let walk = Walk::record(&model, batches(&device), |model, x| match x.dims()[0] {
        2 => model.first.forward(x),
        _ => model.third.forward(relu(model.first.forward(x))),
    });
    let Err(GraphError::Differs { batch: 2, .. }) = walk else {
        panic!("{walk:?}");
    };
    let none = Walk::record(&model, Vec::<Tensor<2>>::new(), |model, x| model.forward(x));
    assert_eq!(none.unwrap_err(), GraphError::NoBatch);
}

#[test]
fn values_that_do_not_fit_are_refused_with_the_path() {
    let device = Device::flex();
    let model = Net::new(&device);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    assert_eq!(
        walk.result(0, Pass::Original).unwrap_err(),
        GraphError::Unfinished
    );
    let mut step = walk.next_product().unwrap().unwrap();
    let product = step.product().unwrap();
    let wrong = tensor::<2>(1, [3, 4], &device);
    let error = step.replace_weight(&product, wrong.clone()).unwrap_err();
    assert!(error.to_string().contains("first.weight"), "{error}");
    let error = step.replace("second.weight", wrong.clone()).unwrap_err();
    assert!(error.to_string().contains("second.weight"), "{error}");
    let error = step.replace("fourth.weight", wrong).unwrap_err();
    assert_eq!(
        error,
        GraphError::Parameter {
            path: "fourth.weight".into()
        }
    );
    let error = step.operand::<3>(0, 0, Pass::Original).unwrap_err();
    assert!(
        matches!(error, GraphError::Operand { index: 0, .. }),
        "{error}"
    );
}
