//! The precision of each operation, as rules assign it.

use burn::backend::ir::{FloatOperationIr, OperationIr};
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_lean::graph::{Node, Precision, Rules, record};

use crate::models::Recurrent;
use crate::support::{each_device, on_tracked, tensor, values, with_numbers};

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

/// Products in BF16; everything else as it comes, or before its readers.
#[test]
fn the_gradients_of_what_is_looked_up_are_summed_in_f32() {
    each_device(|target| {
        if !target.device.supports_dtype(FloatDType::BF16) {
            return;
        }
        let device = target.device.clone().autodiff();
        // One row that is read 4,096 times, by a product with one.
        let mut table = LinearConfig::new(1, 1).with_bias(false).init(&device);
        table.weight = Param::from_tensor(Tensor::ones([1, 1], &device));
        let ids = Tensor::<1, Int>::zeros([4096], &device);
        let one = Tensor::<2>::ones([1, 1], &device);
        type Lookup = fn(Tensor<2>, Tensor<1, Int>) -> Tensor<2>;
        let lookups: [Lookup; 2] = [
            |table, ids| table.select(0, ids),
            |table, ids| table.gather(0, ids.unsqueeze_dim(1)),
        ];
        for lookup in lookups {
            let input = (ids.clone(), one.clone());
            let recording = record(&table, &input, |table: &Linear, (ids, one)| {
                lookup(table.weight.val(), ids).matmul(one).sum()
            });
            let sum = recording.unwrap().execute(&table, &input, &Products);
            let grads = sum.unwrap().backward();
            let gradient = table.weight.grad(&grads).unwrap();
            assert_eq!(values(gradient), [4096.0]);
        }
    });
}

/// Everything in F32, and nothing in half.
struct Full;

impl Rules for Full {
    fn precision(&self, _node: &Node<'_>) -> Precision {
        Precision::Full
    }

    fn half(&self) -> FloatDType {
        FloatDType::F32
    }
}

#[test]
fn rules_without_a_half_dtype_round_nothing_for_the_backward_pass() {
    on_tracked(|device| {
        let layer = with_numbers(LinearConfig::new(3, 4).init(&device), 5);
        let x = tensor::<2>(1, [2, 3], &device);
        // The products of their operands are kept, and read by nothing else.
        let forward = |layer: &Linear, x: Tensor<2>| {
            let x = layer.forward(x);
            (x.clone() * 1.3).tanh().sum() + gelu(x * 0.7).sum()
        };
        let gradient = |loss: Tensor<1>| values(layer.weight.grad(&loss.backward()).unwrap());
        let recording = record(&layer, &x, forward).unwrap();
        let found = gradient(recording.execute(&layer, &x, &Full).unwrap());
        let expected = gradient(forward(&layer, x));
        // A dozen operations on numbers below 4.
        assert_near!(found.iter(), expected, 50.0 * f32::EPSILON);
    });
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
    on_tracked(|device| {
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
