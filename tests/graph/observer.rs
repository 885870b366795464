//! Somebody who looks at the operations of an execution.

use std::collections::HashMap;

use burn::nn::LinearConfig;
use burn::tensor::Tensor;
use burn_lean::graph::{AsRecorded, Node, Observed, Observer, record};
use burn_lean::quant::QatConfig;

use crate::support::{each_device, tensor, values, with_numbers};

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
    each_device(|target| {
        let device = target.device.clone().autodiff();
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
    each_device(|target| {
        let device = target.device.clone().autodiff();
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
