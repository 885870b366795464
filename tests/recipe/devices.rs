//! Data on another device than the model.

use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{Bool, Int, Tensor};
use burn_lean::recipe::{ComputeDtype, Latency, Recipe, Run, Task};

use crate::support::devices;

type Input = (Tensor<2>, Tensor<2, Int>, Tensor<2, Bool>);

/// Backends store booleans each in a form of their own, and not all have all integers.
#[test]
fn inputs_of_every_kind_may_be_on_another_backend() {
    for to in devices() {
        for from in devices() {
            let input = || -> Input {
                (
                    Tensor::from_data([[1.0, 2.0, 4.0, 8.0]], &from.device),
                    Tensor::from_data([[3, 2, 1, 0]], &from.device),
                    Tensor::from_data([[false, true, false, true]], &from.device),
                )
            };
            let task = Task::new(
                |model: &Linear, (x, places, mask): Input| {
                    model.forward(x.gather(1, places).mask_fill(mask, 0.0))
                },
                |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
                |_| [(input(), Tensor::<2>::zeros([1, 1], &from.device))],
            )
            .with_evaluation(|predict| Ok(predict(input())?.into_scalar::<f64>()));
            let model: Linear = LinearConfig::new(4, 1)
                .with_bias(false)
                .with_initializer(Initializer::Ones)
                .init(&to.device.clone().autodiff());
            let recipe = Recipe::new().with_dtype(ComputeDtype::F32);
            let run = Run::new(&recipe).with_latency(Latency::None);
            let outcome = run.run(model, &task).unwrap();
            let found = outcome.last().row.accuracy;
            assert_eq!(found, Some(8.0 + 2.0), "{} to {}", from.name, to.name);
        }
    }
}
