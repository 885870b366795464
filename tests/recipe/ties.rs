//! Models that hold one layer at two places, parts that do not train, and weights that an operation made.

use std::cell::RefCell;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};
use burn_lean::recipe::{ComputeDtype, Latency, PruneStage, Recipe, Run, Task, TrainStage};

use crate::support::{tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    again: Linear,
    head: Linear,
}

impl Tied {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward(x));
        self.head.forward(relu(self.again.forward(x)))
    }
}

/// Burn's optimizers step the first of the two alone, and what differs cannot be pruned as one.
#[test]
fn a_layer_at_two_places_stays_one_through_training_and_pruning() {
    let device = Device::flex();
    let on = device.clone().autodiff();
    let layer: Linear = with_numbers(LinearConfig::new(8, 8).init(&on), 1);
    let model = Tied {
        first: layer.clone(),
        again: layer.clone(),
        head: with_numbers(LinearConfig::new(8, 2).init(&on), 2),
    };
    let task = Task::new(
        |model: &Tied, x: Tensor<2>| model.forward(x),
        |outputs: Tensor<2>, targets: Tensor<2>| (outputs - targets).square().mean(),
        |seed| {
            let x = tensor::<2>(seed % 7, [16, 8], &device);
            vec![(x.clone(), x.clone().slice([0..16, 0..2]))]
        },
    );
    let tune = TrainStage::new(2, 1e-2);
    let recipe = Recipe::new()
        .with_train(TrainStage::new(3, 1e-2))
        .with_prune(PruneStage::new(0.5).with_tune(tune));
    let outcome = Run::new(&recipe).run(model, &task).unwrap();
    for stage in &outcome.stages {
        let Tied { first, again, .. } = &stage.model;
        assert_eq!(values(first.weight.val()), values(again.weight.val()));
        assert_ne!(values(first.weight.val()), values(layer.weight.val()));
    }
}

/// A teacher beside its student, and how the backward pass saves memory.
#[derive(Module, Debug)]
struct Pair {
    teacher: Linear,
    student: Linear,
}

#[test]
fn what_does_not_train_stays_and_checkpointing_too() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let linear = |seed| -> Linear { with_numbers(LinearConfig::new(4, 2).init(&device), seed) };
    let pair = Pair {
        teacher: linear(1).valid(),
        student: linear(2),
    };
    let before = [&pair.teacher, &pair.student].map(|one| values(one.weight.val()));
    let strategies = RefCell::new(Vec::new());
    let task = Task::new(
        |pair: &Pair, x: Tensor<2>| {
            let weight = pair.student.weight.val();
            let strategy = weight.device().gradient_checkpointing_strategy();
            strategies.borrow_mut().extend(strategy);
            pair.student.forward(x.clone()) - pair.teacher.forward(x)
        },
        |difference: Tensor<2>, _: Tensor<2>| difference.square().mean(),
        |seed| {
            let x = tensor::<2>(seed, [8, 4], &Device::flex());
            [(x.clone(), x)]
        },
    );
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_train(TrainStage::new(1, 0.1));
    let run = Run::new(&recipe)
        .with_latency(Latency::None)
        .run(pair, &task);
    let outcome = run.unwrap();
    let model = &outcome.last().model;
    assert_eq!(values(model.teacher.weight.val()), before[0]);
    assert_ne!(values(model.student.weight.val()), before[1]);
    let balanced = GradientCheckpointingStrategy::Balanced;
    assert!(strategies.borrow().contains(&balanced));
}

/// As initializations are scaled: Burn's own loop panics with such a weight, and `train` makes a leaf of it.
#[test]
fn weights_that_were_scaled_train() {
    let device = Device::flex().autodiff();
    let mut model: Linear = with_numbers(LinearConfig::new(4, 2).init(&device), 1);
    model.weight = model.weight.map(|weight| weight * 0.1);
    let before = values(model.weight.val());
    let task = Task::new(
        |model: &Linear, x: Tensor<2>| model.forward(x),
        |outputs: Tensor<2>, targets: Tensor<2>| (outputs - targets).square().mean(),
        |seed| {
            let x = tensor::<2>(seed, [8, 4], &Device::flex());
            [(x.clone(), x.slice([0..8, 0..2]))]
        },
    );
    let recipe = Recipe::new()
        .with_dtype(ComputeDtype::F32)
        .with_train(TrainStage::new(1, 0.1));
    let run = Run::new(&recipe)
        .with_latency(Latency::None)
        .run(model, &task);
    let trained = run.unwrap().last().model.weight.val();
    assert_ne!(values(trained), before);
}
