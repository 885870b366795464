//! Data on another device than the model, and a run on another one than before.

use std::ops::ControlFlow;

use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{Bool, Int, Tensor};
use burn_lean::recipe::{ComputeDtype, Format, Latency, Recipe, Run, Task, TrainStage};

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

/// `auto` is of the device: what the first one trained in is in the name of its row.
#[test]
fn a_run_that_goes_on_elsewhere_names_its_files_as_its_rows() {
    let state = tempfile::tempdir().unwrap();
    let recipe = Recipe::new()
        .with_train(TrainStage::new(1, 0.1))
        .with_export(Format::Record);
    let mut rows = Vec::new();
    for target in devices() {
        let device = &target.device;
        let x = Tensor::<2>::ones([2, 4], device);
        let task = Task::new(
            |model: &Linear, x: Tensor<2>| model.forward(x),
            |y: Tensor<2>, wanted: Tensor<2>| (y - wanted).square().mean(),
            |_| [(x.clone(), Tensor::<2>::zeros([2, 1], device))],
        );
        let model: Linear = LinearConfig::new(4, 1)
            .with_bias(false)
            .with_initializer(Initializer::Ones)
            .init(&device.clone().autodiff());
        let output = tempfile::tempdir().unwrap();
        let mut told = Vec::new();
        let outcome = Run::new(&recipe)
            .with_latency(Latency::None)
            .with_state(state.path())
            .with_output(output.path())
            .with_progress(|progress| {
                told.push(progress.stage().to_string());
                ControlFlow::Continue(())
            })
            .run(model, &task)
            .unwrap();
        let row = outcome.last().row.stage.clone();
        assert!(told.iter().all(|stage| *stage == row), "{told:?}");
        let name = row.to_lowercase().replace(' ', "-");
        for extension in ["model", "bpk"] {
            let path = output.path().join(format!("{name}.{extension}"));
            assert!(path.is_file(), "{}: {}", target.name, path.display());
        }
        rows.push(row);
    }
    assert!(rows.iter().all(|row| *row == rows[0]), "{rows:?}");
}
