//! Places of axes through the operations of a graph.

mod layers;

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    ActivationOperationIr as Activation, BaseOperationIr as Base, FloatOperationIr as Float,
    NumericOperationIr as Numeric, OperationIr, TensorId, TensorIr,
};

use super::classes::Classes;
use super::reshape::{Splits, reshaped};
use super::{FixedBy, UnitRole};
use crate::graph::describe::operands;
use crate::{Graph, operation_name};

/// For each axis of a tensor its places.
type Axes = Vec<Vec<u32>>;

/// Follows places from parameters to results.
pub(super) struct Flow<'a> {
    graph: &'a Graph,
    classes: &'a mut Classes,
    axes: HashMap<TensorId, Axes>,
    /// Parameters, and views of them.
    weights: HashSet<TensorId>,
    /// What is computed from parameters and constants alone.
    derived: HashSet<TensorId>,
    /// Where numbers that are written into the model may become smaller, too.
    splits: Option<&'a mut Splits>,
}

impl<'a> Flow<'a> {
    /// `own` are the places of the parameters.
    pub(super) fn new(
        graph: &'a Graph,
        own: &[Axes],
        classes: &'a mut Classes,
        splits: Option<&'a mut Splits>,
    ) -> Self {
        let parameters = graph.parameters().iter().map(|one| one.tensor);
        Self {
            graph,
            classes,
            weights: parameters.clone().collect(),
            derived: parameters
                .clone()
                .chain(graph.constants.keys().copied())
                .collect(),
            axes: parameters.zip(own.iter().cloned()).collect(),
            splits,
        }
    }

    pub(super) fn run(mut self) {
        let graph = self.graph;
        for node in graph.nodes() {
            let operation = node.operation();
            if self.step(operation).is_none() {
                self.unknown(operation);
            }
            let reads = operands(graph, operation);
            if !node.is_random() && reads.iter().all(|id| self.derived.contains(id)) {
                let made = operation.outputs().map(|output| output.id);
                self.derived.extend(made);
            }
        }
        for id in graph.outputs() {
            for places in self.axes.remove(id).unwrap_or_default() {
                self.classes.fix(&places, &FixedBy::Output);
            }
        }
    }

    /// The places of a tensor; of an input or a constant, new ones that cannot go.
    fn of(&mut self, tensor: &TensorIr) -> Axes {
        if let Some(axes) = self.axes.get(&tensor.id) {
            return axes.clone();
        }
        let why = match self.graph.inputs().contains(&tensor.id) {
            true => FixedBy::Input,
            false => FixedBy::Constant,
        };
        let axes: Axes = tensor
            .shape
            .iter()
            .map(|n| self.classes.pinned(*n, why.clone()))
            .collect();
        self.axes.insert(tensor.id, axes.clone());
        axes
    }

    fn set(&mut self, tensor: &TensorIr, axes: Axes) {
        self.axes.insert(tensor.id, axes);
    }

    /// Places that nothing is cut out of: examples, positions.
    fn positions(&mut self, count: usize) -> Vec<u32> {
        self.classes.pinned(count, FixedBy::Input)
    }

    fn is_derived(&self, tensor: &TensorIr) -> bool {
        self.derived.contains(&tensor.id)
    }

    /// `None` for an operation that is not known here.
    fn step(&mut self, operation: &OperationIr) -> Option<()> {
        match operation {
            OperationIr::BaseFloat(
                Base::MaskFill(_) | Base::MaskWhere(_) | Base::Equal(_) | Base::EqualElem(_),
            ) => self.elementwise(operation),
            OperationIr::BaseFloat(base) => self.base(base),
            OperationIr::Float(_, Float::Matmul(op)) => self.matmul(&op.lhs, &op.rhs, &op.out),
            OperationIr::NumericFloat(_, numeric) => match numeric {
                Numeric::MeanDim(op) | Numeric::MaxDim(op) | Numeric::MinDim(op) => {
                    self.reduce(&op.input, &[op.axis], &op.out)
                }
                Numeric::SumDim(op) => self.sum(&op.input, &[op.axis], &op.out),
                Numeric::SumDims(op) => self.sum(&op.input, &op.axes, &op.out),
                numeric if is_elementwise(numeric) => self.elementwise(operation),
                _ => None,
            },
            OperationIr::Float(_, float) if !is_mixing(float) => self.elementwise(operation),
            OperationIr::Activation(activation) => match activation {
                Activation::Softmax(op) | Activation::LogSoftmax(op) | Activation::Softmin(op) => {
                    let axes = self.of(&op.input);
                    self.classes.fix(&axes[op.axis], &FixedBy::Reduction);
                    self.set(&op.out, axes);
                    Some(())
                }
                _ => self.elementwise(operation),
            },
            OperationIr::Module(module) => self.module(module),
            // Of integers and booleans there are no units.
            _ => (!operation.outputs().any(|out| out.dtype.is_float())).then_some(()),
        }
    }

    /// What operands and results have cannot go.
    fn unknown(&mut self, operation: &OperationIr) {
        let why = match operation.inputs().any(|one| one.dtype.is_float()) {
            true => FixedBy::Operation(operation_name(operation)),
            // A tensor of zeros, of a size that the forward pass knows.
            false => FixedBy::Written,
        };
        for operand in operation.inputs().filter(|one| one.dtype.is_float()) {
            for places in self.of(operand) {
                self.classes.fix(&places, &why);
            }
        }
        for out in operation.outputs() {
            let axes = out.shape.iter();
            let axes = axes.map(|n| self.classes.pinned(*n, why.clone())).collect();
            self.set(out, axes);
        }
    }

    /// Each number of the result comes from those at its place.
    fn elementwise(&mut self, operation: &OperationIr) -> Option<()> {
        let out = operation.outputs().next()?;
        let operands: Vec<&TensorIr> = operation
            .inputs()
            .filter(|one| one.dtype.is_float())
            .collect();
        if operands
            .iter()
            .any(|one| one.shape.num_dims() != out.shape.num_dims())
        {
            return None;
        }
        let all: Vec<Axes> = operands.iter().map(|one| self.of(one)).collect();
        // Masks, too.
        let computed: Vec<&TensorIr> = operation
            .inputs()
            .filter(|one| !self.is_derived(one))
            .collect();
        // One that is given, or was spread before: which places it treats alike is not known.
        let unfollowed =
            |one: &&TensorIr| !one.dtype.is_float() && !self.axes.contains_key(&one.id);
        let is_masked = computed.iter().any(unfollowed);
        let axes = (0..out.shape.num_dims()).map(|axis| {
            let size = out.shape[axis];
            let mut known: Option<Vec<u32>> = None;
            for axes in &all {
                let places = &axes[axis];
                match &known {
                    _ if places.len() != size => self.classes.fix(places, &FixedBy::Broadcast),
                    Some(first) => self.classes.join_all(first, places),
                    None => known = Some(places.clone()),
                }
            }
            let known = known.unwrap_or_else(|| self.positions(size));
            let is_spread = |one: &&TensorIr| one.shape.get(axis).is_some_and(|n| *n != size);
            if is_masked || computed.iter().any(is_spread) {
                self.classes.vary(&known);
            }
            known
        });
        let axes = axes.collect();
        // A mask on a weight is a weight.
        let given = |one: &&TensorIr| self.graph.constants.contains_key(&one.id);
        let is_weight = |one: &&TensorIr| self.weights.contains(&one.id);
        let are_weights = operands.iter().all(|one| given(one) || is_weight(one));
        if are_weights && operands.iter().any(is_weight) {
            self.weights.insert(out.id);
        }
        self.set(out, axes);
        Some(())
    }

    /// A sum of constants is another one where there are more of them: examples, places of a sequence.
    fn sum(&mut self, input: &TensorIr, over: &[usize], out: &TensorIr) -> Option<()> {
        if !self.is_derived(input) {
            for (axis, places) in self.of(input).iter().enumerate() {
                if !over.contains(&axis) {
                    self.classes.vary(places);
                }
            }
        }
        self.reduce(input, over, out)
    }

    fn reduce(&mut self, input: &TensorIr, over: &[usize], out: &TensorIr) -> Option<()> {
        let mut axes = self.of(input);
        for axis in over {
            self.classes.fix(&axes[*axis], &FixedBy::Reduction);
            axes[*axis] = self.positions(1);
        }
        self.set(out, axes);
        Some(())
    }

    fn base(&mut self, base: &Base) -> Option<()> {
        let (input, out, axes) = match base {
            Base::Reshape(op) => {
                let axes = self.of(&op.input);
                let to = (op.out.id, &op.out.shape[..]);
                let axes = reshaped(&axes, to, self.classes, self.splits.as_deref_mut());
                (&op.input, &op.out, axes)
            }
            Base::Expand(op) => {
                let mut axes = self.of(&op.input);
                while axes.len() < op.out.shape.num_dims() {
                    axes.insert(0, self.positions(1));
                }
                for (places, size) in axes.iter_mut().zip(op.out.shape.iter()) {
                    if places.len() != *size {
                        self.classes.fix(places, &FixedBy::Broadcast);
                        *places = self.positions(*size);
                    }
                }
                (&op.input, &op.out, axes)
            }
            Base::SwapDims(op) => {
                let mut axes = self.of(&op.input);
                axes.swap(op.dim1, op.dim2);
                (&op.input, &op.out, axes)
            }
            Base::Permute(op) => {
                let axes = self.of(&op.input);
                let axes = op.axes.iter().map(|axis| axes[*axis].clone()).collect();
                (&op.input, &op.out, axes)
            }
            Base::Flip(op) => {
                let mut axes = self.of(&op.input);
                op.axes.iter().for_each(|axis| axes[*axis].reverse());
                (&op.input, &op.out, axes)
            }
            Base::Cast(op) => (&op.input, &op.out, self.of(&op.input)),
            Base::Slice(op) => {
                let mut axes = self.of(&op.tensor);
                for (places, slice) in axes.iter_mut().zip(&op.ranges) {
                    let (range, step) = slice.to_range_and_step(places.len());
                    let cut = places.get(range)?.iter().copied();
                    *places = match step {
                        1.. => cut.step_by(step.unsigned_abs()).collect(),
                        _ => cut.rev().step_by(step.unsigned_abs()).collect(),
                    };
                }
                (&op.tensor, &op.out, axes)
            }
            Base::RepeatDim(op) => {
                let mut axes = self.of(&op.tensor);
                axes[op.dim] = axes[op.dim].repeat(op.times);
                (&op.tensor, &op.out, axes)
            }
            // A table that is looked up: its rows are read whole.
            Base::Select(op) => {
                let mut axes = self.of(&op.tensor);
                self.classes.fix(&axes[op.dim], &FixedBy::Input);
                if self.weights.contains(&op.tensor.id) {
                    let others = (0..axes.len()).filter(|axis| *axis != op.dim);
                    others.for_each(|axis| self.classes.play(&axes[axis], UnitRole::Makes));
                }
                axes[op.dim] = self.positions(op.out.shape[op.dim]);
                self.set(&op.out, axes);
                return Some(());
            }
            Base::Cat(op) => {
                let all: Vec<Axes> = op.tensors.iter().map(|one| self.of(one)).collect();
                let mut axes = all.first()?.clone();
                for others in &all[1..] {
                    for (axis, places) in others.iter().enumerate() {
                        match axis == op.dim {
                            true => axes[axis].extend(places),
                            false => self.classes.join_all(&axes[axis], places),
                        }
                    }
                }
                self.set(&op.out, axes);
                return Some(());
            }
            _ => return None,
        };
        if self.weights.contains(&input.id) {
            self.weights.insert(out.id);
        }
        self.set(out, axes);
        Some(())
    }
}

/// Whether a number of the result comes from those at its place alone.
fn is_elementwise(numeric: &Numeric) -> bool {
    matches!(
        numeric,
        Numeric::Add(_)
            | Numeric::AddScalar(_)
            | Numeric::Sub(_)
            | Numeric::SubScalar(_)
            | Numeric::Div(_)
            | Numeric::DivScalar(_)
            | Numeric::Rem(_)
            | Numeric::RemScalar(_)
            | Numeric::Mul(_)
            | Numeric::MulScalar(_)
            | Numeric::Abs(_)
            | Numeric::Clamp(_)
            | Numeric::ClampMin(_)
            | Numeric::ClampMax(_)
            | Numeric::Powi(_)
            | Numeric::PowiScalar(_)
            | Numeric::Neg(_)
            | Numeric::Sign(_)
            // Their masks have the places of what is compared.
            | Numeric::Greater(_)
            | Numeric::GreaterElem(_)
            | Numeric::GreaterEqual(_)
            | Numeric::GreaterEqualElem(_)
            | Numeric::Lower(_)
            | Numeric::LowerElem(_)
            | Numeric::LowerEqual(_)
            | Numeric::LowerEqualElem(_)
    )
}

/// Whether a number of the result comes from others than those at its place.
fn is_mixing(float: &Float) -> bool {
    matches!(
        float,
        Float::Matmul(_)
            | Float::Cross(_)
            | Float::Random(_)
            | Float::Quantize(_)
            | Float::Dequantize(_)
            | Float::GridSample2d(_)
    )
}
