//! What is known about each kind of operation in Burn's graph.

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, FloatOperationIr, ModuleOperationIr,
    NumericOperationIr, OperationIr, ScalarIr, TensorIr,
};

/// An operation that multiplies and adds up: what quantization is for.
pub(super) struct Product<'a> {
    pub(super) name: &'static str,
    /// Computed operand, or the first of two; `None` for the indices of an embedding.
    pub(super) input: Option<&'a TensorIr>,
    /// Weight, or the second operand.
    pub(super) weight: &'a TensorIr,
    pub(super) bias: Option<&'a TensorIr>,
    pub(super) output: &'a TensorIr,
}

pub(super) fn product(operation: &OperationIr) -> Option<Product<'_>> {
    macro_rules! layer {
        ($name:literal, $op:expr) => {
            Product {
                name: $name,
                input: Some(&$op.x),
                weight: &$op.weight,
                bias: $op.bias.as_ref(),
                output: &$op.out,
            }
        };
    }
    use ModuleOperationIr as Op;
    Some(match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(op)) => Product {
            name: "Matmul",
            input: Some(&op.lhs),
            weight: &op.rhs,
            bias: None,
            output: &op.out,
        },
        OperationIr::Module(op) => match op {
            Op::Embedding(op) => Product {
                name: "Embedding",
                input: None,
                weight: &op.weights,
                bias: None,
                output: &op.out,
            },
            Op::Linear(op) => layer!("Linear", op),
            Op::Conv1d(op) => layer!("Conv1d", op),
            Op::Conv2d(op) => layer!("Conv2d", op),
            Op::Conv3d(op) => layer!("Conv3d", op),
            Op::DeformableConv2d(op) => layer!("DeformableConv2d", op),
            Op::ConvTranspose1d(op) => layer!("ConvTranspose1d", op),
            Op::ConvTranspose2d(op) => layer!("ConvTranspose2d", op),
            Op::ConvTranspose3d(op) => layer!("ConvTranspose3d", op),
            _ => return None,
        },
        _ => return None,
    })
}

/// Input and output of an operation that moves numbers but computes none.
pub(super) fn moved(operation: &OperationIr) -> Option<(&TensorIr, &TensorIr)> {
    use BaseOperationIr as Op;
    let OperationIr::BaseFloat(operation) = operation else {
        return None;
    };
    Some(match operation {
        Op::Reshape(op) | Op::Expand(op) => (&op.input, &op.out),
        Op::SwapDims(op) => (&op.input, &op.out),
        Op::Permute(op) => (&op.input, &op.out),
        Op::Flip(op) => (&op.input, &op.out),
        Op::Unfold(op) => (&op.input, &op.out),
        Op::Slice(op) => (&op.tensor, &op.out),
        Op::Select(op) => (&op.tensor, &op.out),
        Op::Gather(op) => (&op.tensor, &op.out),
        Op::RepeatDim(op) => (&op.tensor, &op.out),
        Op::Cast(op) => (&op.input, &op.out),
        _ => return None,
    })
}

/// Input and output of an operation after which quantized numbers are still on their grid: what
/// moves them, a maximum of some of them, a ReLU and a pruning mask, since zero is on every grid.
pub(super) fn keeps_grid(operation: &OperationIr) -> Option<(&TensorIr, &TensorIr)> {
    use ModuleOperationIr as Op;
    match operation {
        OperationIr::Activation(ActivationOperationIr::Relu(op)) => Some((&op.input, &op.out)),
        OperationIr::Module(operation) => Some(match operation {
            Op::MaxPool1d(op) => (&op.x, &op.out),
            Op::MaxPool2d(op) => (&op.x, &op.out),
            Op::MaxPool1dWithIndices(op) => (&op.x, &op.out),
            Op::MaxPool2dWithIndices(op) => (&op.x, &op.out),
            Op::Unfold4d(op) => (&op.x, &op.out),
            _ => return None,
        }),
        OperationIr::BaseFloat(BaseOperationIr::MaskFill(op)) if is_zero(&op.value) => {
            Some((&op.tensor, &op.out))
        }
        _ => moved(operation),
    }
}

/// Whether the output is nothing but zeros since an input is, of which `of_input` tells.
pub(super) fn is_zeros(operation: &OperationIr, of_input: impl Fn(&TensorIr) -> bool) -> bool {
    use NumericOperationIr as Op;
    match operation {
        OperationIr::NumericFloat(_, Op::Mul(op)) => of_input(&op.lhs) || of_input(&op.rhs),
        OperationIr::NumericFloat(_, Op::MulScalar(op)) => of_input(&op.lhs),
        // The stand-in of a quantizer, among others.
        OperationIr::NumericFloat(_, Op::AddScalar(op)) => is_zero(&op.rhs) && of_input(&op.lhs),
        _ => moved(operation).is_some_and(|(input, _)| of_input(input)),
    }
}

fn is_zero(value: &ScalarIr) -> bool {
    match value {
        ScalarIr::Float(value) => *value == 0.0,
        ScalarIr::Int(value) => *value == 0,
        ScalarIr::UInt(value) => *value == 0,
        ScalarIr::Bool(_) => false,
    }
}

/// Operands and output of a sum, difference or product of two tensors, element by element.
pub(super) fn element_wise(
    operation: &OperationIr,
) -> Option<(super::SiteKind, [&TensorIr; 2], &TensorIr)> {
    match operation {
        OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) => {
            Some((super::SiteKind::Add, [&op.lhs, &op.rhs], &op.out))
        }
        OperationIr::NumericFloat(_, NumericOperationIr::Sub(op)) => {
            Some((super::SiteKind::Sub, [&op.lhs, &op.rhs], &op.out))
        }
        OperationIr::NumericFloat(_, NumericOperationIr::Mul(op)) => {
            Some((super::SiteKind::Mul, [&op.lhs, &op.rhs], &op.out))
        }
        _ => None,
    }
}

/// The name of an operation for people: the innermost variant, `Mul` of `NumericFloat(F32, Mul(…))`.
///
/// Burn gives its operations no name; their `Debug` form is the variant path.
pub(super) fn name(operation: &OperationIr) -> String {
    let debug = format!("{operation:?}");
    let inner = debug.split('(').nth(1).unwrap_or(&debug);
    // `F32, Mul` where the outer variant carries a dtype.
    let inner = inner.rsplit(", ").next().unwrap_or(inner);
    let end = inner.find(|c: char| !c.is_alphanumeric());
    inner[..end.unwrap_or(inner.len())].to_string()
}
