//! A regression: outputs are values, and candidates are judged by their distance.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{Budget, Pruner};
use burn_lean::recipe::{Outputs, PruneStage, Recipe, Run, Task};

use crate::support::{tensor, values, with_numbers};

#[test]
fn a_regression_is_pruned_as_its_values_want_it() {
    let device = Device::flex();
    let model: Linear = with_numbers(LinearConfig::new(6, 1).init(&device), 5);
    // One score, with two thresholds: to a softmax all of them are the same.
    let forward = |layer: &Linear, x: Tensor<2>| {
        let score = layer.forward(x);
        Tensor::cat(vec![score.clone(), score - 1.0], 1)
    };
    let batches = || [1, 2].map(|seed| tensor::<2>(seed, [40, 6], &device));
    let task = Task::new(
        forward,
        |given: Tensor<2>, target: Tensor<2>| (given - target).square().mean(),
        |_| batches().map(|x| (x.clone(), x.narrow(1, 0, 2))),
    );
    let by = |outputs: Outputs| {
        let recipe = Recipe::new().with_prune(PruneStage::new(0.5).with_outputs(outputs));
        let toml = recipe.to_toml().unwrap();
        assert_eq!(
            toml.contains("outputs = \"values\""),
            outputs == Outputs::Values,
            "{toml}"
        );
        let recipe = Recipe::from_toml(&toml).unwrap();
        let outcome = Run::new(&recipe).run(model.clone(), &task).unwrap();
        values(outcome.last().model.weight.val())
    };
    let direct = |outputs: Outputs| {
        let pruner = Pruner::new(Budget::Sparsity(0.5)).with_outputs(outputs);
        let pruned = pruner.prune(model.clone(), forward, batches()).unwrap();
        values(pruned.model.weight.val())
    };
    assert_eq!(by(Outputs::Values), direct(Outputs::Values));
    assert_ne!(by(Outputs::Values), by(Outputs::Logits));
}
