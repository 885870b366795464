//! How a weight is read: which of its axes is that of the output channels, and whether it is a table, too.

use burn::backend::ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorId,
};

use super::{Place, SiteUse};
use crate::{Graph, Node, Parameter, Role};

impl Graph {
    /// The axis of the output channels of a weight, as it lies in its parameter; `None` where
    /// something else than views is between them.
    ///
    /// `weight` is one of [`Role::Weight`].
    pub fn output_channels(&self, weight: &SiteUse) -> Option<usize> {
        let Place::Operand(position) = weight.place else {
            return None;
        };
        if weight.role() != Role::Weight {
            return None;
        }
        let operation = self.node(weight.node).operation();
        let operand = operation.inputs().nth(position)?;
        let rank = operand.shape.num_dims();
        use ModuleOperationIr as Op;
        let axis = match operation {
            OperationIr::Float(_, FloatOperationIr::Matmul(_)) if position == 0 => {
                rank.checked_sub(2)?
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(_)) => rank.checked_sub(1)?,
            // `[in, out]` and `[in, out / groups, ..]`.
            OperationIr::Module(
                Op::Linear(_)
                | Op::ConvTranspose1d(_)
                | Op::ConvTranspose2d(_)
                | Op::ConvTranspose3d(_),
            ) => 1,
            // `[out, in / groups, ..]` and `[rows, width]`.
            _ => 0,
        };
        self.viewed(operand.id, axis).map(|(_, axis)| axis)
    }

    /// The parameter that a tensor is a view of, and where an axis of the tensor is in it; `None`
    /// where something else than views, casts and hooks is between them, or the axis is none of the
    /// parameter's.
    pub fn viewed(&self, tensor: TensorId, axis: usize) -> Option<(&Parameter, usize)> {
        if let Some(parameter) = self.parameters.iter().find(|one| one.tensor == tensor) {
            return Some((parameter, axis));
        }
        let maker = self
            .operations
            .iter()
            .find(|operation| operation.outputs().any(|output| output.id == tensor))?;
        if self.hook_of(maker).is_some() {
            return self.viewed(maker.inputs().next()?.id, axis);
        }
        let OperationIr::BaseFloat(view) = maker else {
            return None;
        };
        let (input, axis) = match view {
            BaseOperationIr::Cast(op) => (op.input.id, axis),
            BaseOperationIr::Expand(op) => {
                // Axes are added in front; one that is spread out is none of the parameter's.
                let (from, to) = (&op.out.shape, &op.input.shape);
                let old = (axis + to.num_dims()).checked_sub(from.num_dims())?;
                if to[old] != from[axis] {
                    return None;
                }
                (op.input.id, old)
            }
            BaseOperationIr::SwapDims(op) => {
                let axis = match axis {
                    axis if axis == op.dim1 => op.dim2,
                    axis if axis == op.dim2 => op.dim1,
                    axis => axis,
                };
                (op.input.id, axis)
            }
            BaseOperationIr::Permute(op) => (op.input.id, *op.axes.get(axis)?),
            BaseOperationIr::Reshape(op) => {
                let (from, to) = (&op.out.shape, &op.input.shape);
                let after: usize = from[axis + 1..].iter().product();
                let same = |candidate: &usize| {
                    to[*candidate] == from[axis]
                        && to[*candidate + 1..].iter().product::<usize>() == after
                };
                (op.input.id, (0..to.num_dims()).find(same)?)
            }
            _ => return None,
        };
        self.viewed(input, axis)
    }
}

impl<'a> Node<'a> {
    /// [`Graph::viewed`] of the operand of this position.
    pub fn viewed(&self, operand: usize, axis: usize) -> Option<(&'a Parameter, usize)> {
        let tensor = self.operation().inputs().nth(operand)?;
        self.graph().viewed(tensor.id, axis)
    }

    /// Whether a parameter that it reads is one that the forward pass also [looks up](Self::looks_up), as
    /// the table of an embedding is.
    pub fn reads_table(&self) -> bool {
        self.graph().nodes().any(|node| {
            let mut tables = node.parameters();
            let is_read = |id: TensorId| self.parameters().any(|one| one.tensor == id);
            node.looks_up() && tables.any(|table| is_read(table.tensor))
        })
    }
}

impl SiteUse {
    fn role(&self) -> Role {
        self.site.role
    }
}
