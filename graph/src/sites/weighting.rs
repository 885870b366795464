//! What happens to attention weights.

use burn::backend::ir::{BaseOperationIr, NumericOperationIr, OperationIr};

use crate::graph::views::moved;

/// What may happen to attention weights before they weight values: views, a dropout.
pub(super) fn is_weighting(operation: &OperationIr) -> bool {
    use NumericOperationIr as Op;
    moved(operation).is_some()
        || matches!(
            operation,
            OperationIr::NumericFloat(
                _,
                Op::Mul(_) | Op::MulScalar(_) | Op::DivScalar(_) | Op::AddScalar(_)
            ) | OperationIr::BaseFloat(BaseOperationIr::MaskFill(_))
        )
}
