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
//!
//! A vector of each example times one matrix, `x [.., b, 1, k] · y [.., 1, k, n]`, it computes with the axes
//! of `x` swapped and swaps them back: also of a batch of one, whose `y` are not one matrix in larger ones.
//! It becomes the product that was written.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr, OperationIr,
    ShapeOpIr, SwapDimsOpIr, TensorId, TensorIr, TensorStatus,
};
use burn::tensor::Shape;

use super::Graph;
use super::describe::describe;

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
    let mut biases: HashMap<TensorId, TensorIr> = HashMap::new();
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

/// A swap of axes, or the product of what it gives, and the hooks that have acted on its result since.
type Passed<T> = (T, Vec<usize>);

/// Gives products of a vector of each example with one matrix the form in which they were written. Hooks
/// that act on what is swapped act on what is not.
fn swap_back(graph: &mut Graph) {
    let mut swaps: HashMap<TensorId, Passed<&SwapDimsOpIr>> = HashMap::new();
    let mut products: HashMap<TensorId, Passed<(usize, TensorId)>> = HashMap::new();
    let mut found = Vec::new();
    let is_read_once = |id: TensorId| {
        let reads = graph.readers.get(&id).map_or(0, Vec::len);
        reads == 1 && !graph.results.contains(&id)
    };
    for (index, operation) in graph.operations.iter().enumerate() {
        if let (Some(_), Some(input), Some(output)) = (
            graph.hook_of(operation),
            operation
                .inputs()
                .next()
                .filter(|input| is_read_once(input.id)),
            operation.outputs().next(),
        ) {
            if let Some((swap, hooks)) = swaps.get(&input.id).cloned() {
                swaps.insert(output.id, (swap, [hooks, vec![index]].concat()));
            }
            if let Some((product, hooks)) = products.get(&input.id).cloned() {
                products.insert(output.id, (product, [hooks, vec![index]].concat()));
            }
            continue;
        }
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(after)) => {
                if let Some(((product, lhs), hooks)) = products.get(&after.input.id)
                    && is_read_once(after.input.id)
                    && let Some((before, hooks_before)) = swaps.get(lhs)
                    && axes(before) == axes(after)
                {
                    found.push(SwappedProduct {
                        product: *product,
                        after: index,
                        x: before.input.clone(),
                        out: after.out.clone(),
                        hooks: [hooks_before.clone(), hooks.clone()],
                    });
                }
                swaps.insert(after.out.id, (after, Vec::new()));
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(product)) => {
                if let Some((before, hooks)) = swaps.get(&product.lhs.id)
                    && (hooks.is_empty() || is_read_once(product.lhs.id))
                    && let Some(examples) = product.lhs.shape.num_dims().checked_sub(3)
                    && axes(before) == [examples, examples + 1]
                    && product.rhs.shape.num_dims() == examples + 3
                    && product.lhs.shape[examples] == 1
                    && product.rhs.shape[examples] == 1
                {
                    products.insert(product.out.id, ((index, product.lhs.id), Vec::new()));
                }
            }
            _ => {}
        }
    }
    if found.is_empty() {
        return;
    }
    let left_out: HashSet<usize> = found.iter().map(|one| one.after).collect();
    for one in found {
        one.write(graph);
    }
    let mut read = graph.results.clone();
    let kept = graph.operations.iter().enumerate();
    let kept = kept.filter(|(index, _)| !left_out.contains(index));
    read.extend(kept.flat_map(|(_, one)| one.inputs().map(|tensor| tensor.id)));
    let mut index = 0;
    graph.operations.retain(|operation| {
        index += 1;
        let is_unread_swap = match operation {
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap)) => !read.contains(&swap.out.id),
            _ => false,
        };
        !left_out.contains(&(index - 1)) && !is_unread_swap
    });
    describe(graph);
}

/// A product between two swaps of axes.
struct SwappedProduct {
    /// Its position, and that of the swap after it.
    product: usize,
    after: usize,
    /// What is swapped before it, and what comes out after it.
    x: TensorIr,
    out: TensorIr,
    /// The positions of the hooks that act on its operand, and on its result.
    hooks: [Vec<usize>; 2],
}

impl SwappedProduct {
    fn write(self, graph: &mut Graph) {
        let Self { x, out, hooks, .. } = self;
        let [before, after] = hooks;
        let mut lhs = x;
        for index in before {
            lhs = hook_on(graph, index, lhs);
        }
        // The last one gives the result its name.
        let mut result = out.clone();
        if let OperationIr::Float(_, FloatOperationIr::Matmul(product)) =
            &mut graph.operations[self.product]
        {
            if !after.is_empty() {
                result.id = product.out.id;
            }
            (product.lhs, product.out) = (lhs, result.clone());
        }
        let last = after.last().copied();
        for index in after {
            result = hook_on(graph, index, result);
        }
        if let Some(last) = last
            && let OperationIr::NumericFloat(_, NumericOperationIr::AddScalar(hook)) =
                &mut graph.operations[last]
        {
            let made = std::mem::replace(&mut hook.out, out.clone());
            if let Some(position) = graph.hooked.remove(&made.id) {
                graph.hooked.insert(out.id, position);
            }
        }
    }
}

/// A hook on another tensor; what it gives has its shape.
fn hook_on(graph: &mut Graph, index: usize, x: TensorIr) -> TensorIr {
    match &mut graph.operations[index] {
        OperationIr::NumericFloat(_, NumericOperationIr::AddScalar(hook)) => {
            hook.out.shape = x.shape.clone();
            hook.lhs = x;
            hook.out.clone()
        }
        _ => x,
    }
}

/// The axes that are swapped, the first one first.
fn axes(swap: &SwapDimsOpIr) -> [usize; 2] {
    [swap.dim1.min(swap.dim2), swap.dim1.max(swap.dim2)]
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
        let mut views: HashMap<TensorId, &ShapeOpIr> = HashMap::new();
        let mut made: HashMap<TensorId, usize> = HashMap::new();
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
            found: HashMap::new(),
            sums: HashSet::new(),
            views: HashSet::new(),
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
