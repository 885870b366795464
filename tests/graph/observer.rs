//! Somebody who looks at the operations of an execution.

use std::collections::HashMap;

use burn::backend::ir::TensorId;
use burn::module::Initializer;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{FloatDType, Tensor};
use burn_lean::graph::{
    Arithmetic, AsRecorded, Node, Observed, Observer, Precision, Rules, record,
};
use burn_lean::quant::QatConfig;

use crate::support::{each_device, on_tracked, tensor, values, with_numbers};

/// Notes which tensors are alive before an operation, and doubles the results of one.
struct Doubles {
    operation: &'static str,
    operands: HashMap<&'static str, Vec<f32>>,
}

impl Observer for Doubles {
    fn before(&mut self, node: &Node<'_>, tensors: &Observed<'_, '_>) {
        let result = node.operation().outputs().next().unwrap();
        assert!(tensors.get(result.id).is_none(), "it was not computed yet");
        let operand = node.operation().inputs().next().unwrap();
        let value = Tensor::<2>::from_dispatch(tensors.get(operand.id).unwrap());
        self.operands.insert(node.name(), values(value));
    }

    fn after(&mut self, node: &Node<'_>, tensors: &mut Observed<'_, '_>) {
        if node.name() == self.operation {
            let result = node.operation().outputs().next().unwrap();
            tensors.replace(result.id, |value| {
                (Tensor::<2>::from_dispatch(value) * 2.0).into_dispatch()
            });
        }
    }
}

#[test]
fn it_sees_operands_and_replaces_results_with_gradients() {
    on_tracked(|device| {
        let model = LinearConfig::new(3, 2).with_bias(false).init(&device);
        let model = with_numbers(model, 1);
        let x = tensor::<2>(2, [4, 3], &device);
        let recording = record(&model, &x, |model, x| model.forward(x).exp()).unwrap();
        let mut doubles = Doubles {
            operation: "matmul",
            operands: HashMap::new(),
        };
        let y = recording
            .execute_observed(&model, &x, &AsRecorded, &mut doubles)
            .unwrap();
        let expected = (model.forward(x.clone()) * 2.0).exp();
        assert_eq!(values(y.clone()), values(expected.clone()));
        assert_eq!(doubles.operands["matmul"], values(x.clone()));
        let doubled = values(model.forward(x) * 2.0);
        assert_eq!(doubles.operands["exp"], doubled);
        let gradient = |y: Tensor<2>| values(model.weight.grad(&y.sum().backward()).unwrap());
        assert_eq!(gradient(y), gradient(expected));
    });
}

/// Doubles the input after each product.
struct DoublesInput(TensorId);

impl Observer for DoublesInput {
    fn after(&mut self, node: &Node<'_>, tensors: &mut Observed<'_, '_>) {
        if node.name() == "matmul" {
            tensors.replace(self.0, |value| {
                (Tensor::<2>::from_dispatch(value) * 2.0).into_dispatch()
            });
        }
    }
}

/// Products in F16.
struct InF16(Arithmetic);

impl Rules for InF16 {
    fn precision(&self, node: &Node<'_>) -> Precision {
        match node.name() {
            "matmul" => Precision::Half,
            _ => Precision::Widest,
        }
    }

    fn half(&self) -> FloatDType {
        FloatDType::F16
    }

    fn arithmetic(&self) -> Arithmetic {
        self.0
    }

    fn results(&self) -> Option<FloatDType> {
        Some(FloatDType::F32)
    }
}

#[test]
fn what_it_replaces_is_what_later_operations_read_in_half_too() {
    each_device(|target| {
        let layer = |_| {
            let config = LinearConfig::new(1, 1).with_bias(false);
            config
                .with_initializer(Initializer::Ones)
                .init(&target.device)
        };
        let model: Vec<Linear> = (0..3).map(layer).collect();
        let x = Tensor::<2>::ones([1, 1], &target.device);
        let forward = |model: &Vec<Linear>, x: Tensor<2>| -> Vec<Tensor<2>> {
            model.iter().map(|layer| layer.forward(x.clone())).collect()
        };
        let recording = record(&model, &x, forward).unwrap();
        let mut arithmetics = vec![Arithmetic::Emulated];
        if target.device.supports_dtype(FloatDType::F16) {
            arithmetics.extend([Arithmetic::Native, Arithmetic::Widened]);
        }
        for arithmetic in arithmetics {
            let mut doubles = DoublesInput(recording.graph().inputs()[0]);
            let found = recording.execute_observed(&model, &x, &InF16(arithmetic), &mut doubles);
            let found: Vec<f32> = found.unwrap().into_iter().flat_map(values).collect();
            assert_eq!(found, [1.0, 2.0, 4.0], "{arithmetic:?}");
        }
    });
}

/// The names of operations, before and after them.
#[derive(Default)]
struct Names {
    before: Vec<&'static str>,
    after: Vec<&'static str>,
}

impl Observer for Names {
    fn before(&mut self, node: &Node<'_>, _tensors: &Observed<'_, '_>) {
        self.before.push(node.name());
    }

    fn after(&mut self, node: &Node<'_>, tensors: &mut Observed<'_, '_>) {
        let result = node.operation().outputs().next().unwrap();
        assert!(tensors.get(result.id).is_some(), "{}", node.name());
        self.after.push(node.name());
    }
}

#[test]
fn it_sees_what_the_quantizers_of_a_model_give() {
    on_tracked(|device| {
        let model = with_numbers(LinearConfig::new(3, 2).init(&device), 1);
        let model = QatConfig::new().prepare(model).unwrap();
        let x = tensor::<2>(2, [4, 3], &device);
        let recording = record(&model, &x, |model, x| model.forward(x)).unwrap();
        let mut names = Names::default();
        recording
            .execute_observed(&model, &x, &AsRecorded, &mut names)
            .unwrap();
        assert!(names.before.contains(&"fake_quantize"));
        assert_eq!(names.after, names.before);
    });
}
