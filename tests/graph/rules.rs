//! The precision of each operation, as rules assign it.

use burn::backend::ir::{FloatOperationIr, OperationIr};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::graph::{Node, Precision, Rules, record};

use crate::models::Recurrent;
use crate::support::{each_device, tensor};

/// Products in BF16, everything else in the widest dtype.
struct Products;

impl Rules for Products {
    fn precision(&self, node: &Node<'_>) -> Precision {
        match node.name() {
            "linear" | "matmul" => Precision::Half,
            "softmax" => Precision::Full,
            _ => Precision::Widest,
        }
    }

    fn half(&self) -> FloatDType {
        FloatDType::BF16
    }
}

#[test]
fn an_assignment_is_what_an_execution_does() {
    let device = Device::flex();
    let model: Linear = LinearConfig::new(3, 3).with_bias(false).init(&device);
    let x = tensor::<2>(1, [2, 3], &device);
    let forward = |model: &Linear, x: Tensor<2>| {
        let h = model.forward(x.clone());
        (h.clone(), h.clone() + x, softmax(h, 1))
    };
    let recording = record(&model, &x, forward).unwrap();
    let assigned: Vec<_> = recording
        .graph()
        .nodes()
        .zip(recording.graph().assign(&Products))
        .map(|(node, assignment)| (node.name(), assignment.results))
        .collect();
    assert_eq!(
        assigned,
        [
            ("matmul", Some(DType::BF16)),
            ("add", Some(DType::F32)),
            ("softmax", Some(DType::F32)),
        ]
    );
    let (h, sum, probabilities) = recording.execute(&model, &x, &Products).unwrap();
    assert_eq!(
        [h.dtype(), sum.dtype(), probabilities.dtype()],
        [DType::BF16, DType::F32, DType::F32]
    );
}

#[test]
fn operations_know_their_parameters_through_views() {
    let device = Device::flex().autodiff();
    let model = Recurrent::new(&device);
    let batch = Recurrent::batch(&device);
    let recording = record(&model, &batch, |model, batch| model.loss(batch)).unwrap();
    let graph = recording.graph();
    let products: Vec<_> = graph
        .nodes()
        .filter(|node| {
            matches!(
                node.operation(),
                OperationIr::Module(burn::backend::ir::ModuleOperationIr::Linear(_))
                    | OperationIr::Float(_, FloatOperationIr::Matmul(_))
            )
        })
        .map(|node| node.module().to_string())
        .collect();
    assert!(products.contains(&"head".to_string()), "{products:?}");
    let gates = products.iter().filter(|path| path.starts_with("lstm."));
    assert!(gates.count() >= 6 * 4, "{products:?}");
}

#[test]
fn a_recurrence_cuts_its_weights_once() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let model = Recurrent::new(&device);
        let count = |steps: usize| {
            let (tokens, targets) = Recurrent::batch(&device);
            let batch = (tokens.slice_dim(1, 0..steps), targets);
            let recording = record(&model, &batch, |model, batch| model.loss(batch)).unwrap();
            let on_weights = |node: &Node<'_>| node.is_view() && node.parameters().next().is_some();
            recording.graph().nodes().filter(on_weights).count()
        };
        assert_eq!(count(2), count(6));
    });
}
