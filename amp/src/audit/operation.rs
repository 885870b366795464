//! What is known about each kind of operation in Burn's graph.

use burn::backend::ir::OperationIr;
use burn::tensor::DType;

use super::Finding;

/// Name of an operation: the innermost variant, `Matmul` of `Float(F32, Matmul(…))`.
///
/// Burn gives its operations no name; their `Debug` form is the variant path.
pub(super) fn name(operation: &OperationIr) -> String {
    let debug = format!("{operation:?}");
    let mut variants = debug.split('(');
    let outer = variants.next().unwrap_or_default();
    match operation {
        OperationIr::Init(_) | OperationIr::Custom(_) | OperationIr::Drop(_) => outer.to_string(),
        _ => {
            let inner = variants.next().unwrap_or_default();
            // `F32, Matmul` where the outer variant carries a dtype.
            let inner = inner.rsplit(", ").next().unwrap_or(inner);
            let end = inner
                .find(|c: char| !c.is_alphanumeric())
                .unwrap_or(inner.len());
            inner[..end].to_string()
        }
    }
}

/// Operations whose output shares memory with their input.
pub(super) fn is_alias(name: &str) -> bool {
    matches!(
        name,
        "Reshape" | "SwapDims" | "Permute" | "Expand" | "Squeeze" | "Unsqueeze"
    )
}

/// What autodiff keeps of an operation for its backward pass.
pub(super) enum Saved {
    Nothing,
    Inputs,
    Outputs,
}

pub(super) fn saved(name: &str) -> Saved {
    match name {
        // Linear: the gradient does not depend on the values.
        "Add" | "AddScalar" | "Sub" | "SubScalar" | "MulScalar" | "DivScalar" | "Neg" | "Sum"
        | "SumDim" | "Mean" | "MeanDim" | "CumSum" | "Reshape" | "SwapDims" | "Permute"
        | "Expand" | "RepeatDim" | "Slice" | "SliceAssign" | "Cat" | "Flip" | "Select"
        | "SelectAssign" | "Gather" | "Scatter" | "Cast" | "Zeros" | "Ones" | "Full" | "Random"
        | "IntoInt" | "Unfold" | "Init" | "Drop" | "Equal" | "EqualElem" | "Greater"
        | "GreaterElem" | "GreaterEqual" | "GreaterEqualElem" | "Lower" | "LowerElem"
        | "LowerEqual" | "LowerEqualElem" | "MaskWhere" | "MaskFill" | "Embedding" | "ArgMax"
        | "ArgMin" | "AvgPool1d" | "AvgPool2d" | "AdaptiveAvgPool1d" | "AdaptiveAvgPool2d"
        | "Interpolate" => Saved::Nothing,
        // The gradient is a function of the result.
        "Exp" | "Sqrt" | "Tanh" | "Sigmoid" | "Softmax" | "LogSoftmax" | "Recip" | "Relu" => {
            Saved::Outputs
        }
        _ => Saved::Inputs,
    }
}

/// What can go wrong when the operation runs in half precision.
///
/// After the FP32 list of `torch.autocast`, less what Burn computes safely: its mean divides
/// before it stores, its products and reductions accumulate in F32.
pub(super) fn risk(name: &str, dtype: DType) -> Option<Finding> {
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return None;
    }
    match name {
        "Exp" | "Powf" | "PowfScalar" | "Powi" | "PowiScalar" | "Sum" | "SumDim" | "Prod"
        | "ProdDim" | "CumSum" | "CumProd" | "Recip" | "Sinh" | "Cosh" | "Tan"
            if dtype == DType::F16 =>
        {
            Some(Finding::MayOverflow)
        }
        "Exp" | "Log" | "Log1p" | "Powf" | "PowfScalar" | "Sum" | "SumDim" | "Prod" | "ProdDim"
        | "CumSum" | "CumProd" | "Softmax" | "LogSoftmax" | "LogSigmoid" | "Erf" | "ArcCos"
        | "ArcSin" | "LayerNorm" | "BatchNorm" | "GroupNorm" | "RmsNorm" | "CtcLoss" => {
            Some(Finding::LosesPrecision)
        }
        _ => None,
    }
}
