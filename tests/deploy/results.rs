//! What a forward pass gives without computing it: inputs, parameters, numbers of its own.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Int, Tensor};
use burn_lean::deploy::{Backend, Dimension, EngineConfig, Export, Form};

use crate::judge::{Nothing, close};
use crate::open_axes::{open, sequence};
use crate::support::{on_each, tensor, with_numbers};

const ENGINES: [Option<Backend>; 3] = [None, Some(Backend::Own), Some(Backend::Rten)];

fn integers(tensor: Tensor<1, Int>) -> Vec<i64> {
    tensor.into_data().iter::<i64>().collect()
}

type Given = (Tensor<2>, Tensor<2>, Tensor<2>, Tensor<1, Int>);

/// A product, and beside it its input, its weight and numbers.
fn beside(linear: &Linear, x: Tensor<2>) -> Given {
    let numbers = Tensor::from_ints([3, -1, 4], &x.device());
    let y = linear.forward(x.clone());
    (y, x, linear.weight.val(), numbers)
}

#[test]
fn inputs_parameters_and_constants_are_results() {
    on_each(|device| {
        let linear: Linear = with_numbers(LinearConfig::new(4, 2).init(device), 3);
        let shapes = [[3, 4], [5, 4], [1, 4]];
        let inputs = shapes.map(|shape| tensor::<2>(1, shape, device));
        let record = || Export::record(&linear, &inputs[0], beside).unwrap();
        let exported = record().to_onnx(Form::Float).unwrap();
        assert_eq!(exported.fixed_batch, None);
        let shapes: Vec<_> = exported.model.outputs().iter().map(|o| &o.shape).collect();
        let [two, three, four] = [2, 3, 4].map(Dimension::Fixed);
        assert_eq!(*shapes[1], [open("batch"), four.clone()]);
        assert_eq!(*shapes[2], [four, two]);
        assert_eq!(*shapes[3], [three]);
        for backend in ENGINES.into_iter().chain([Some(Backend::Burn)]) {
            let config = EngineConfig::new().with_backend(backend);
            let engine = config.compile(record()).unwrap();
            // Burn alone runs no other batch.
            let taken = if backend == Some(Backend::Burn) { 1 } else { 3 };
            for x in &inputs[..taken] {
                let (y, same, weight, numbers) = engine.run(x).unwrap();
                let expected = beside(&linear, x.clone());
                close(y, expected.0);
                same.into_data().assert_eq(&x.clone().into_data(), true);
                weight.into_data().assert_eq(&expected.2.into_data(), true);
                assert_eq!(integers(numbers), [3, -1, 4]);
            }
        }
    });
}

/// Twice, and nothing besides.
#[test]
fn an_input_alone_is_a_result() {
    on_each(|device| {
        let shapes = [[3, 4], [1, 4]];
        let inputs = shapes.map(|shape| tensor::<2>(1, shape, device));
        for backend in ENGINES {
            let forward = |_: &Nothing, x: Tensor<2>| (x.clone(), x);
            let export = Export::record(&Nothing {}, &inputs[0], forward).unwrap();
            let config = EngineConfig::new().with_backend(backend);
            let engine = config.compile(export).unwrap();
            for x in &inputs {
                let (first, second) = engine.run(x).unwrap();
                for found in [first, second] {
                    found.into_data().assert_eq(&x.clone().into_data(), true);
                }
            }
        }
    });
}

/// A count of the batch, one that begins where the length ends, and the length.
fn counts(_: &Nothing, x: Tensor<2>) -> [Tensor<1, Int>; 3] {
    let ([batch, length], device) = (x.dims(), x.device());
    let (batch, length) = (batch as i64, length as i64);
    [
        Tensor::arange(0..batch, &device),
        Tensor::arange(length..length + 2, &device),
        Tensor::from_ints([length], &device),
    ]
}

#[test]
fn counts_of_open_lengths_are_those_of_the_inputs_at_hand() {
    on_each(|device| {
        let shapes = [[2, 5], [1, 1], [7, 3]];
        let inputs = shapes.map(|shape| tensor::<2>(1, shape, device));
        for backend in ENGINES {
            let export = Export::record_open(&Nothing {}, &inputs[0], &[sequence()], counts);
            let config = EngineConfig::new().with_backend(backend);
            let engine = config.compile(export.unwrap()).unwrap();
            assert_eq!(engine.report().fixed_batch, None);
            for x in &inputs {
                let found = engine.run(x).unwrap().map(integers);
                assert_eq!(found, counts(&Nothing {}, x.clone()).map(integers));
            }
        }
    });
}
