//! How elements are moved, chosen and compared.

use burn::backend::ir::{BaseOperationIr, ScalarIr, SliceOpIr, TensorIr};
use burn::tensor::{DType, IndexingUpdateOp};

use burn_lean_graph::Node;

use super::{Unwritten, Written, to_ints};
use crate::export::Writer;
use crate::export::open::Size;
use crate::export::writer::scalar_bytes;
use crate::onnx::Attribute;
use crate::{DeployError, ElementType};

impl Writer<'_> {
    pub(super) fn base(&mut self, op: &BaseOperationIr, node: Node<'_>) -> Written {
        use BaseOperationIr::*;
        match op {
            Reshape(o) => {
                let x = self.operand(&o.input)?;
                let name = self.reshape(x, &o.out);
                self.set(&o.out, name);
            }
            Expand(o) => {
                let x = self.operand(&o.input)?;
                // Axes come in front by broadcasting, too.
                let shape = self.shape(&o.out);
                self.put("Expand", vec![x, shape], &o.out, vec![]);
            }
            SwapDims(o) => {
                let mut axes: Vec<i64> = (0..o.input.shape.num_dims() as i64).collect();
                axes.swap(o.dim1, o.dim2);
                self.transpose(&o.input, axes, &o.out)?;
            }
            Permute(o) => self.transpose(&o.input, to_ints(&o.axes), &o.out)?,
            Flip(o) => {
                let x = self.operand(&o.input)?;
                let count = o.axes.len();
                let name = self.slice(
                    x,
                    &vec![-1; count],
                    &vec![i64::MIN + 1; count],
                    &to_ints(&o.axes),
                    &vec![-1; count],
                );
                self.set(&o.out, name);
            }
            Slice(o) => {
                let x = self.operand(&o.tensor)?;
                let name = self.slice_ranges(x, o, node);
                self.set(&o.out, name);
            }
            SliceAssign(o) => {
                let (x, value) = (self.operand(&o.tensor)?, self.operand(&o.value)?);
                let mut partial = Vec::new();
                let mut may_be_beyond = false;
                for (axis, (range, size)) in o.ranges.iter().zip(o.tensor.shape.iter()).enumerate()
                {
                    if range.step != 1 {
                        return Err("it assigns with a step".into());
                    }
                    if !self.is_whole(&o.tensor, axis, node) {
                        let range = range.to_range(*size);
                        let size = match self.sizes(&o.tensor)[axis] {
                            Size::Fixed(size) => size as i64,
                            Size::Open(..) => {
                                may_be_beyond = true;
                                i64::MAX
                            }
                        };
                        partial.push((axis, range.start as i64, range.end as i64, size));
                    }
                }
                let mut name = self.assign(x, value, &partial);
                if may_be_beyond {
                    name = self.in_shape(name, &o.out);
                }
                self.set(&o.out, name);
            }
            Select(o) if o.dim == 0 && self.weights.is_quantized(o.tensor.id) => {
                let indices = self.indices(&o.indices)?;
                let name = self.table(node, &o.tensor, indices, &o.out)?;
                self.set(&o.out, name);
            }
            Select(o) => {
                let inputs = vec![self.operand(&o.tensor)?, self.indices(&o.indices)?];
                let axis = vec![Attribute::Int("axis", o.dim as i64)];
                self.put("Gather", inputs, &o.out, axis);
            }
            Gather(o) => {
                let inputs = vec![self.operand(&o.tensor)?, self.indices(&o.indices)?];
                let axis = vec![Attribute::Int("axis", o.dim as i64)];
                self.put("GatherElements", inputs, &o.out, axis);
            }
            Scatter(o) => {
                let (x, value) = (self.operand(&o.tensor)?, self.operand(&o.value)?);
                let inputs = [x, self.indices(&o.indices)?, value];
                self.scatter(inputs, o.dim, &o.update, &o.out);
            }
            GatherNd(o) => {
                let inputs = vec![self.operand(&o.data)?, self.wide_indices(&o.indices)?];
                self.put("GatherND", inputs, &o.out, vec![]);
            }
            ScatterNd(o) => {
                let (x, values) = (self.operand(&o.data)?, self.operand(&o.values)?);
                let inputs = vec![x, self.wide_indices(&o.indices)?, values];
                let attributes = reduction(&o.reduction).into_iter().collect();
                self.put("ScatterND", inputs, &o.out, attributes);
            }
            MaskWhere(o) => {
                let inputs = self.operands(&[&o.mask, &o.value, &o.tensor])?;
                self.put("Where", inputs, &o.out, vec![]);
            }
            MaskFill(o) => {
                let inputs = vec![
                    self.operand(&o.mask)?,
                    self.scalar(o.value, o.tensor.dtype)?,
                    self.operand(&o.tensor)?,
                ];
                self.put("Where", inputs, &o.out, vec![]);
            }
            RepeatDim(o) => {
                let mut times = vec![Size::Fixed(1); o.tensor.shape.num_dims()];
                times[o.dim] = self.open.numbers(node.index())[0].clone();
                let inputs = vec![self.operand(&o.tensor)?, self.list(&times, None)];
                self.put("Tile", inputs, &o.out, vec![]);
            }
            Cat(o) => {
                let parts = o.tensors.iter().enumerate();
                let inputs = parts.map(|(k, part)| self.activation_operand(node, k, part));
                let inputs = inputs.collect::<Result<_, _>>()?;
                let axis = vec![Attribute::Int("axis", o.dim as i64)];
                self.put("Concat", inputs, &o.out, axis);
            }
            Cast(o) => self.cast(&o.input, &o.out)?,
            Empty(o) | Zeros(o) => self.full(&o.out, ScalarIr::Int(0))?,
            Ones(o) => self.full(&o.out, ScalarIr::Int(1))?,
            Equal(o) => self.binary("Equal", &o.lhs, &o.rhs, &o.out)?,
            EqualElem(o) => self.with_scalar("Equal", &o.lhs, o.rhs, &o.out)?,
            NotEqual(o) => {
                let inputs = self.operands(&[&o.lhs, &o.rhs])?;
                let equal = self.emit("Equal", inputs, "Equal", vec![]);
                self.put("Not", vec![equal], &o.out, vec![]);
            }
            NotEqualElem(o) => {
                let rhs = self.scalar_for(&o.out, o.rhs, o.lhs.dtype)?;
                let inputs = vec![self.operand(&o.lhs)?, rhs];
                let equal = self.emit("Equal", inputs, "Equal", vec![]);
                self.put("Not", vec![equal], &o.out, vec![]);
            }
            All(o) => self.test("ReduceMin", &o.input, None, &o.out)?,
            Any(o) => self.test("ReduceMax", &o.input, None, &o.out)?,
            AllDim(o) => self.test("ReduceMin", &o.input, Some(o.axis), &o.out)?,
            AnyDim(o) => self.test("ReduceMax", &o.input, Some(o.axis), &o.out)?,
            SelectAssign(o) => {
                let (x, value) = (self.operand(&o.tensor)?, self.operand(&o.value)?);
                // A number for each element of the value, along its axis.
                let mut along = vec![1; o.value.shape.num_dims()];
                along[o.dim] = -1;
                let inputs = vec![self.indices(&o.indices)?, self.ints(&along)];
                let indices = self.emit("Reshape", inputs, "Reshape", vec![]);
                let inputs = vec![indices, self.shape(&o.value)];
                let indices = self.emit("Expand", inputs, "Expand", vec![]);
                self.scatter([x, indices, value], o.dim, &o.update, &o.out);
            }
            Unfold(_) => return Err("this crate does not write it".into()),
        }
        Ok(())
    }

    /// What says which elements are meant; ONNX takes I32 and I64.
    pub(super) fn indices(&mut self, tensor: &TensorIr) -> Result<String, DeployError> {
        match tensor.dtype {
            DType::I32 => self.operand(tensor),
            _ => self.wide_indices(tensor),
        }
    }

    /// As [`indices`](Self::indices), for operators that take I64 alone.
    fn wide_indices(&mut self, tensor: &TensorIr) -> Result<String, DeployError> {
        let name = self.operand(tensor)?;
        Ok(match tensor.dtype {
            DType::I64 => name,
            _ => self.cast_to(name, ElementType::I64),
        })
    }

    pub(super) fn operands(&mut self, tensors: &[&TensorIr]) -> Result<Vec<String>, Unwritten> {
        tensors
            .iter()
            .map(|tensor| Ok(self.operand(tensor)?))
            .collect()
    }

    /// To the shape of `out`; one open axis is found by itself.
    pub(crate) fn reshape(&mut self, x: String, out: &TensorIr) -> String {
        let sizes = self.sizes(out);
        let open = sizes.iter().filter(|size| size.is_open()).count();
        let has_zero = sizes.contains(&Size::Fixed(0));
        // The only one, and one that nothing tells before.
        let is_found = |size: &Size| match open {
            1 if !has_zero => size.is_open(),
            _ => self.open.is_of(size, out.id),
        };
        let found = sizes.iter().position(is_found);
        let shape = self.list(&sizes, found);
        // Else 0 is the size that an axis had, also that of an empty batch.
        let attributes = match has_zero || open > 1 {
            true => vec![Attribute::Int("allowzero", 1)],
            false => vec![],
        };
        self.emit("Reshape", vec![x, shape], "Reshape", attributes)
    }

    /// To the shape of `out`, which is an error for what has another one: a runtime cuts ranges off where a tensor ends,
    /// and Burn refuses them.
    fn in_shape(&mut self, x: String, out: &TensorIr) -> String {
        let sizes = self.sizes(out);
        if sizes.iter().any(|size| self.open.is_of(size, out.id)) {
            return x;
        }
        let shape = self.list(&sizes, None);
        let may_have_zero = |size: &Size| size.is_open() || *size == Size::Fixed(0);
        let attributes = match sizes.iter().any(may_have_zero) {
            true => vec![Attribute::Int("allowzero", 1)],
            false => vec![],
        };
        self.emit("Reshape", vec![x, shape], "Reshape", attributes)
    }

    /// A tensor in which values are put where indices say. The update that Burn has for bools is *or*: the largest of
    /// numbers, since a runtime may add bools up.
    fn scatter(
        &mut self,
        [x, indices, value]: [String; 3],
        axis: usize,
        update: &IndexingUpdateOp,
        out: &TensorIr,
    ) {
        let mut attributes = vec![Attribute::Int("axis", axis as i64)];
        if matches!(out.dtype, DType::Bool(_)) {
            let [x, value] = [x, value].map(|bools| self.cast_to(bools, ElementType::I32));
            attributes.push(Attribute::Text("reduction", "max"));
            let inputs = vec![x, indices, value];
            let name = self.emit("ScatterElements", inputs, "ScatterElements", attributes);
            let name = self.cast_to(name, ElementType::Bool);
            self.set(out, name);
            return;
        }
        attributes.extend(reduction(update));
        self.put("ScatterElements", vec![x, indices, value], out, attributes);
    }

    fn transpose(&mut self, x: &TensorIr, axes: Vec<i64>, out: &TensorIr) -> Written {
        let x = self.operand(x)?;
        self.put(
            "Transpose",
            vec![x],
            out,
            vec![Attribute::Ints("perm", axes)],
        );
        Ok(())
    }

    pub(super) fn slice(
        &mut self,
        x: String,
        starts: &[i64],
        ends: &[i64],
        axes: &[i64],
        steps: &[i64],
    ) -> String {
        let bounds = [starts, ends, axes, steps].map(|list| self.ints(list));
        let inputs = std::iter::once(x).chain(bounds).collect();
        self.emit("Slice", inputs, "Slice", vec![])
    }

    /// Whether the range of a node along an axis of `tensor` takes all of it.
    fn is_whole(&self, tensor: &TensorIr, axis: usize, node: Node<'_>) -> bool {
        let (bounds, _) = self.open.numbers(node.index()).as_chunks::<2>();
        let [start, end] = &bounds[axis];
        *start == Size::Fixed(0) && *end == self.sizes(tensor)[axis]
    }

    /// What Burn's ranges take; those of all of an axis are left out.
    fn slice_ranges(&mut self, x: String, o: &SliceOpIr, node: Node<'_>) -> String {
        let mut bounds: [Vec<i64>; 4] = Default::default();
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        let (mut axes, mut steps) = (Vec::new(), Vec::new());
        let (taken, _) = self.open.numbers(node.index()).as_chunks::<2>();
        let sizes = self.sizes(&o.tensor);
        let mut may_be_beyond = false;
        for (axis, (range, taken)) in o.ranges.iter().zip(taken).enumerate() {
            if range.step == 1 && self.is_whole(&o.tensor, axis, node) {
                continue;
            }
            let [Size::Fixed(start), Size::Fixed(end)] = *taken else {
                let [start, end] = taken.clone();
                starts.push(start);
                ends.push(end);
                axes.push(axis as i64);
                steps.push(range.step as i64);
                continue;
            };
            may_be_beyond |= sizes[axis].is_open();
            let (start, end) = match range.step > 0 {
                true => (start as i64, end as i64),
                // From the last one down; what is before the first has no number.
                false => match start {
                    0 => (end as i64 - 1, i64::MIN + 1),
                    start => (end as i64 - 1, start as i64 - 1),
                },
            };
            let bound = [start, end, axis as i64, range.step as i64];
            for (list, value) in bounds.iter_mut().zip(bound) {
                list.push(value);
            }
        }
        let mut name = x;
        if !bounds[0].is_empty() {
            let [starts, ends, axes, steps] = &bounds;
            name = self.slice(name, starts, ends, axes, steps);
        }
        if !axes.is_empty() {
            may_be_beyond = true;
            let ends = [self.list(&starts, None), self.list(&ends, None)];
            let along = [self.ints(&axes), self.ints(&steps)];
            let inputs = std::iter::once(name).chain(ends).chain(along).collect();
            name = self.emit("Slice", inputs, "Slice", vec![]);
        }
        match may_be_beyond {
            true => self.in_shape(name, &o.out),
            false => name,
        }
    }

    /// `x` with a part of it, a range along each of some axes, replaced by `value`: along the first
    /// of them, what is before, the slab with its own part replaced, and what is after.
    fn assign(&mut self, x: String, value: String, ranges: &[(usize, i64, i64, i64)]) -> String {
        let Some(((axis, start, end, size), others)) = ranges.split_first() else {
            return value;
        };
        let axes = [*axis as i64];
        let slab = match others.is_empty() {
            true => value,
            false => {
                let slab = self.slice(x.clone(), &[*start], &[*end], &axes, &[1]);
                self.assign(slab, value, others)
            }
        };
        let mut parts = Vec::new();
        if *start > 0 {
            parts.push(self.slice(x.clone(), &[0], &[*start], &axes, &[1]));
        }
        parts.push(slab);
        if end < size {
            parts.push(self.slice(x, &[*end], &[*size], &axes, &[1]));
        }
        let axis = vec![Attribute::Int("axis", axes[0])];
        self.emit("Concat", parts, "Concat", axis)
    }

    pub(super) fn cast(&mut self, x: &TensorIr, out: &TensorIr) -> Written {
        let to = self.element(out.dtype, "the result of a cast")?;
        let name = self.operand(x)?;
        let name = self.cast_to(name, to);
        let name = self.narrowed(name, x.dtype, out.dtype)?;
        self.set(out, name);
        Ok(())
    }

    pub(crate) fn cast_to(&mut self, x: String, to: ElementType) -> String {
        self.emit(
            "Cast",
            vec![x],
            "Cast",
            vec![Attribute::Int("to", to as i64)],
        )
    }

    /// A tensor of one number, whose shape depends on the batch.
    pub(super) fn full(&mut self, out: &TensorIr, value: ScalarIr) -> Written {
        let element = self.element(out.dtype, "a constant")?;
        let shape = self.shape(out);
        let value = Attribute::Element("value", element, scalar_bytes(value, element));
        self.put("ConstantOfShape", vec![shape], out, vec![value]);
        Ok(())
    }

    /// Whether all, or any, of the elements are not zero, along an axis or at all.
    fn test(
        &mut self,
        reduce: &'static str,
        x: &TensorIr,
        axis: Option<usize>,
        out: &TensorIr,
    ) -> Written {
        let mut name = self.operand(x)?;
        if !matches!(x.dtype, DType::Bool(_)) {
            // Not a cast to bools: rten's makes 0 of 0.5 and NaN, and leaves -1, which is less than 0.
            let zero = self.number(0.0, x.dtype)?;
            let is_zero = self.emit("Equal", vec![name, zero], "Equal", vec![]);
            name = self.emit("Not", vec![is_zero], "Not", vec![]);
        }
        name = self.cast_to(name, ElementType::I32);
        name = self.reduce(reduce, name, axis.map(|axis| vec![axis]).as_deref());
        name = self.cast_to(name, ElementType::Bool);
        self.set(out, name);
        Ok(())
    }

    /// Along axes, which stay with a size of 1; or of all elements, to a list of one.
    pub(super) fn reduce(
        &mut self,
        operator: &'static str,
        x: String,
        axes: Option<&[usize]>,
    ) -> String {
        match axes {
            // A list without axes means all of them in ONNX.
            Some([]) => x,
            Some(axes) => {
                let axes = self.ints(&to_ints(axes));
                let keep = vec![Attribute::Int("keepdims", 1)];
                self.emit(operator, vec![x, axes], operator, keep)
            }
            None => {
                let keep = vec![Attribute::Int("keepdims", 0)];
                let number = self.emit(operator, vec![x], operator, keep);
                let one = self.ints(&[1]);
                self.emit("Reshape", vec![number, one], "Reshape", vec![])
            }
        }
    }
}

fn reduction(update: &IndexingUpdateOp) -> Option<Attribute> {
    let name = match update {
        IndexingUpdateOp::Assign => return None,
        IndexingUpdateOp::Add => "add",
        IndexingUpdateOp::Mul => "mul",
        IndexingUpdateOp::Min => "min",
        IndexingUpdateOp::Max => "max",
    };
    Some(Attribute::Text("reduction", name))
}
