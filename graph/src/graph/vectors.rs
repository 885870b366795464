//! Products of a vector of each example with a matrix, as they were written.
//!
//! Burn computes `x [.., b, 1, k] · y [.., 1, k, n]`, where all examples have one matrix, with two axes of `x`
//! swapped, and swaps them back. So it does for a batch of one, whose `y` is not one matrix in larger ones:
//! the same forward pass is recorded as other operations for other batches.

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, SwapDimsOpIr, TensorId,
    TensorIr,
};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::Graph;
use super::describe::describe;

/// A swap of axes, or the product of what it gives, and the hooks that have acted on its result since.
type Passed<T> = (T, Vec<usize>);

/// Gives products of a vector of each example with one matrix the form in which they were written. Hooks
/// that act on what is swapped act on what is not.
pub(crate) fn swap_back(graph: &mut Graph) {
    let mut swaps: HashMap<TensorId, Passed<&SwapDimsOpIr>> = HashMap::default();
    let mut products: HashMap<TensorId, Passed<(usize, TensorId)>> = HashMap::default();
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
            if let Some((swap, mut hooks)) = swaps.get(&input.id).cloned() {
                hooks.push(index);
                swaps.insert(output.id, (swap, hooks));
            }
            if let Some((product, mut hooks)) = products.get(&input.id).cloned() {
                hooks.push(index);
                products.insert(output.id, (product, hooks));
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
