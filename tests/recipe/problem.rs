//! A network with everything that a restart can lose, and data for it.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_lean::graph::Tensors;
use burn_lean::prune::Batch;
use burn_lean::recipe::{Latency, Outcome, Recipe, RecipeError, Run, Task};

use crate::support::{numbers, values, with_numbers};

pub(crate) const EXAMPLES: usize = 96;
const BATCH: usize = 16;
const SIDE: usize = 6;
const CLASSES: usize = 3;

/// Running statistics, dropout, a convolution, linear layers.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) conv: Conv2d,
    pub(crate) norm: BatchNorm,
    pub(crate) dropout: Dropout,
    pub(crate) body: Linear,
    pub(crate) head: Linear,
}

impl Net {
    /// Nothing is dropped out: the threads of a process draw from one generator, and what one trains would
    /// depend on the others.
    pub(crate) fn new(width: usize, device: &Device) -> Self {
        Self::with_dropout(0.0, width, device)
    }

    /// For a process of its own.
    pub(crate) fn with_dropout(probability: f64, width: usize, device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            dropout: DropoutConfig::new(probability).init(),
            body: LinearConfig::new(4 * (SIDE - 2) * (SIDE - 2), width).init(device),
            head: LinearConfig::new(width, CLASSES).init(device),
        };
        Self {
            conv: with_numbers(net.conv, 1),
            body: with_numbers(net.body, 2),
            head: with_numbers(net.head, 3),
            ..net
        }
    }

    pub(crate) fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm.forward(self.conv.forward(x)));
        let x = self.dropout.forward(x.flatten(1, 3));
        self.head.forward(relu(self.body.forward(x)))
    }
}

/// Pixels and labels of the examples at these places.
fn batch(places: &[usize], device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let size = SIDE * SIDE;
    let pixels = numbers(7, EXAMPLES * size);
    let chosen = places
        .iter()
        .map(|place| &pixels[place * size..(place + 1) * size]);
    let labels = chosen.clone().map(|pixels| {
        // The brightest third.
        let thirds = pixels
            .chunks(size / CLASSES)
            .map(|third| third.iter().sum::<f32>());
        let thirds: Vec<f32> = thirds.collect();
        (0..CLASSES)
            .max_by(|a, b| thirds[*a].total_cmp(&thirds[*b]))
            .unwrap() as i64
    });
    let labels: Vec<i64> = labels.collect();
    let shape = [places.len(), 1, SIDE, SIDE];
    let pixels: Vec<f32> = chosen.flatten().copied().collect();
    (
        Tensor::from_data(TensorData::new(pixels, shape), device),
        Tensor::from_data(TensorData::new(labels, [places.len()]), device),
    )
}

/// The examples in an order of the seed's, in batches.
pub(crate) fn batches(seed: u64, device: &Device) -> Vec<(Tensor<4>, Tensor<1, Int>)> {
    let first = seed as usize % EXAMPLES;
    // 35 and 96 have no common factor.
    let order: Vec<usize> = (0..EXAMPLES)
        .map(|at| (first + 35 * at) % EXAMPLES)
        .collect();
    order
        .chunks(BATCH)
        .map(|places| batch(places, device))
        .collect()
}

pub(crate) type NetTask<'a> = Task<'a, Net, Tensor<4>, Tensor<1, Int>, Tensor<2>>;

/// The task: accuracy [%] is what a model is worth.
pub(crate) fn task(device: &Device) -> NetTask<'_> {
    let cross_entropy = CrossEntropyLossConfig::new().init(&device.clone().autodiff());
    Task::new(
        |model: &Net, x| model.forward(x),
        move |logits, labels| cross_entropy.forward(logits, labels),
        |seed| batches(seed, device),
    )
    .with_logits(|logits: &Tensor<2>| logits.clone())
    .with_features(|logits: &Tensor<2>| vec![logits.clone()])
    .with_evaluation(|predict| {
        let mut correct = 0;
        for (x, labels) in batches(0, device) {
            let found = predict(x)?.argmax(1).flatten::<1>(0, 1);
            let equal = found.equal(labels.to_device(&device.clone())).int().sum();
            correct += equal.into_scalar::<i64>();
        }
        Ok::<_, RecipeError>(100.0 * correct as f64 / EXAMPLES as f64)
    })
}

/// What a recipe makes of a model, without a latency.
pub(crate) fn done<M: Module, I: Tensors + Batch, T: Tensors + Batch, O>(
    recipe: &Recipe,
    model: M,
    task: &Task<'_, M, I, T, O>,
) -> Outcome<M>
where
    O: Tensors + Send + Sync + 'static,
{
    let run = Run::new(recipe).with_latency(Latency::None);
    run.run(model, task).unwrap()
}

/// The numbers that a tensor stands for, quantized or not.
pub(crate) fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    match tensor.dtype() {
        DType::QFloat(_) => values(tensor.dequantize()),
        _ => values(tensor),
    }
}
