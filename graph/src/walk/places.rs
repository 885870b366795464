//! Whether a place of a tensor stands for the same thing in both passes.
//!
//! Where the order of rows follows from the data, as in `h.select(0, scores.argsort(0))`, it may be another one
//! in each pass: row 3 is that of one token here and that of another one there. Such an axis is called ranked.
//! It becomes so by sorts and top-k whose orders differ, is handed on by what reads them, and ends where
//! rows are written or taken back to where they came from.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
    TensorId, TensorIr,
};

use super::Pass;
use super::lane::{Live, host, unread};
use crate::graph::describe::operands;
use crate::{Graph, GraphError};

/// What is known of the tensors of a batch that differ in the two passes.
#[derive(Debug, Clone, Default)]
pub(super) struct Places {
    /// The ranked axes of those that have some.
    ranked: HashMap<TensorId, Vec<bool>>,
    /// Those that follow from sorts with the same order in both passes, and so do not differ.
    equal: HashSet<TensorId>,
    /// Indices that say where something was found, and nothing computed from them.
    found: HashSet<TensorId>,
    /// Of those the ones that have each place of an axis once, and which axis.
    permutations: HashMap<TensorId, usize>,
}

/// What is known of one tensor.
#[derive(Debug, Clone)]
pub(super) struct Known {
    ranked: Vec<bool>,
    is_equal: bool,
    is_found: bool,
    permuted: Option<usize>,
}

/// A sort or a top-k.
struct Sort<'a> {
    input: &'a TensorIr,
    axis: usize,
    /// What says the order: integers.
    order: Option<&'a TensorIr>,
    /// It gives the values in that order, and not where they were.
    gives_values: bool,
}

impl Sort<'_> {
    /// The axis of which its order has each place.
    fn permuted(&self) -> Option<usize> {
        let order = self.order.filter(|_| !self.gives_values)?;
        let is_whole = order.shape[self.axis] == self.input.shape[self.axis];
        is_whole.then_some(self.axis)
    }
}

impl Places {
    /// Of what arrives at a walk.
    pub(super) fn arrive(&mut self, id: TensorId, known: &Known) {
        self.set(id, known.ranked.clone());
        put(&mut self.equal, id, known.is_equal);
        put(&mut self.found, id, known.is_found);
        self.set_permuted(id, known.permuted);
    }

    /// For a walk that a tensor arrives at.
    pub(super) fn known(&self, id: TensorId) -> Known {
        Known {
            ranked: self.of(id).to_vec(),
            is_equal: self.equal.contains(&id),
            is_found: self.found.contains(&id),
            permuted: self.permutations.get(&id).copied(),
        }
    }

    /// The axes of a tensor that are ranked; none where it is not known to have any.
    pub(super) fn of(&self, id: TensorId) -> &[bool] {
        self.ranked.get(&id).map_or(&[], Vec::as_slice)
    }

    /// Notes what an operation made that was computed in both passes; `differs` says of an operand whether
    /// it was, or is a replaced parameter.
    pub(super) fn note(
        &mut self,
        graph: &Graph,
        index: usize,
        differs: &dyn Fn(TensorId) -> bool,
        live: &Live,
    ) -> Result<(), GraphError> {
        let operation = &graph.operations[index];
        let mut reads = operands(graph, operation).into_iter();
        let is_equal = reads.all(|id| !differs(id) || self.equal.contains(&id));
        let sort = sort(operation);
        let same = match &sort {
            Some(Sort {
                order: Some(order), ..
            }) => is_equal || is_same(order.id, live)?,
            _ => is_equal,
        };
        let is_ranks = sort
            .as_ref()
            .is_some_and(|sort| self.is_inverse(operation, sort));
        let finds = sort.is_some() && !is_ranks || is_reduction_with_indices(operation);
        let hands_on = handed_on(graph, index).is_some_and(|id| self.found.contains(&id));
        let permuted = match &sort {
            Some(sort) => sort.permuted(),
            None => self.permuted(operation),
        };
        for made in operation.outputs() {
            let is_order = sort
                .as_ref()
                .and_then(|sort| sort.order)
                .is_some_and(|order| order.id == made.id);
            put(&mut self.equal, made.id, is_equal || is_order && same);
            put(
                &mut self.found,
                made.id,
                !made.dtype.is_float() && (finds || hands_on),
            );
            self.set_permuted(made.id, permuted.filter(|_| is_order || sort.is_none()));
            let axes = match &sort {
                Some(sort) => {
                    let mut axes = self.axes(sort.input);
                    axes[sort.axis] = !is_ranks && (axes[sort.axis] || !same);
                    axes
                }
                None if is_equal => Vec::new(),
                None => self.made(operation, made, differs),
            };
            self.set(made.id, axes);
        }
        Ok(())
    }

    fn set(&mut self, id: TensorId, axes: Vec<bool>) {
        match axes.contains(&true) {
            true => self.ranked.insert(id, axes),
            false => self.ranked.remove(&id),
        };
    }

    fn set_permuted(&mut self, id: TensorId, axis: Option<usize>) {
        match axis {
            Some(axis) => self.permutations.insert(id, axis),
            None => self.permutations.remove(&id),
        };
    }

    /// Whether each axis of a tensor is ranked.
    fn axes(&self, tensor: &TensorIr) -> Vec<bool> {
        let none = || vec![false; tensor.shape.num_dims()];
        self.ranked.get(&tensor.id).cloned().unwrap_or_else(none)
    }

    fn has_ranked(&self, tensor: &TensorIr) -> bool {
        self.ranked.contains_key(&tensor.id)
    }

    /// The axis of which the result of an operation, no sort, has each place once.
    fn permuted(&self, operation: &OperationIr) -> Option<usize> {
        use BaseOperationIr as Base;
        let OperationIr::BaseInt(base) = operation else {
            return None;
        };
        let (read, made) = (operation.inputs().next()?, operation.outputs().next()?);
        let axis = *self.permutations.get(&read.id)?;
        let (from, to) = (read.shape.to_vec(), made.shape.to_vec());
        let now = match base {
            Base::Reshape(_) => moved(axis, &from, &to)?,
            Base::Permute(o) => o.axes.iter().position(|one| *one == axis)?,
            Base::Expand(_) => axis + to.len().saturating_sub(from.len()),
            Base::SwapDims(o) if axis == o.dim1 => o.dim2,
            Base::SwapDims(o) if axis == o.dim2 => o.dim1,
            Base::SwapDims(_)
            | Base::Slice(_)
            | Base::RepeatDim(_)
            | Base::Cast(_)
            | Base::Flip(_) => axis,
            _ => return None,
        };
        // A part of it, or several of them, are none.
        (to.get(now) == from.get(axis)).then_some(now)
    }

    /// Whether an operation sorts an order, so that it finds the rank of each place. Indices that are no
    /// permutation, as of the best experts of each token, have no rank: sorted, they are a new order.
    fn is_inverse(&self, operation: &OperationIr, sort: &Sort<'_>) -> bool {
        let OperationIr::NumericInt(_, NumericOperationIr::ArgSort(_)) = operation else {
            return false;
        };
        self.permutations.get(&sort.input.id) == Some(&sort.axis)
            && self.axes(sort.input)[sort.axis]
    }

    /// The ranked axes of a result, but for sorts.
    fn made(
        &self,
        operation: &OperationIr,
        made: &TensorIr,
        differs: &dyn Fn(TensorId) -> bool,
    ) -> Vec<bool> {
        use BaseOperationIr as Base;
        let differs = |one: &TensorIr| differs(one.id) && !self.equal.contains(&one.id);
        match operation {
            OperationIr::BaseFloat(base)
            | OperationIr::BaseInt(base)
            | OperationIr::BaseBool(base) => match base {
                Base::Reshape(o) => {
                    let (from, to) = (o.input.shape.to_vec(), o.out.shape.to_vec());
                    reshaped(&self.axes(&o.input), &from, &to)
                }
                Base::Expand(o) => {
                    let own = self.axes(&o.input);
                    let new = made.shape.num_dims().saturating_sub(own.len());
                    let mut axes = vec![false; new];
                    let own = own.into_iter().enumerate();
                    // What is the same everywhere is in no other place.
                    axes.extend(own.map(|(axis, is_ranked)| {
                        is_ranked && o.input.shape[axis] == made.shape[new + axis]
                    }));
                    axes
                }
                Base::SwapDims(o) => {
                    let mut axes = self.axes(&o.input);
                    axes.swap(o.dim1, o.dim2);
                    axes
                }
                Base::Permute(o) => {
                    let own = self.axes(&o.input);
                    o.axes.iter().map(|axis| own[*axis]).collect()
                }
                Base::Unfold(o) => {
                    let mut axes = self.axes(&o.input);
                    axes.push(axes[o.dim]);
                    axes
                }
                Base::Slice(o) => self.axes(&o.tensor),
                Base::Select(o) => {
                    let mut axes = self.axes(&o.tensor);
                    let indices = self.axes(&o.indices)[0];
                    axes[o.dim] = indices || axes[o.dim] && !differs(&o.indices);
                    axes
                }
                Base::Gather(o) => {
                    let (own, indices) = (self.axes(&o.tensor), self.axes(&o.indices));
                    let pairs = own.into_iter().zip(indices).enumerate();
                    // Places that follow from the data lead from ranks back to what has them.
                    let axes = pairs.map(|(axis, (own, indices))| {
                        indices || own && (axis != o.dim || !differs(&o.indices))
                    });
                    axes.collect()
                }
                Base::SelectAssign(o) => {
                    let mut indices = vec![false; made.shape.num_dims()];
                    indices[o.dim] = self.axes(&o.indices)[0];
                    let read = [&o.tensor, &o.indices, &o.value];
                    self.written(read, &indices, o.dim, &differs)
                }
                Base::Scatter(o) => {
                    let read = [&o.tensor, &o.indices, &o.value];
                    self.written(read, &self.axes(&o.indices), o.dim, &differs)
                }
                Base::GatherNd(o) => {
                    let lost = self.has_ranked(&o.data) && !differs(&o.indices);
                    let mut axes = vec![lost; made.shape.num_dims()];
                    let mut indices = self.axes(&o.indices);
                    indices.pop();
                    axes.iter_mut()
                        .zip(indices)
                        .for_each(|(axis, index)| *axis |= index);
                    axes
                }
                Base::ScatterNd(o) => {
                    let written = Written {
                        differs: differs(&o.indices),
                        is_ranked: self.has_ranked(&o.indices),
                        found: self.found.contains(&o.indices.id),
                        values_differ: differs(&o.values),
                        are_values_ranked: self.has_ranked(&o.values),
                    };
                    match written.is_out_of_place() {
                        true => vec![true; made.shape.num_dims()],
                        false => self.axes(&o.data),
                    }
                }
                _ => self.place_by_place(operation, made),
            },
            OperationIr::Float(_, FloatOperationIr::Matmul(o))
                if o.lhs.shape.num_dims() == made.shape.num_dims()
                    && o.rhs.shape.num_dims() == made.shape.num_dims() =>
            {
                let (lhs, rhs) = (self.axes(&o.lhs), self.axes(&o.rhs));
                let rank = lhs.len();
                let axes = (0..rank).map(|axis| match rank - axis {
                    1 => rhs[axis],
                    2 => lhs[axis],
                    _ => lhs[axis] || rhs[axis],
                });
                axes.collect()
            }
            OperationIr::Module(ModuleOperationIr::Linear(o)) => {
                let mut axes = self.axes(&o.x);
                axes.pop();
                axes.push(false);
                axes
            }
            OperationIr::Module(ModuleOperationIr::Embedding(o)) => {
                let mut axes = self.axes(&o.indices);
                axes.push(false);
                axes
            }
            OperationIr::Module(ModuleOperationIr::Attention(o)) => {
                let [query, key, value] = [&o.query, &o.key, &o.value].map(|one| self.axes(one));
                let axes = (0..query.len()).map(|axis| match query.len() - axis {
                    1 => value[axis],
                    // Whatever the order of what it looks at.
                    2 => query[axis],
                    _ => query[axis] || key[axis] || value[axis],
                });
                axes.collect()
            }
            OperationIr::Module(
                ModuleOperationIr::Conv1d(_)
                | ModuleOperationIr::Conv2d(_)
                | ModuleOperationIr::Conv3d(_),
            ) => {
                let mut axes = self.place_by_place(operation, made);
                axes[1] = false;
                axes
            }
            _ => self.place_by_place(operation, made),
        }
    }

    /// Of a tensor that values are written to by indices along an axis; `ranked` are the axes of the indices.
    fn written(
        &self,
        [tensor, indices, value]: [&TensorIr; 3],
        ranked: &[bool],
        along: usize,
        differs: &dyn Fn(&TensorIr) -> bool,
    ) -> Vec<bool> {
        let (mut axes, values) = (self.axes(tensor), self.axes(value));
        let written = Written {
            differs: differs(indices),
            is_ranked: ranked[along],
            found: self.found.contains(&indices.id),
            values_differ: differs(value),
            are_values_ranked: values[along],
        };
        for (axis, own) in axes.iter_mut().enumerate() {
            *own |= match axis == along {
                true => written.is_out_of_place(),
                false => values[axis] || ranked[axis],
            };
        }
        axes
    }

    /// Of a result whose places are those of its operands. A place that sums up an axis is always that one, and one
    /// that goes with all places of an axis says nothing of them.
    fn place_by_place(&self, operation: &OperationIr, made: &TensorIr) -> Vec<bool> {
        let sizes = made.shape.to_vec();
        let mut axes = vec![false; sizes.len()];
        let broadcasts = broadcasts(operation);
        for read in operation.inputs().filter(|one| self.has_ranked(one)) {
            let own = self.axes(read);
            if own.len() != axes.len() {
                return vec![made.shape.num_elements() > 1; axes.len()];
            }
            for (axis, is_ranked) in own.into_iter().enumerate() {
                let kept = match read.shape[axis] {
                    1 => sizes[axis] == 1 || !broadcasts,
                    _ => sizes[axis] > 1,
                };
                axes[axis] |= is_ranked && kept;
            }
        }
        axes
    }
}

/// Values that are written to places by indices, along the axis that these are of.
struct Written {
    /// The indices differ.
    differs: bool,
    /// Their own places are ranks.
    is_ranked: bool,
    /// They say where something was found.
    found: bool,
    values_differ: bool,
    are_values_ranked: bool,
}

impl Written {
    /// Whether what is at a place of the result is then another thing in each pass.
    fn is_out_of_place(&self) -> bool {
        match (self.differs, self.is_ranked) {
            (false, _) => self.are_values_ranked,
            // What was taken in that order goes back to where it was.
            (true, true) => self.values_differ && !self.are_values_ranked,
            // A class is that class in both passes; a free slot is not.
            (true, false) => self.are_values_ranked || !self.found,
        }
    }
}

fn put(set: &mut HashSet<TensorId>, id: TensorId, is_in: bool) {
    match is_in {
        true => set.insert(id),
        false => set.remove(&id),
    };
}

/// Whether an operand of size 1 along an axis is used at all places of the result, and not a part of it.
fn broadcasts(operation: &OperationIr) -> bool {
    use BaseOperationIr::{Cat, SliceAssign};
    use NumericOperationIr::Pad;
    !matches!(
        operation,
        OperationIr::BaseFloat(Cat(_) | SliceAssign(_))
            | OperationIr::BaseInt(Cat(_) | SliceAssign(_))
            | OperationIr::BaseBool(Cat(_) | SliceAssign(_))
            | OperationIr::NumericFloat(_, Pad(_))
            | OperationIr::NumericInt(_, Pad(_))
            | OperationIr::Module(_)
    )
}

/// The operation as a sort, if it is one.
fn sort(operation: &OperationIr) -> Option<Sort<'_>> {
    use NumericOperationIr as Numeric;
    let (OperationIr::NumericFloat(_, numeric) | OperationIr::NumericInt(_, numeric)) = operation
    else {
        return None;
    };
    let (input, axis, order) = match numeric {
        Numeric::Sort(o) | Numeric::ArgSort(o) => (&o.input, o.dim, &o.out),
        Numeric::SortWithIndices(o) => (&o.input, o.dim, &o.out_indices),
        Numeric::TopK(o) | Numeric::ArgTopK(o) => (&o.input, o.axis, &o.out),
        Numeric::TopKWithIndices(o) => (&o.tensor, o.dim, &o.out_indices),
        _ => return None,
    };
    Some(Sort {
        input,
        axis,
        // Sorted floats do not say where they were.
        order: (!order.dtype.is_float()).then_some(order),
        gives_values: matches!(numeric, Numeric::Sort(_) | Numeric::TopK(_)),
    })
}

/// Whether an operation finds the place of the largest or smallest along an axis.
fn is_reduction_with_indices(operation: &OperationIr) -> bool {
    use NumericOperationIr as Numeric;
    matches!(
        operation,
        OperationIr::NumericFloat(
            _,
            Numeric::ArgMax(_)
                | Numeric::ArgMin(_)
                | Numeric::MaxDimWithIndices(_)
                | Numeric::MinDimWithIndices(_)
        ) | OperationIr::NumericInt(
            _,
            Numeric::ArgMax(_)
                | Numeric::ArgMin(_)
                | Numeric::MaxDimWithIndices(_)
                | Numeric::MinDimWithIndices(_)
        )
    )
}

/// The integers that an operation hands on without computing others.
fn handed_on(graph: &Graph, index: usize) -> Option<TensorId> {
    let OperationIr::BaseInt(base) = &graph.operations[index] else {
        return None;
    };
    let chooses = matches!(
        base,
        BaseOperationIr::Select(_)
            | BaseOperationIr::Gather(_)
            | BaseOperationIr::RepeatDim(_)
            | BaseOperationIr::Cast(_)
    );
    let first = graph.operations[index].inputs().next()?;
    (chooses || graph.node(index).is_view()).then_some(first.id)
}

/// Whether integers are the same in both passes. Those that nothing reads are not known, nor asked for.
fn is_same(id: TensorId, live: &Live) -> Result<bool, GraphError> {
    let of = |pass| live.get(&(id, pass)).cloned();
    match (of(Pass::Original), of(Pass::Replaced)) {
        (Some(original), Some(replaced)) => {
            let read = |tensor| host(tensor).map_err(unread);
            Ok(read(original)? == read(replaced)?)
        }
        _ => Ok(false),
    }
}

/// Where an axis is behind another shape, if it is neither split nor put together with others.
fn moved(axis: usize, from: &[usize], to: &[usize]) -> Option<usize> {
    let before = |sizes: &[usize]| sizes.iter().product::<usize>();
    (0..to.len()).find(|at| to[*at] == from[axis] && before(&to[..*at]) == before(&from[..axis]))
}

/// The ranked axes behind another shape: axes that are split or put together are ranked as a whole, and so are both
/// again where what was put together is split. Index sets that are flattened for a `select` count as reordered
/// as a whole.
fn reshaped(axes: &[bool], from: &[usize], to: &[usize]) -> Vec<bool> {
    let mut made = vec![false; to.len()];
    let (mut at, mut out) = (0, 0);
    while at < from.len() && out < to.len() {
        let (first, first_out) = (at, out);
        let (mut size, mut size_out) = (from[at], to[out]);
        at += 1;
        out += 1;
        while size != size_out {
            if size < size_out && at < from.len() {
                size *= from[at];
                at += 1;
            } else if size_out < size && out < to.len() {
                size_out *= to[out];
                out += 1;
            } else {
                break;
            }
        }
        let is_ranked = axes[first..at].contains(&true);
        let own = made[first_out..out].iter_mut().zip(&to[first_out..out]);
        own.for_each(|(axis, size)| *axis = is_ranked && (*size > 1 || size_out == 1));
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_shape_has_the_ranks_where_the_places_went() {
        let places = |axes: &[bool], from: &[usize], to: &[usize]| {
            let made = reshaped(axes, from, to).into_iter().enumerate();
            let ranked = made.filter_map(|(axis, is_ranked)| is_ranked.then_some(axis));
            ranked.collect::<Vec<_>>()
        };
        assert_eq!(places(&[true, false], &[6, 1], &[6]), [0]);
        assert_eq!(places(&[true, false], &[6, 4], &[1, 6, 4]), [1]);
        assert_eq!(places(&[false, true, false], &[2, 3, 4], &[6, 4]), [0]);
        assert_eq!(places(&[true, false], &[6, 4], &[2, 3, 4]), [0, 1]);
        assert_eq!(places(&[true, false], &[6, 4], &[6, 2, 2]), [0]);
        assert_eq!(places(&[false, true], &[6, 4], &[6, 2, 2]), [1, 2]);
        assert_eq!(places(&[true], &[1], &[1, 1]), [0]);
        assert_eq!(places(&[true, false], &[0, 4], &[0]), [0; 0]);
    }

    #[test]
    fn an_axis_is_found_behind_another_shape_while_it_is_one() {
        assert_eq!(moved(0, &[6, 1], &[6]), Some(0));
        assert_eq!(moved(1, &[2, 6], &[2, 1, 6, 1]), Some(2));
        assert_eq!(moved(1, &[3, 2], &[6]), None);
        assert_eq!(moved(0, &[6], &[2, 3]), None);
        assert_eq!(moved(0, &[4, 4, 1], &[1, 4, 4]), Some(1));
    }

    #[test]
    fn what_is_written_back_in_the_order_it_was_taken_in_is_in_its_place() {
        let taken = Written {
            differs: true,
            is_ranked: true,
            found: true,
            values_differ: true,
            are_values_ranked: true,
        };
        assert!(!taken.is_out_of_place());
        let given = Written {
            differs: false,
            ..taken
        };
        assert!(given.is_out_of_place());
        let class = |found| Written {
            differs: true,
            is_ranked: false,
            found,
            values_differ: true,
            are_values_ranked: false,
        };
        assert!(!class(true).is_out_of_place());
        assert!(class(false).is_out_of_place());
    }
}
