//! What is known about each kind of operation in Burn's graph.

use std::collections::HashMap;

use burn::backend::ir::{
    ActivationOperationIr as Activation, BaseOperationIr as Base, FloatOperationIr as Float,
    ModuleOperationIr as Module, NumericOperationIr as Numeric, OperationIr, TensorId,
};
use burn::tensor::DType;
use burn_lean_graph::Node;

use super::Finding;
use crate::autocast::lists::{
    LARGEST_F16, finds_whole_numbers, fits, holds_positions, is_range_sensitive, scatters,
};

/// Whether the output shares memory with the input.
pub(super) fn is_alias(operation: &OperationIr) -> bool {
    matches!(
        operation,
        OperationIr::BaseFloat(
            Base::Reshape(_) | Base::SwapDims(_) | Base::Permute(_) | Base::Expand(_)
        )
    )
}

pub(super) fn is_cast(operation: &OperationIr) -> bool {
    matches!(operation, OperationIr::BaseFloat(Base::Cast(_)))
}

/// What autodiff keeps of an operation for its backward pass.
pub(super) enum Saved {
    Nothing,
    Inputs,
    Outputs,
}

pub(super) fn saved(operation: &OperationIr) -> Saved {
    match operation {
        // The gradient is a function of the result.
        OperationIr::Float(
            _,
            Float::Exp(_) | Float::Sqrt(_) | Float::Tanh(_) | Float::Recip(_),
        )
        | OperationIr::Activation(
            Activation::Relu(_)
            | Activation::Sigmoid(_)
            | Activation::Softmax(_)
            | Activation::LogSoftmax(_),
        ) => Saved::Outputs,
        // Linear: the gradient does not depend on the values.
        OperationIr::BaseFloat(_)
        | OperationIr::BaseInt(_)
        | OperationIr::BaseBool(_)
        | OperationIr::NumericInt(..)
        | OperationIr::Int(_)
        | OperationIr::Bool(_)
        | OperationIr::Init(_)
        | OperationIr::Drop(_)
        | OperationIr::Float(_, Float::Random(_) | Float::IntoInt(_))
        | OperationIr::Module(
            Module::Embedding(_)
            | Module::AvgPool1d(_)
            | Module::AvgPool2d(_)
            | Module::AdaptiveAvgPool1d(_)
            | Module::AdaptiveAvgPool2d(_)
            | Module::AdaptiveAvgPool3d(_)
            | Module::Interpolate(_),
        ) => Saved::Nothing,
        OperationIr::NumericFloat(_, numeric) => match numeric {
            Numeric::Mul(_)
            | Numeric::Div(_)
            | Numeric::Rem(_)
            | Numeric::RemScalar(_)
            | Numeric::Abs(_)
            | Numeric::Prod(_)
            | Numeric::ProdDim(_)
            | Numeric::Powi(_)
            | Numeric::PowiScalar(_)
            | Numeric::CumProd(_)
            | Numeric::CumMin(_)
            | Numeric::CumMax(_)
            | Numeric::Clamp(_)
            | Numeric::ClampMin(_)
            | Numeric::ClampMax(_)
            | Numeric::Max(_)
            | Numeric::Min(_)
            | Numeric::MaxDim(_)
            | Numeric::MinDim(_)
            | Numeric::MaxAbs(_)
            | Numeric::MaxAbsDim(_) => Saved::Inputs,
            _ => Saved::Nothing,
        },
        _ => Saved::Inputs,
    }
}

/// What can go wrong when an operation runs in half precision.
///
/// After the FP32 list of `torch.autocast`: see [`is_range_sensitive`]. Burn's mean divides before
/// it stores, and its products and reductions accumulate in F32.
pub(super) fn risks(node: &Node<'_>, dtype: DType) -> Vec<Finding> {
    let mut risks = Vec::new();
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return risks;
    }
    let operation = node.operation();
    if !fits(dtype.into(), &node.scalars()) {
        risks.push(Finding::ConstantOutOfRange);
    }
    let (overflows, inexact) = match operation {
        _ if node.looks_up() || scatters(operation) => (false, true),
        _ if holds_positions(operation) || finds_whole_numbers(operation) => (false, true),
        OperationIr::NumericFloat(_, Numeric::Mean(_) | Numeric::MeanDim(_)) => (false, false),
        OperationIr::Float(_, Float::Log(_) | Float::Log1p(_) | Float::Erf(_))
        | OperationIr::Activation(
            Activation::Softmax(_)
            | Activation::LogSoftmax(_)
            | Activation::Softmin(_)
            | Activation::LogSigmoid(_)
            | Activation::Sigmoid(_),
        )
        | OperationIr::Module(Module::CtcLoss(_)) => (false, true),
        OperationIr::NumericFloat(..)
        | OperationIr::Float(..)
        | OperationIr::Activation(Activation::Gelu(_))
        | OperationIr::Module(Module::LayerNorm(_) | Module::BatchNorm(_)) => {
            let sensitive = is_range_sensitive(operation);
            // BF16 has the range of F32, and fewer digits than F16.
            (sensitive && dtype == DType::F16, sensitive)
        }
        _ => (false, false),
    };
    if overflows {
        risks.push(Finding::MayOverflow);
    } else if inexact {
        risks.push(Finding::LosesPrecision);
    }
    risks
}

/// Whether it looks up places of a parameter, whose gradients Burn adds up one by one in the dtype of the
/// parameter: of 4,096 equal ones 2,048 are left in F16, 256 in BF16.
pub(super) fn adds_gradients(node: &Node<'_>) -> bool {
    node.looks_up() && node.parameters().next().is_some()
}

/// To which power, more than the first, an operation raises its operand.
pub(super) fn exponent(node: &Node<'_>) -> Option<f64> {
    let exponent = match node.operation() {
        OperationIr::NumericFloat(_, Numeric::Mul(product)) => {
            return (product.lhs.id == product.rhs.id).then_some(2.0);
        }
        OperationIr::NumericFloat(_, Numeric::PowiScalar(_))
        | OperationIr::Float(_, Float::PowfScalar(_)) => *node.scalars().first()?,
        _ => return None,
    };
    (exponent > 1.0).then_some(exponent)
}

/// The magnitude of the operands from which the result in F16, or what Burn computes for the gradient,
/// is more than the largest number of F16; `None` where there is no such bound, or it depends on more
/// than one operand. Of a sum of powers, the magnitude of what was raised: `exponents` are those of results.
pub(super) fn overflows_from(node: &Node<'_>, exponents: &HashMap<TensorId, f64>) -> Option<f64> {
    let square = LARGEST_F16.sqrt();
    let power = |exponent: f64| LARGEST_F16.powf(exponent.recip());
    match node.operation() {
        OperationIr::Float(_, float) => match float {
            Float::Exp(_) => Some(LARGEST_F16.ln()),
            Float::Sinh(_) | Float::Cosh(_) => Some((2.0 * LARGEST_F16).ln()),
            Float::PowfScalar(_) => exponent(node).map(power),
            Float::Hypot(_) | Float::Cross(_) => Some((LARGEST_F16 / 2.0).sqrt()),
            _ => None,
        },
        OperationIr::Activation(Activation::Gelu(_)) => Some(power(3.0)),
        OperationIr::Module(Module::LayerNorm(_) | Module::BatchNorm(_)) => Some(square),
        OperationIr::NumericFloat(_, numeric) => match numeric {
            // The gradient divides by the square of the divisor.
            Numeric::Div(_) => Some(square),
            Numeric::Mul(_) | Numeric::PowiScalar(_) => exponent(node).map(power),
            Numeric::Sum(_) | Numeric::SumDim(_) | Numeric::SumDims(_) => {
                let operand = node.operands().next()?;
                let result = node.operation().outputs().next()?.shape.num_elements();
                let terms = operand.shape.num_elements().max(1) as f64 / result.max(1) as f64;
                let exponent = exponents.get(&operand.id).copied().unwrap_or(1.0);
                Some((LARGEST_F16 / terms).powf(exponent.recip()))
            }
            _ => None,
        },
        _ => None,
    }
}
