//! Products of many rows with one matrix, in one form.
//!
//! Burn computes `x·W + b` of a linear layer in one of two ways, as the sizes of batch, rows and columns
//! have it:
//!
//! ```text
//! x [.., m, k] · reshape W [1, .., k, n] + reshape b [1, .., n]
//! reshape (reshape x [rows, k] · W + reshape b [1, n])
//! ```
//!
//! so that the same forward pass is recorded as other operations for other batches. Where recordings are
//! compared, the first form becomes the second.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr, OperationIr,
    ShapeOpIr, TensorId, TensorIr, TensorStatus,
};
use burn::tensor::Shape;

use super::Graph;
use super::describe::describe;

/// Gives all products with a broadcast matrix the form with folded rows.
pub(crate) fn fold(graph: &mut Graph) {
    let layers = Layers::of(graph);
    let mut next = 0;
    let mut note = |id: TensorId| next = next.max(id.value() + 1);
    graph.inputs.iter().copied().for_each(&mut note);
    graph.constants.keys().copied().for_each(&mut note);
    let parameters = graph.parameters.iter();
    parameters.for_each(|parameter| note(parameter.tensor));
    for operation in &graph.operations {
        operation.inputs().for_each(|tensor| note(tensor.id));
        operation.outputs().for_each(|tensor| note(tensor.id));
    }
    if layers.found.is_empty() {
        return;
    }
    let mut fresh = |like: &TensorIr, shape: Vec<usize>| {
        next += 1;
        TensorIr {
            id: TensorId::new(next - 1),
            shape: Shape::from(shape),
            status: TensorStatus::ReadOnly,
            dtype: like.dtype,
        }
    };
    // A bias that several layers share is reshaped once.
    let mut biases: HashMap<TensorId, TensorIr> = HashMap::new();
    let mut folded = Vec::with_capacity(graph.operations.len());
    let mut gone: HashSet<usize> = layers.found.values().filter_map(|one| one.sum).collect();
    for (index, operation) in std::mem::take(&mut graph.operations)
        .into_iter()
        .enumerate()
    {
        let (Some(layer), OperationIr::Float(dtype, FloatOperationIr::Matmul(product))) =
            (layers.found.get(&index), &operation)
        else {
            folded.push((index, operation));
            continue;
        };
        let (k, n) = (layer.weight.shape[0], layer.weight.shape[1]);
        let rows = product.lhs.shape.num_elements() / k.max(1);
        let reshape = |input: &TensorIr, out: &TensorIr| {
            let (input, out) = (input.clone(), out.clone());
            OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr { input, out }))
        };
        let x = fresh(&product.lhs, vec![rows, k]);
        let y = fresh(&product.out, vec![rows, n]);
        let mut push = |operation| folded.push((index, operation));
        push(reshape(&product.lhs, &x));
        push(OperationIr::Float(
            *dtype,
            FloatOperationIr::Matmul(MatmulOpIr {
                lhs: x,
                rhs: layer.weight.clone(),
                out: y.clone(),
            }),
        ));
        let Some(bias) = &layer.bias else {
            push(reshape(&y, &product.out));
            continue;
        };
        let row = biases.entry(bias.row).or_insert_with(|| {
            let row = fresh(&bias.vector, vec![1, n]);
            push(reshape(&bias.vector, &row));
            row
        });
        let sum = fresh(&product.out, vec![rows, n]);
        push(OperationIr::NumericFloat(
            *dtype,
            NumericOperationIr::Add(BinaryOpIr {
                lhs: y,
                rhs: row.clone(),
                out: sum.clone(),
            }),
        ));
        push(reshape(&sum, &bias.out));
    }
    folded.retain(|(index, _)| !gone.contains(index));
    // The broadcast forms of weights and biases, unless something else reads them.
    let mut read: HashSet<TensorId> = graph.outputs.iter().copied().collect();
    read.extend(graph.parameters.iter().filter_map(|one| one.update));
    let operations = folded.iter().flat_map(|(_, operation)| operation.inputs());
    read.extend(operations.map(|tensor| tensor.id));
    gone = layers.views;
    folded.retain(|(index, operation)| {
        let is_read = operation.outputs().any(|tensor| read.contains(&tensor.id));
        is_read || !gone.contains(index)
    });
    graph.operations = folded.into_iter().map(|(_, operation)| operation).collect();
    graph.readers.clear();
    describe(graph);
}

/// What a product with a broadcast matrix consists of.
struct Layer {
    weight: TensorIr,
    bias: Option<Bias>,
    /// The operation that adds the bias.
    sum: Option<usize>,
}

struct Bias {
    vector: TensorIr,
    /// Its broadcast form.
    row: TensorId,
    /// The result of the layer.
    out: TensorIr,
}

/// The products with a broadcast matrix by their positions, and the positions of what broadcasts.
struct Layers {
    found: HashMap<usize, Layer>,
    views: HashSet<usize>,
}

impl Layers {
    fn of(graph: &Graph) -> Self {
        let mut views: HashMap<TensorId, (usize, &ShapeOpIr)> = HashMap::new();
        let mut made: HashMap<TensorId, usize> = HashMap::new();
        let mut readers: HashMap<TensorId, Vec<usize>> = HashMap::new();
        for (index, operation) in graph.operations.iter().enumerate() {
            operation.inputs().for_each(|tensor| {
                readers.entry(tensor.id).or_default().push(index);
            });
            made.extend(operation.outputs().map(|tensor| (tensor.id, index)));
            if let OperationIr::BaseFloat(BaseOperationIr::Reshape(view)) = operation {
                views.insert(view.out.id, (index, view));
            }
        }
        // The tensor that a view leads with axes of 1, and where.
        let led = |id: TensorId, rank: usize| {
            let (index, view) = views.get(&id)?;
            let (from, to) = (&view.input.shape, &view.out.shape);
            let leading = to.num_dims().checked_sub(from.num_dims())?;
            let leads = (0..leading).all(|axis| to[axis] == 1);
            let same = (0..from.num_dims()).all(|axis| from[axis] == to[leading + axis]);
            (from.num_dims() == rank && leading > 0 && leads && same)
                .then_some((*index, &view.input))
        };
        let is_result = |id: &TensorId| {
            let updates = graph.parameters.iter().filter_map(|one| one.update);
            graph.outputs.contains(id) || updates.into_iter().any(|update| update == *id)
        };
        let mut layers = Self {
            found: HashMap::new(),
            views: HashSet::new(),
        };
        for (index, operation) in graph.operations.iter().enumerate() {
            let OperationIr::Float(_, FloatOperationIr::Matmul(product)) = operation else {
                continue;
            };
            let Some((at, weight)) = led(product.rhs.id, 2) else {
                continue;
            };
            // A matrix that reaches beyond the rank of x broadcasts x.
            if product.lhs.shape.num_dims() < product.rhs.shape.num_dims() {
                continue;
            }
            layers.views.insert(at);
            let mut layer = Layer {
                weight: weight.clone(),
                bias: None,
                sum: None,
            };
            let reads = readers.get(&product.out.id).map_or(&[][..], |reads| reads);
            if let ([reader], false) = (reads, is_result(&product.out.id))
                && let OperationIr::NumericFloat(_, NumericOperationIr::Add(sum)) =
                    &graph.operations[*reader]
                && sum.lhs.id == product.out.id
                && let Some((at, vector)) = led(sum.rhs.id, 1)
                && sum.out.shape == product.out.shape
                && made.get(&vector.id).is_none_or(|made| *made < index)
            {
                layers.views.insert(at);
                layer.sum = Some(*reader);
                layer.bias = Some(Bias {
                    vector: vector.clone(),
                    row: sum.rhs.id,
                    out: sum.out.clone(),
                });
            }
            layers.found.insert(index, layer);
        }
        layers
    }
}
