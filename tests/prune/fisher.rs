//! The gradient matrix against gradients taken one by one.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_lean::prune::{
    Batch, Fisher, FisherConfig, PruneError, Selection, fisher::GradientMethod, flops, mean_loss,
};

use crate::per_example::close;
use crate::support::{each_device, numbers, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    dropout: Dropout,
    head: Linear,
    unused: Linear,
}

type Images = (Tensor<4>, Tensor<1, Int>);

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(device),
            norm: BatchNormConfig::new(2).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            head: LinearConfig::new(2 * 2 * 2, 3).init(device),
            unused: LinearConfig::new(2, 2).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(images)));
        self.head.forward(self.dropout.forward(x).flatten(1, 3))
    }

    fn loss(&self, batch: &Images) -> Tensor<1> {
        let logits = self.forward(batch.0.clone());
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, batch.1.clone())
    }
}

/// `count` images in batches of `size`.
fn loader(count: usize, size: usize, device: &Device) -> Vec<Images> {
    let pixels = tensor::<4>(7, [count, 1, 4, 4], device);
    let labels: Vec<i64> = (0..count as i64).map(|index| index % 3).collect();
    let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [count]), device);
    (0..count)
        .step_by(size)
        .map(|from| {
            let range = from..count.min(from + size);
            (
                pixels.clone().slice([range.clone()]),
                labels.clone().slice([range]),
            )
        })
        .collect()
}

fn collect(config: &FisherConfig, net: &Net, batches: Vec<Images>) -> Result<Fisher, PruneError> {
    let selection = Selection::of(net, None)?;
    config.collect(net, &selection, Net::loss, batches)
}

fn rows(fisher: &Fisher) -> Vec<Vec<f32>> {
    (0..fisher.gradients.samples())
        .map(|sample| fisher.gradients.row(sample).unwrap())
        .collect()
}

#[test]
fn rows_are_the_slopes_of_the_deployed_loss() {
    each_device(|target| {
        let net = with_numbers(Net::new(&target.device), 1);
        let selection = Selection::of(&net, None).unwrap();
        let fisher = collect(&FisherConfig::new(2), &net, loader(2, 2, &target.device)).unwrap();
        let weights = values(selection.flatten(&net).unwrap());
        for sample in 0..2 {
            let batch = loader(2, 1, &target.device).remove(sample);
            let row = fisher.gradients.row(sample).unwrap();
            for index in [0, 4, 17, 18, 30, 41] {
                let loss = |step: f32| {
                    let mut moved = weights.clone();
                    moved[index] += step;
                    let moved = Tensor::<1>::from_data(&moved[..], &target.device);
                    let net = selection.unflatten(net.clone(), moved).unwrap();
                    mean_loss(&net, Net::loss, std::slice::from_ref(&batch)).unwrap()
                };
                // Central difference with h = 1e-2: error h² and 1e-7 / h of rounding.
                let slope = (loss(1e-2) - loss(-1e-2)) / 2e-2;
                let gradient = f64::from(row[index]);
                assert!(
                    (slope - gradient).abs() < 1e-3,
                    "weight {index}: {gradient} is not {slope}"
                );
            }
        }
    });
}

#[test]
fn gradients_are_those_of_evaluation_mode_and_leave_the_model_alone() {
    each_device(|target| {
        // A model in training: dropout would be random, BatchNorm would use the batch.
        let net = with_numbers(Net::new(&target.device.clone().autodiff()), 1);
        let mean = values(net.norm.running_mean.value());
        let config = FisherConfig::new(4);
        let together = collect(&config, &net, loader(4, 4, &target.device)).unwrap();
        let alone = collect(&config, &net, loader(4, 1, &target.device)).unwrap();
        let deployed = collect(&config, &net.valid(), loader(4, 2, &target.device)).unwrap();
        close(&rows(&together), &rows(&alone));
        close(&rows(&together), &rows(&deployed));
        assert_eq!(values(net.norm.running_mean.value_sync()), mean);
        assert!(net.dropout.training.is_enabled());
        assert!(net.head.weight.is_require_grad());
    });
}

#[test]
fn a_row_over_m_examples_is_the_mean_of_their_rows() {
    each_device(|target| {
        let net = with_numbers(Net::new(&target.device), 2);
        let single = collect(&FisherConfig::new(6), &net, loader(6, 6, &target.device)).unwrap();
        let config = FisherConfig::new(2).with_batch_size(3);
        let grouped = collect(&config, &net, loader(6, 6, &target.device)).unwrap();
        let single = rows(&single);
        let mean: Vec<Vec<f32>> = [0, 3]
            .map(|first| {
                (0..single[0].len())
                    .map(|index| {
                        (first..first + 3)
                            .map(|row| single[row][index])
                            .sum::<f32>()
                            / 3.0
                    })
                    .collect()
            })
            .to_vec();
        close(&rows(&grouped), &mean);
        // Of all examples together, by the model itself.
        let all = loader(6, 6, &target.device).remove(0);
        let loss = f64::from(values(net.valid().loss(&all))[0]);
        let found = grouped.report.loss;
        assert!((found - loss).abs() < 1e-5, "{found} is not {loss}");
    });
}

#[test]
fn the_report_names_what_the_loss_does_not_depend_on() {
    let device = Device::flex();
    let net = with_numbers(Net::new(&device), 1);
    let fisher = collect(&FisherConfig::new(3), &net, loader(4, 4, &device)).unwrap();
    assert_eq!(fisher.report.unreached, ["unused.weight"]);
    assert_eq!(
        fisher.report.zero_columns.last(),
        Some(&("unused.weight".into(), 4))
    );
    assert_eq!(fisher.report.samples, 3);
}

#[test]
fn half_storage_halves_the_bytes_and_rounds_the_numbers() {
    let device = Device::flex();
    let net = with_numbers(Net::new(&device), 1);
    let full = collect(&FisherConfig::new(3), &net, loader(3, 3, &device)).unwrap();
    for (dtype, unit) in [
        (FloatDType::F16, 2f32.powi(-11)),
        (FloatDType::BF16, 2f32.powi(-8)),
    ] {
        let config = FisherConfig::new(3).with_dtype(dtype);
        let half = collect(&config, &net, loader(3, 3, &device)).unwrap();
        assert_eq!(2 * half.gradients.bytes(), full.gradients.bytes());
        for (full, half) in rows(&full).iter().zip(rows(&half)) {
            for (full, half) in full.iter().zip(half) {
                // Half a unit in the last place; below 2^-14 F16 is subnormal.
                assert!((full - half).abs() <= unit * full.abs() + 2f32.powi(-25));
            }
        }
    }
}

#[test]
fn a_matrix_beyond_the_bound_is_refused_with_the_bytes_it_needs() {
    let device = Device::flex();
    let config = FisherConfig::new(100).with_memory_bound(1000);
    match collect(&config, &Net::new(&device), Vec::new()) {
        Err(PruneError::MemoryBound { needed, bound, .. }) => {
            assert_eq!((needed, bound), (100 * 46 * 4, 1000));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn bad_loaders_are_typed_errors() {
    let device = Device::flex();
    let net = with_numbers(Net::new(&device), 1);
    let run = |config: FisherConfig, batches| collect(&config, &net, batches).unwrap_err();
    assert_eq!(
        run(FisherConfig::new(0), loader(2, 2, &device)),
        PruneError::NoSamples
    );
    assert_matches!(
        run(
            FisherConfig::new(2).with_batch_size(0),
            loader(2, 2, &device)
        ),
        PruneError::InvalidConfig {
            field: "batch_size",
            ..
        }
    );
    assert_eq!(
        run(FisherConfig::new(5), loader(3, 2, &device)),
        PruneError::LoaderEnded {
            expected: 5,
            found: 3,
            batch_size: 1
        }
    );
    assert_eq!(
        run(
            FisherConfig::new(2).with_batch_size(3),
            loader(3, 2, &device)
        ),
        PruneError::SmallBatch {
            examples: 2,
            batch_size: 3
        }
    );
}

#[test]
fn a_batch_without_an_example_is_no_part_of_a_mean_loss() {
    let device = Device::flex();
    let net = LinearConfig::new(2, 1).init(&device);
    let loss = |net: &Linear, x: &Tensor<2>| net.forward(x.clone()).mean();
    let (three, none) = (
        Tensor::<2>::ones([3, 2], &device),
        Tensor::<2>::empty([0, 2], &device),
    );
    let expected = mean_loss(&net, loss, std::slice::from_ref(&three)).unwrap();
    assert_eq!(mean_loss(&net, loss, &[none.clone(), three]), Ok(expected));
    assert_eq!(mean_loss(&net, loss, &[none]), Err(PruneError::NoSamples));
}

#[test]
fn parts_of_a_batch_with_other_numbers_of_examples_are_refused() {
    let device = Device::flex();
    let net = LinearConfig::new(2, 1).init(&device);
    let selection = Selection::of(&net, None).unwrap();
    let part = |examples: usize| Tensor::<2>::ones([examples, 2], &device);
    let loss = |net: &Linear, batch: &(Tensor<2>, Tensor<2>)| {
        (net.forward(batch.0.clone()) - batch.1.clone()).mean()
    };
    for (first, second) in [(3, 2), (2, 3)] {
        let batch = (part(first), part(second));
        let expected = PruneError::Mismatch {
            what: "examples in a part of a batch",
            expected: first,
            found: second,
        };
        let collected = FisherConfig::new(2).collect(&net, &selection, loss, [batch.clone()]);
        assert_eq!(collected.unwrap_err(), expected);
        let batches = [batch];
        assert_eq!(mean_loss(&net, loss, &batches).unwrap_err(), expected);
        assert_eq!(flops(&net, loss, &batches[0]).unwrap_err(), expected);
        let three = (part(first), part(first), part(second));
        assert_eq!(three.check().unwrap_err(), expected);
    }
}

#[test]
fn a_gradient_that_is_no_number_is_named() {
    each_device(|target| {
        let net = with_numbers(Net::new(&target.device), 1);
        let mut pixels = numbers(1, 3 * 16);
        pixels[2 * 16 + 5] = f32::NAN;
        let pixels = Tensor::from_data(TensorData::new(pixels, [3, 1, 4, 4]), &target.device);
        let labels = Tensor::zeros([3], &target.device);
        match collect(&FisherConfig::new(3), &net, vec![(pixels, labels)]) {
            Err(PruneError::NonFiniteGradient { sample, path, .. }) => {
                assert_eq!(sample, 2);
                assert!(
                    ["conv.weight", "head.weight"].contains(&path.as_str()),
                    "{path}"
                );
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_loss_without_gradient_is_refused() {
    let device = Device::flex();
    let net = Net::new(&device);
    let selection = Selection::of(&net, None).unwrap();
    let config = FisherConfig::new(1);
    let detached = config.collect(
        &net,
        &selection,
        |net, batch| net.loss(batch).detach(),
        loader(1, 1, &device),
    );
    assert_matches!(detached, Err(PruneError::Loss { .. }));
    let unreduced = config.collect(
        &net,
        &selection,
        |net: &Net, batch: &Images| net.forward(batch.0.clone()).flatten(0, 1),
        loader(1, 1, &device),
    );
    match unreduced {
        Err(PruneError::Loss { reason }) => assert_says!(reason, "3 elements"),
        other => panic!("{other:?}"),
    }
    // The layers do not take such an input.
    let wrong = config.collect(
        &net,
        &selection,
        |net: &Net, batch: &Images| net.forward(batch.0.clone().repeat_dim(1, 2)).mean(),
        loader(1, 1, &device),
    );
    match wrong {
        Err(PruneError::Loss { reason }) => assert_says!(reason, "panics"),
        other => panic!("{other:?}"),
    }
}

/// A first batch of one Fisher sample has nothing to mix; the second one has.
#[test]
fn a_model_that_mixes_examples_is_found_out_after_a_batch_of_one() {
    let device = Device::flex();
    let linear = with_numbers(LinearConfig::new(3, 2).init(&device), 1);
    let selection = Selection::of(&linear, None).unwrap();
    let loss = |model: &Linear, x: &Tensor<2>| {
        let y = model.forward(x.clone());
        (y.clone() - y.clone().mean_dim(0)).square().mean() + y.mean()
    };
    let x = tensor::<2>(1, [10, 3], &device);
    for size in [1, 2] {
        let batches = [
            x.clone().slice([0..size]),
            x.clone().slice([size..5 * size]),
        ];
        let rows_of = |method| {
            let config = FisherConfig::new(5)
                .with_batch_size(size)
                .with_method(method);
            let fisher = config.collect(&linear, &selection, loss, batches.clone());
            fisher.unwrap()
        };
        let found = rows_of(GradientMethod::Batched);
        assert_eq!(rows(&found), rows(&rows_of(GradientMethod::Plain)));
        assert!(found.report.fallback.is_some());
        // The first row is taken again, too.
        assert_eq!(found.report.batched_rows, 0);
    }
}

#[test]
fn batches_of_several_parts_are_cut_alike() {
    let device = Device::flex();
    let part = |seed| tensor::<2>(seed, [4, 2], &device);
    let batch = (part(1), part(2), part(3), part(4));
    batch.check().unwrap();
    let (first, _, _, last) = batch.slice(1..3);
    assert_eq!(values(first), values(part(1))[2..6]);
    assert_eq!(values(last), values(part(4))[2..6]);
    let uneven = (part(1), part(2), part(3), tensor::<2>(4, [3, 2], &device));
    assert!(uneven.check().is_err());
}
