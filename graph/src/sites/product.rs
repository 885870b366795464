//! Operations that multiply and add up: layers, and products of two computed tensors.

use burn::backend::ir::{FloatOperationIr, ModuleOperationIr, OperationIr, TensorIr};

/// A matrix product, a convolution or an embedding; operands with their positions.
pub(crate) struct Product<'a> {
    /// The computed operand, or the first of two; `None` for the indices of an embedding.
    pub(crate) input: Option<(usize, &'a TensorIr)>,
    /// The weight, or the second operand.
    pub(crate) weight: (usize, &'a TensorIr),
    /// The bias, where the operation adds one.
    pub(crate) bias: Option<&'a TensorIr>,
    pub(crate) output: &'a TensorIr,
}

pub(crate) fn product(operation: &OperationIr) -> Option<Product<'_>> {
    macro_rules! layer {
        ($op:expr) => {
            layer!($op, 1)
        };
        ($op:expr, $weight:literal) => {
            Product {
                input: Some((0, &$op.x)),
                weight: ($weight, &$op.weight),
                bias: $op.bias.as_ref(),
                output: &$op.out,
            }
        };
    }
    use ModuleOperationIr as Op;
    Some(match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(op)) => Product {
            input: Some((0, &op.lhs)),
            weight: (1, &op.rhs),
            bias: None,
            output: &op.out,
        },
        OperationIr::Module(op) => match op {
            Op::Embedding(op) => Product {
                input: None,
                weight: (0, &op.weights),
                bias: None,
                output: &op.out,
            },
            Op::Linear(op) => layer!(op),
            Op::Conv1d(op) => layer!(op),
            Op::Conv2d(op) => layer!(op),
            Op::Conv3d(op) => layer!(op),
            // The offsets are between input and weight.
            Op::DeformableConv2d(op) => layer!(op, 2),
            Op::ConvTranspose1d(op) => layer!(op),
            Op::ConvTranspose2d(op) => layer!(op),
            Op::ConvTranspose3d(op) => layer!(op),
            _ => return None,
        },
        _ => return None,
    })
}
