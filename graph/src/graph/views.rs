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
