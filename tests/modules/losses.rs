//! The losses of burn-nn 0.22.1, entered in F32 outside of the region.

use burn::nn::Identity;
use burn::nn::loss::*;
use burn::tensor::activation::{log_softmax, sigmoid, softmax};
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::entry::{BATCH, Case, Entry, WIDTH, Way};
use crate::support::tensor;

fn loss(name: &'static str, loss: impl Fn(Tensor<2>) -> Tensor<1> + 'static) -> Entry {
    Entry {
        name,
        way: Way::OutsideInFp32,
        note: "",
        roundings: 0,
        random: false,
        no_backward: &[],
        subject: Box::new(Case {
            way: Way::OutsideInFp32,
            build: |_: &Device| Identity::new(),
            forward: |_: &Identity, h| h,
            loss,
            layer: std::marker::PhantomData,
        }),
    }
}

/// Class indices `0, 1, 2…`.
fn classes(count: usize, device: &Device) -> Tensor<1, Int> {
    Tensor::arange(0..count as i64, device)
}

fn like(y: &Tensor<2>) -> Tensor<2> {
    tensor(3, y.dims(), &y.device())
}

/// −1 and 1 in turn.
fn signs<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let count = shape.iter().product();
    let signs = (0..count)
        .map(|i| if i % 2 == 0 { -1.0f32 } else { 1.0 })
        .collect();
    Tensor::from_data(TensorData::new::<f32, _>(signs, shape), device)
}

fn integers<const D: usize>(values: &[i64], shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

pub(crate) fn losses() -> Vec<Entry> {
    vec![
        loss("BinaryCrossEntropyLoss", |y| {
            let targets = (like(&y) + 1.0).int();
            BinaryCrossEntropyLossConfig::new()
                .with_logits(true)
                .init(&y.device())
                .forward(y, targets)
        }),
        loss("CosineEmbeddingLoss", |y| {
            let target = integers(&[1, -1, 1, -1], [BATCH], &y.device());
            let other = like(&y);
            CosineEmbeddingLossConfig::new()
                .init()
                .forward(y, other, target)
        }),
        loss("CrossEntropyLoss", |y| {
            let targets = classes(BATCH, &y.device());
            CrossEntropyLossConfig::new()
                .with_smoothing(Some(0.1))
                .init(&y.device())
                .forward(y, targets)
        }),
        loss("CTCLoss", |y| {
            // [time, batch, classes]
            let device = y.device();
            let log_probs = log_softmax(y.reshape([8, 2, 4]), 2);
            let targets = integers(&[1, 2, 3, 1], [2, 2], &device);
            let lengths = integers(&[8, 8], [2], &device);
            let target_lengths = integers(&[2, 2], [2], &device);
            CTCLossConfig::new().init().forward_with_reduction(
                log_probs,
                targets,
                lengths,
                target_lengths,
                Reduction::Mean,
            )
        }),
        loss("GaussianNLLLoss", |y| {
            let (target, var) = (like(&y), like(&y).abs() + 0.5);
            GaussianNLLLossConfig::new()
                .init()
                .forward(y, target, var, Reduction::Mean)
        }),
        loss("HingeEmbeddingLoss", |y| {
            let target = signs([BATCH, WIDTH], &y.device());
            HingeEmbeddingLossConfig::new()
                .init()
                .forward(y, target, Reduction::Mean)
        }),
        loss("HuberLoss", |y| {
            let target = like(&y);
            HuberLossConfig::new(0.5)
                .init()
                .forward(y, target, Reduction::Mean)
        }),
        loss("KLDivLoss", |y| {
            let target = softmax(like(&y), 1);
            KLDivLossConfig::new()
                .init()
                .forward(log_softmax(y, 1), target, Reduction::BatchMean)
        }),
        loss("LpLoss", |y| {
            let target = like(&y);
            LpLossConfig::new(2.0)
                .init()
                .forward(y, target, Reduction::Mean)
        }),
        loss("MarginRankingLoss", |y| {
            let (other, target) = (like(&y), signs([BATCH, WIDTH], &y.device()));
            MarginRankingLossConfig::new()
                .init()
                .forward(y, other, target, Reduction::Mean)
        }),
        loss("MseLoss", |y| {
            let target = like(&y);
            MseLoss::new().forward(y, target, Reduction::Mean)
        }),
        loss("MultiMarginLoss", |y| {
            let targets = classes(BATCH, &y.device());
            MultiMarginLossConfig::new()
                .init()
                .forward(y, targets, Reduction::Mean)
        }),
        loss("PoissonNllLoss", |y| {
            let target = like(&y).abs();
            PoissonNllLossConfig::new()
                .init()
                .forward(y, target, Reduction::Mean)
        }),
        loss("RNNTLoss", |y| {
            // [batch, time, labels + 1, classes]
            let device = y.device();
            let targets = integers(&[1, 2, 3, 1], [2, 2], &device);
            let lengths = integers(&[2, 2], [2], &device);
            let target_lengths = integers(&[2, 2], [2], &device);
            RNNTLossConfig::new().init().forward_with_reduction(
                y.reshape([64]).narrow(0, 0, 48).reshape([2, 2, 3, 4]),
                targets,
                lengths,
                target_lengths,
                Reduction::Mean,
            )
        }),
        loss("SmoothL1Loss", |y| {
            let target = like(&y);
            SmoothL1LossConfig::new()
                .init()
                .forward_with_reduction(y, target, Reduction::Mean)
        }),
        loss("SoftMarginLoss", |y| {
            let target = signs([BATCH, WIDTH], &y.device());
            SoftMarginLoss::new().forward(y, target, Reduction::Mean)
        }),
        loss("TripletMarginLoss", |y| {
            let (positive, negative) = (like(&y), sigmoid(like(&y)));
            TripletMarginLossConfig::new()
                .init()
                .forward(y, positive, negative, Reduction::Mean)
        }),
    ]
}
