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

use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr, OperationIr,
    ShapeOpIr, TensorId, TensorIr, TensorStatus,
};
use burn::tensor::Shape;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::Graph;
use super::vectors::swap_back;

/// Gives all products with a broadcast matrix the form with folded rows. Who reads what is then to be noted
/// anew.
pub(crate) fn fold(graph: &mut Graph) {
    swap_back(graph);
    let layers = Layers::of(graph);
    if layers.found.is_empty() {
        return;
    }
    let mut next = graph.unused_id();
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
    let mut biases: HashMap<TensorId, TensorIr> = HashMap::default();
    let mut folded = Vec::with_capacity(graph.operations.len());
    let recorded = std::mem::take(&mut graph.operations).into_iter();
    for (index, operation) in recorded.enumerate() {
        if layers.sums.contains(&index) {
            continue;
        }
        let (Some(layer), OperationIr::Float(dtype, FloatOperationIr::Matmul(product))) =
            (layers.found.get(&index), &operation)
        else {
            folded.push(operation);
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
        folded.push(reshape(&product.lhs, &x));
        folded.push(OperationIr::Float(
            *dtype,
            FloatOperationIr::Matmul(MatmulOpIr {
                lhs: x,
                rhs: layer.weight.clone(),
                out: y.clone(),
            }),
        ));
        let Some(bias) = &layer.bias else {
            folded.push(reshape(&y, &product.out));
            continue;
        };
        let row = biases.entry(bias.row).or_insert_with(|| {
            let row = fresh(&bias.vector, vec![1, n]);
            folded.push(reshape(&bias.vector, &row));
            row
        });
        let sum = fresh(&product.out, vec![rows, n]);
        folded.push(OperationIr::NumericFloat(
            *dtype,
            NumericOperationIr::Add(BinaryOpIr {
                lhs: y,
                rhs: row.clone(),
                out: sum.clone(),
            }),
        ));
        folded.push(reshape(&sum, &bias.out));
    }
    // The broadcast forms of weights and biases, unless something else reads them.
    let mut read = graph.results.clone();
    let inputs = folded.iter().flat_map(|operation| operation.inputs());
    read.extend(inputs.map(|tensor| tensor.id));
    folded.retain(|operation| {
        let mut made = operation.outputs();
        made.all(|tensor| read.contains(&tensor.id) || !layers.views.contains(&tensor.id))
    });
    graph.operations = folded;
}

/// What a product with a broadcast matrix consists of.
struct Layer {
    weight: TensorIr,
    bias: Option<Bias>,
}

struct Bias {
    vector: TensorIr,
    /// Its broadcast form.
    row: TensorId,
    /// The result of the layer.
    out: TensorIr,
}

/// The products with a broadcast matrix.
struct Layers {
    /// By their positions.
    found: HashMap<usize, Layer>,
    /// The positions of the operations that add their biases.
    sums: HashSet<usize>,
    /// The broadcast forms of weights and biases.
    views: HashSet<TensorId>,
}

impl Layers {
    fn of(graph: &Graph) -> Self {
        let mut views: HashMap<TensorId, &ShapeOpIr> = HashMap::default();
        let mut made: HashMap<TensorId, usize> = HashMap::default();
        // What depends on the inputs is no weight, though a batch of one may give it the shape of one.
        let mut computed: HashSet<TensorId> = graph.inputs.iter().copied().collect();
        for (index, operation) in graph.operations.iter().enumerate() {
            made.extend(operation.outputs().map(|tensor| (tensor.id, index)));
            if operation
                .inputs()
                .any(|tensor| computed.contains(&tensor.id))
            {
                computed.extend(operation.outputs().map(|tensor| tensor.id));
            }
            if let OperationIr::BaseFloat(BaseOperationIr::Reshape(view)) = operation {
                views.insert(view.out.id, view);
            }
        }
        // The tensor that a view leads with axes of 1.
        let led = |id: TensorId, rank: usize| {
            let view = views.get(&id).filter(|_| !computed.contains(&id))?;
            let (from, to) = (&view.input.shape, &view.out.shape);
            let leading = to.num_dims().checked_sub(from.num_dims())?;
            let leads = (0..leading).all(|axis| to[axis] == 1);
            let same = (0..from.num_dims()).all(|axis| from[axis] == to[leading + axis]);
            (from.num_dims() == rank && leading > 0 && leads && same).then_some(&view.input)
        };
        let mut layers = Self {
            found: HashMap::default(),
            sums: HashSet::default(),
            views: HashSet::default(),
        };
        for (index, operation) in graph.operations.iter().enumerate() {
            let OperationIr::Float(_, FloatOperationIr::Matmul(product)) = operation else {
                continue;
            };
            let Some(weight) = led(product.rhs.id, 2) else {
                continue;
            };
            // A matrix that reaches beyond the rank of x broadcasts x.
            if product.lhs.shape.num_dims() < product.rhs.shape.num_dims() {
                continue;
            }
            layers.views.insert(product.rhs.id);
            let mut layer = Layer {
                weight: weight.clone(),
                bias: None,
            };
            let out = product.out.id;
            let reads = graph.readers.get(&out).map_or(&[][..], |reads| reads);
            if let ([reader], false) = (reads, graph.results.contains(&out))
                && let OperationIr::NumericFloat(_, NumericOperationIr::Add(sum)) =
                    &graph.operations[*reader]
                && sum.lhs.id == out
                && let Some(vector) = led(sum.rhs.id, 1)
                // One number for each column, not one for all.
                && vector.shape[0] == weight.shape[1]
                && sum.out.shape == product.out.shape
                && made.get(&vector.id).is_none_or(|made| *made < index)
            {
                layers.views.insert(sum.rhs.id);
                layers.sums.insert(*reader);
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
