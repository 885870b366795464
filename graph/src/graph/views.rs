//! Operations that show numbers in another way.

use burn::backend::ir::{BaseOperationIr, OperationIr, TensorIr};

/// The operand of an operation that moves numbers but computes none.
pub(crate) fn moved(operation: &OperationIr) -> Option<&TensorIr> {
    use BaseOperationIr as Op;
    match operation {
        OperationIr::BaseFloat(Op::Unfold(op)) => Some(&op.input),
        OperationIr::BaseFloat(Op::Slice(op)) => Some(&op.tensor),
        OperationIr::BaseFloat(Op::Select(op)) => Some(&op.tensor),
        OperationIr::BaseFloat(Op::Gather(op)) => Some(&op.tensor),
        _ => keeps_all(operation),
    }
}

/// The operand of an operation that shows all of its numbers in another way.
pub(crate) fn keeps_all(operation: &OperationIr) -> Option<&TensorIr> {
    use BaseOperationIr as Op;
    let OperationIr::BaseFloat(operation) = operation else {
        return None;
    };
    match operation {
        Op::Reshape(op) | Op::Expand(op) => Some(&op.input),
        Op::SwapDims(op) => Some(&op.input),
        Op::Permute(op) => Some(&op.input),
        Op::Flip(op) => Some(&op.input),
        Op::RepeatDim(op) => Some(&op.tensor),
        Op::Cast(op) => Some(&op.input),
        _ => None,
    }
}

/// The operand of an operation whose rows, along the last axis, are those of the operand, each of them with
/// all of its numbers.
pub(crate) fn keeps_rows(operation: &OperationIr) -> Option<&TensorIr> {
    use BaseOperationIr as Op;
    let OperationIr::BaseFloat(base) = operation else {
        return None;
    };
    let input = moved(operation)?;
    let last = input.shape.num_dims().checked_sub(1)?;
    let out = operation.outputs().next()?;
    let keeps = match base {
        Op::SwapDims(op) => op.dim1 == op.dim2 || (op.dim1 != last && op.dim2 != last),
        Op::Permute(op) => op.axes.last() == Some(&last),
        Op::Unfold(_) | Op::Gather(_) => false,
        Op::Select(op) => op.dim != last,
        Op::RepeatDim(op) => op.dim != last,
        _ => out.shape.last() == input.shape.last(),
    };
    keeps.then_some(input)
}
