//! Arithmetic, comparisons, reductions, orders.

use burn::backend::ir::{DimOpIr, NumericOperationIr, PadModeIr, ScalarIr, ScalarOpIr, TensorIr};
use burn::tensor::DType;

use burn_lean_graph::Node;

use super::Written;
use crate::ElementType;
use crate::export::Writer;
use crate::export::open::Size;
use crate::onnx::Attribute;

impl Writer<'_> {
    pub(super) fn numeric(&mut self, op: &NumericOperationIr, node: Node<'_>) -> Written {
        use NumericOperationIr::*;
        match op {
            Add(o) => {
                let lhs = self.activation_operand(node, 0, &o.lhs)?;
                let rhs = self.activation_operand(node, 1, &o.rhs)?;
                self.put("Add", vec![lhs, rhs], &o.out, vec![]);
                Ok(())
            }
            AddScalar(o) => self.scalar_op("Add", o),
            Sub(o) => self.binary("Sub", &o.lhs, &o.rhs, &o.out),
            SubScalar(o) => self.scalar_op("Sub", o),
            Mul(o) => self.binary("Mul", &o.lhs, &o.rhs, &o.out),
            MulScalar(o) => self.scalar_op("Mul", o),
            Div(o) => self.binary("Div", &o.lhs, &o.rhs, &o.out),
            DivScalar(o) => self.scalar_op("Div", o),
            Rem(o) => {
                let (x, y) = (self.operand(&o.lhs)?, self.operand(&o.rhs)?);
                let name = self.remainder(x, y, o.lhs.dtype)?;
                self.set(&o.out, name);
                Ok(())
            }
            RemScalar(o) => {
                let (x, y) = (
                    self.operand(&o.lhs)?,
                    self.scalar_for(&o.out, o.rhs, o.lhs.dtype)?,
                );
                let name = self.remainder(x, y, o.lhs.dtype)?;
                self.set(&o.out, name);
                Ok(())
            }
            Powi(o) => self.binary("Pow", &o.lhs, &o.rhs, &o.out),
            PowiScalar(o) => self.scalar_op("Pow", o),
            Abs(o) => self.unary("Abs", &o.input, &o.out),
            Neg(o) => self.unary("Neg", &o.input, &o.out),
            Sign(o) => {
                let x = self.operand(&o.input)?;
                let name = self.sign(x, o.input.dtype)?;
                self.set(&o.out, name);
                Ok(())
            }
            Full(o) => self.full(&o.out, o.value),
            Sum(o) => self.reduce_to("ReduceSum", &o.input, None, &o.out),
            SumDim(o) => self.reduce_to("ReduceSum", &o.input, Some(&[o.axis]), &o.out),
            SumDims(o) => self.reduce_to("ReduceSum", &o.input, Some(&o.axes), &o.out),
            Mean(o) => self.mean(&o.input, None, &o.out),
            MeanDim(o) => self.mean(&o.input, Some(&[o.axis]), &o.out),
            Prod(o) => self.reduce_to("ReduceProd", &o.input, None, &o.out),
            ProdDim(o) => self.reduce_to("ReduceProd", &o.input, Some(&[o.axis]), &o.out),
            Max(o) => self.reduce_to("ReduceMax", &o.input, None, &o.out),
            MaxDim(o) => self.reduce_to("ReduceMax", &o.input, Some(&[o.axis]), &o.out),
            Min(o) => self.reduce_to("ReduceMin", &o.input, None, &o.out),
            MinDim(o) => self.reduce_to("ReduceMin", &o.input, Some(&[o.axis]), &o.out),
            MaxAbs(o) => self.max_abs(&o.input, None, &o.out),
            MaxAbsDim(o) => self.max_abs(&o.input, Some(&[o.axis]), &o.out),
            ArgMax(o) => self.arg("ReduceMax", &o.input, o.axis, &o.out),
            ArgMin(o) => self.arg("ReduceMin", &o.input, o.axis, &o.out),
            MaxDimWithIndices(o) => {
                self.reduce_to("ReduceMax", &o.tensor, Some(&[o.dim]), &o.out)?;
                self.arg("ReduceMax", &o.tensor, o.dim, &o.out_indices)
            }
            MinDimWithIndices(o) => {
                self.reduce_to("ReduceMin", &o.tensor, Some(&[o.dim]), &o.out)?;
                self.arg("ReduceMin", &o.tensor, o.dim, &o.out_indices)
            }
            TopK(o) => {
                let count = self.ints(&[o.accumulator_len as i64]);
                self.top(&o.input, o.axis, count, true, Some(&o.out), None)
            }
            ArgTopK(o) => {
                let count = self.ints(&[o.accumulator_len as i64]);
                self.top(&o.input, o.axis, count, true, None, Some(&o.out))
            }
            TopKWithIndices(o) => {
                let count = self.ints(&[o.k as i64]);
                let (values, indices) = (Some(&o.out), Some(&o.out_indices));
                self.top(&o.tensor, o.dim, count, true, values, indices)
            }
            Sort(o) => {
                let size = self.size_along(&o.input, o.dim);
                self.top(&o.input, o.dim, size, o.descending, Some(&o.out), None)
            }
            ArgSort(o) => {
                let size = self.size_along(&o.input, o.dim);
                self.top(&o.input, o.dim, size, o.descending, None, Some(&o.out))
            }
            SortWithIndices(o) => {
                let size = self.size_along(&o.input, o.dim);
                let (values, indices) = (Some(&o.out), Some(&o.out_indices));
                self.top(&o.input, o.dim, size, o.descending, values, indices)
            }
            Greater(o) => self.binary("Greater", &o.lhs, &o.rhs, &o.out),
            GreaterElem(o) => self.scalar_op("Greater", o),
            GreaterEqual(o) => self.binary("GreaterOrEqual", &o.lhs, &o.rhs, &o.out),
            GreaterEqualElem(o) => self.scalar_op("GreaterOrEqual", o),
            Lower(o) => self.binary("Less", &o.lhs, &o.rhs, &o.out),
            LowerElem(o) => self.scalar_op("Less", o),
            LowerEqual(o) => self.binary("LessOrEqual", &o.lhs, &o.rhs, &o.out),
            LowerEqualElem(o) => self.scalar_op("LessOrEqual", o),
            Clamp(o) => self.clip(&o.tensor, Some(o.min), Some(o.max), &o.out),
            ClampMin(o) => self.clip(&o.lhs, Some(o.rhs), None, &o.out),
            ClampMax(o) => self.clip(&o.lhs, None, Some(o.rhs), &o.out),
            CumSum(DimOpIr { input, out, axis }) => {
                let inputs = vec![self.operand(input)?, self.ints(&[*axis as i64])];
                self.put("CumSum", inputs, out, vec![]);
                Ok(())
            }
            Pad(o) => {
                let before = o.padding.iter().map(|(before, _)| *before as i64);
                let after = o.padding.iter().map(|(_, after)| *after as i64);
                let pads: Vec<i64> = before.chain(after).collect();
                let mut inputs = vec![self.operand(&o.input)?, self.ints(&pads)];
                let mode = match o.mode {
                    PadModeIr::Constant(value) => {
                        inputs.push(self.scalar(value, o.input.dtype)?);
                        "constant"
                    }
                    PadModeIr::Reflect => "reflect",
                    PadModeIr::Edge => "edge",
                };
                self.put("Pad", inputs, &o.out, vec![Attribute::Text("mode", mode)]);
                Ok(())
            }
            CumProd(_) | CumMin(_) | CumMax(_) => Err("ONNX has no operator for it".into()),
            IntRandom(_) => Err("its values are random".into()),
        }
    }

    fn scalar_op(&mut self, operator: &'static str, o: &ScalarOpIr) -> Written {
        self.with_scalar(operator, &o.lhs, o.rhs, &o.out)
    }

    /// -1, 0, 1. Not `Sign`, whose result for 0 is 1 in rten.
    fn sign(&mut self, x: String, dtype: DType) -> Result<String, crate::DeployError> {
        let zero = self.number(0.0, dtype)?;
        let kind = self.element(dtype, "a sign")?;
        let mut counted = |operator| {
            let holds = self.emit(operator, vec![x.clone(), zero.clone()], operator, vec![]);
            self.cast_to(holds, kind)
        };
        let signs = vec![counted("Greater"), counted("Less")];
        Ok(self.emit("Sub", signs, "Sign", vec![]))
    }

    /// With the sign of the divisor. ONNX has that for integers alone; of floats it has the exact
    /// remainder with the sign of the dividend.
    fn remainder(
        &mut self,
        x: String,
        y: String,
        dtype: DType,
    ) -> Result<String, crate::DeployError> {
        if !dtype.is_float() {
            return Ok(self.emit("Mod", vec![x, y], "Mod", vec![]));
        }
        let zero = self.number(0.0, dtype)?;
        let truncated = vec![Attribute::Int("fmod", 1)];
        let rest = self.emit("Mod", vec![x, y.clone()], "Mod", truncated);
        // Of different signs, and none of them 0.
        let signs = vec![
            self.sign(rest.clone(), dtype)?,
            self.sign(y.clone(), dtype)?,
        ];
        let product = self.emit("Mul", signs, "Mul", vec![]);
        let differ = self.emit("Less", vec![product, zero], "Less", vec![]);
        let moved = self.emit("Add", vec![rest.clone(), y], "Add", vec![]);
        Ok(self.emit("Where", vec![differ, moved, rest], "Where", vec![]))
    }

    fn reduce_to(
        &mut self,
        operator: &'static str,
        x: &TensorIr,
        axes: Option<&[usize]>,
        out: &TensorIr,
    ) -> Written {
        let x = self.operand(x)?;
        let name = self.reduce(operator, x, axes);
        self.set(out, name);
        Ok(())
    }

    /// Of integers the sum, divided: rten has their means not.
    fn mean(&mut self, x: &TensorIr, axes: Option<&[usize]>, out: &TensorIr) -> Written {
        if x.dtype.is_float() {
            return self.reduce_to("ReduceMean", x, axes, out);
        }
        let sizes = self.sizes(x);
        let along = match axes {
            Some(axes) => axes.iter().map(|axis| sizes[*axis].clone()).collect(),
            None => sizes,
        };
        let name = self.operand(x)?;
        let mut name = self.reduce("ReduceSum", name, axes);
        for size in along {
            let count = match size {
                Size::Fixed(size) => self.number(size as f64, x.dtype)?,
                Size::Open(..) => {
                    let count = self.size(&size);
                    self.cast_to(count, self.element(x.dtype, "a count")?)
                }
            };
            name = self.emit("Div", vec![name, count], "Div", vec![]);
        }
        self.set(out, name);
        Ok(())
    }

    fn max_abs(&mut self, x: &TensorIr, axes: Option<&[usize]>, out: &TensorIr) -> Written {
        let x = self.operand(x)?;
        let abs = self.emit("Abs", vec![x], "Abs", vec![]);
        let name = self.reduce("ReduceMax", abs, axes);
        self.set(out, name);
        Ok(())
    }

    fn arg(&mut self, reduce: &'static str, x: &TensorIr, axis: usize, out: &TensorIr) -> Written {
        let name = self.first(reduce, x, axis)?;
        let name = self.as_indices(name, out.dtype)?;
        self.set(out, name);
        Ok(())
    }

    /// The first place of the largest or smallest number along an axis. Not `ArgMax`, which gives the
    /// last one in rten. The first NaN, where there is one.
    fn first(
        &mut self,
        reduce: &'static str,
        x: &TensorIr,
        axis: usize,
    ) -> Result<String, crate::DeployError> {
        let size = self.sizes(x).swap_remove(axis);
        let (rank, is_float) = (x.shape.num_dims(), x.dtype.is_float());
        let x = self.operand(x)?;
        let extreme = self.reduce(reduce, x.clone(), Some(&[axis]));
        let is_there = self.emit("Equal", vec![x.clone(), extreme], "Equal", vec![]);
        let (places, last) = match &size {
            Size::Fixed(size) => {
                let size = *size;
                let mut shape = vec![1; rank];
                shape[axis] = size;
                let places = (0..size as i64).flat_map(i64::to_le_bytes).collect();
                let last = (size as i64 - 1).to_le_bytes().to_vec();
                (
                    self.initializer("places", ElementType::I64, &shape, places),
                    self.initializer("places", ElementType::I64, &[], last),
                )
            }
            Size::Open(..) => {
                let is_not = self.emit("Not", vec![is_there.clone()], "Not", vec![]);
                let both = vec![is_there.clone(), is_not];
                let all = self.emit("Or", both, "Or", vec![]);
                let ones = self.cast_to(all, ElementType::I64);
                let along = vec![ones, self.ints(&[axis as i64])];
                let counted = self.emit("CumSum", along, "CumSum", vec![]);
                let one = self.ints(&[1]);
                let places = self.emit("Sub", vec![counted, one], "Sub", vec![]);
                let last = self.reduce("ReduceMax", places.clone(), Some(&[axis]));
                (places, last)
            }
        };
        let inputs = vec![is_there, places.clone(), last];
        let found = self.emit("Where", inputs, "Where", vec![]);
        if !is_float {
            return Ok(self.reduce("ReduceMin", found, Some(&[axis])));
        }
        // Places of NaN before all others, by the size. The extreme does not tell: rten's may be without one.
        let size = self.size(&size);
        let before = self.emit("Sub", vec![places, size.clone()], "Sub", vec![]);
        let is_nan = self.emit("IsNaN", vec![x], "IsNaN", vec![]);
        let found = self.emit("Where", vec![is_nan, before, found], "Where", vec![]);
        let first = self.reduce("ReduceMin", found, Some(&[axis]));
        Ok(self.emit("Mod", vec![first, size], "Mod", vec![]))
    }

    /// ONNX gives indices as I64.
    fn as_indices(&mut self, name: String, dtype: DType) -> Result<String, crate::DeployError> {
        Ok(match self.element(dtype, "indices")? {
            ElementType::I64 => name,
            other => self.cast_to(name, other),
        })
    }

    /// How many numbers there are along an axis, as a list of one.
    fn size_along(&mut self, x: &TensorIr, axis: usize) -> String {
        let size = self.sizes(x).swap_remove(axis);
        self.size(&size)
    }

    fn top(
        &mut self,
        x: &TensorIr,
        axis: usize,
        count: String,
        largest: bool,
        values: Option<&TensorIr>,
        indices: Option<&TensorIr>,
    ) -> Written {
        let inputs = vec![self.operand(x)?, count];
        let attributes = vec![
            Attribute::Int("axis", axis as i64),
            Attribute::Int("largest", i64::from(largest)),
            Attribute::Int("sorted", 1),
        ];
        let [top, at] = self.emit_all_in("", "TopK", inputs, ["TopK", "TopK_indices"], attributes);
        if let Some(values) = values {
            self.set(values, top);
        }
        if let Some(indices) = indices {
            let at = self.as_indices(at, indices.dtype)?;
            self.set(indices, at);
        }
        Ok(())
    }

    fn clip(
        &mut self,
        x: &TensorIr,
        min: Option<ScalarIr>,
        max: Option<ScalarIr>,
        out: &TensorIr,
    ) -> Written {
        let mut inputs = vec![self.operand(x)?];
        inputs.push(match min {
            Some(min) => self.scalar(min, x.dtype)?,
            None => String::new(),
        });
        if let Some(max) = max {
            inputs.push(self.scalar(max, x.dtype)?);
        }
        self.put("Clip", inputs, out, vec![]);
        Ok(())
    }
}
