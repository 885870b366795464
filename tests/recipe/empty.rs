//! Batches without an example.

use burn::tensor::{Device, Int, Tensor};
use burn_lean::recipe::{Latency, Recipe, RecipeError, Run, Task, TrainStage};

use crate::problem::Net;

/// The latency is measured with the first example.
#[test]
fn a_batch_without_an_example_is_an_error() {
    let device = Device::flex();
    let task = Task::new(
        |model: &Net, x: Tensor<4>| model.forward(x),
        |logits: Tensor<2>, _: Tensor<1, Int>| logits.square().mean(),
        |_| {
            let labels = Tensor::<1, Int>::zeros([0], &device);
            [(Tensor::<4>::zeros([0, 1, 6, 6], &device), labels)]
        },
    );
    let given = Net::new(16, &device.clone().autodiff());
    let rejected = Run::new(&Recipe::new()).run(given, &task).unwrap_err();
    match rejected.error() {
        RecipeError::EmptyBatch { stage } => assert_eq!(stage, "recipe"),
        other => panic!("{other:?}"),
    }
    // Nor is there a mean loss of none.
    let training = Recipe::new().with_train(TrainStage::new(1, 0.1));
    let run = Run::new(&training).with_latency(Latency::None);
    let rejected = run.run(rejected.into_value(), &task).unwrap_err();
    let error = rejected.error();
    assert_matches!(error, RecipeError::EmptyBatch { .. });
}
