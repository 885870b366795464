//! In which precision each operation runs: the three lists of `torch.autocast`, on Burn's
//! operations.
//!
//! Products run in half precision; what leaves its range or loses its digits there runs in F32, and so does
//! what adds up any number of terms one by one, in the backward pass if not before (lookups, scatters), and
//! what rounds to whole numbers; what only leads there runs in F32, too; everything else runs in the widest
//! dtype of its operands.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::backend::ir::{
    ActivationOperationIr as Activation, BaseOperationIr as Base, FloatOperationIr as Float,
    ModuleOperationIr as Module, NumericOperationIr as Numeric, OperationIr,
};
use burn::module::ParamGroup;
use burn::tensor::{Device, FloatDType};
use burn_lean_graph::{Arithmetic, Node, Precision, Rules};
use half::{bf16, f16};

use crate::device::accumulation;

/// Smallest normal F16 number: below it digits are lost, and from 3e-8 down everything.
const SMALLEST_F16: f64 = 6.103_515_625e-5;
/// Largest F16 number.
pub(crate) const LARGEST_F16: f64 = 65_504.0;

/// Windows over one place, whose gradients half precision adds up: of equal ones BF16 has 256.
const MOST_WINDOWS: usize = 128;

/// What is filled with numbers of this size, or larger ones, is masked: that much of it is enough, exact or not.
const MASKED: f64 = 1e4;

/// (2 − 2⁻⁷)·2¹²⁷.
const LARGEST_BF16: f64 = 3.389_531_389_251_535_5e38;

/// Which operations or modules run in another precision than the lists say.
#[derive(Debug, Clone)]
pub(crate) enum Except {
    /// Operations of this name.
    Operation(String),
    /// Operations that read a parameter of this group.
    Module(ParamGroup),
}

/// The lists, with a user's exceptions; the last one that fits counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lists {
    pub(crate) exceptions: Vec<(Except, Precision)>,
}

/// The lists for a half dtype on a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnDevice<'a> {
    pub(crate) lists: &'a Lists,
    pub(crate) half: FloatDType,
    pub(crate) arithmetic: Arithmetic,
    pub(crate) device: &'a Device,
}

impl Rules for OnDevice<'_> {
    fn precision(&self, node: &Node<'_>) -> Precision {
        if node.is_full() {
            return Precision::Full;
        }
        self.lists
            .exception(node)
            .unwrap_or_else(|| listed(node, self.half))
    }

    fn half(&self) -> FloatDType {
        self.half
    }

    fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    fn adds_up_in_half(&self, node: &Node<'_>) -> bool {
        accumulation::adds_up_in_half(node, self.device, self.half)
    }

    fn asks_for_full(&self, node: &Node<'_>) -> bool {
        node.is_full() || self.lists.exception(node) == Some(Precision::Full)
    }

    fn results(&self) -> Option<FloatDType> {
        Some(FloatDType::F32)
    }

    fn key(&self) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        let Self {
            lists,
            half,
            arithmetic,
            device,
        } = self;
        format!("{lists:?} {half:?} {arithmetic:?} {device:?}").hash(&mut hasher);
        Some(hasher.finish())
    }
}

impl Lists {
    fn exception(&self, node: &Node<'_>) -> Option<Precision> {
        let fits = |except: &Except| match except {
            Except::Operation(name) => {
                node.name() == name || node.part_of().is_some_and(|whole| whole == name)
            }
            Except::Module(group) => node
                .parameters()
                .any(|parameter| group.matches(&parameter.id, Some(&parameter.path))),
        };
        let last = self
            .exceptions
            .iter()
            .rev()
            .find(|(except, _)| fits(except));
        last.map(|(_, precision)| *precision)
    }
}

/// What the lists say about an operation.
pub(crate) fn listed(node: &Node<'_>, half: FloatDType) -> Precision {
    match node.operation() {
        OperationIr::Float(_, Float::Matmul(_))
        | OperationIr::Module(
            Module::Linear(_)
            | Module::Conv1d(_)
            | Module::Conv2d(_)
            | Module::Conv3d(_)
            | Module::ConvTranspose1d(_)
            | Module::ConvTranspose2d(_)
            | Module::ConvTranspose3d(_)
            | Module::Attention(_),
        ) => Precision::Half,
        operation if holds_positions(operation) => Precision::Full,
        operation if scatters(operation) || looks_up_activations(node) => Precision::Full,
        operation if finds_whole_numbers(operation) => Precision::Full,
        // The model's own decision. One for F32 is not recorded: everything is F32 there.
        OperationIr::BaseFloat(Base::Cast(_)) => Precision::AsRecorded,
        operation if is_range_sensitive(operation) => Precision::Full,
        _ if !fits(half, &node.scalars()) => Precision::Full,
        operation if has_bounds(operation) && !is_exact(half, operation, &node.scalars()) => {
            Precision::Full
        }
        _ => Precision::Follow,
    }
}

/// Reads an image at positions that an operand holds: half precision has no fraction of a pixel beyond
/// 1,024 in F16, and 128 in BF16.
pub(crate) fn holds_positions(operation: &OperationIr) -> bool {
    matches!(
        operation,
        OperationIr::Module(Module::DeformableConv2d(_))
            | OperationIr::Float(_, Float::GridSample2d(_))
    )
}

/// Looks up what was computed, not what is stored: a table has the dtype that gradients are to have.
fn looks_up_activations(node: &Node<'_>) -> bool {
    node.looks_up() && node.parameters().next().is_none()
}

/// Adds up what comes to one place one by one, any number of times, in its forward or its backward pass.
pub(crate) fn scatters(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::BaseFloat(Base::SelectAssign(_) | Base::Scatter(_) | Base::ScatterNd(_))
        // Gradients go to the place that was the largest or smallest so far.
        | OperationIr::NumericFloat(_, Numeric::CumMax(_) | Numeric::CumMin(_)) => true,
        OperationIr::BaseFloat(Base::Unfold(windows)) => {
            windows.size.div_ceil(windows.step.max(1)) > MOST_WINDOWS
        }
        _ => false,
    }
}

/// Rounds to whole numbers, or leaves what is over of one: a last digit of half precision before is a whole
/// number, or the whole divisor, after.
pub(crate) fn finds_whole_numbers(operation: &OperationIr) -> bool {
    matches!(
        operation,
        OperationIr::Float(
            _,
            Float::Round(_)
                | Float::Floor(_)
                | Float::Ceil(_)
                | Float::Trunc(_)
                | Float::IntoInt(_)
        ) | OperationIr::NumericFloat(_, Numeric::Rem(_) | Numeric::RemScalar(_))
    )
}

/// Exponentials, logarithms, powers and divisions, whose values or gradients leave the half range
/// from ordinary operands; sums, which leave it or lose their small terms; and what is made of
/// them.
pub(crate) fn is_range_sensitive(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::Float(_, float) => matches!(
            float,
            Float::Exp(_)
                | Float::Log(_)
                | Float::Log1p(_)
                | Float::Erf(_)
                | Float::PowfScalar(_)
                | Float::Powf(_)
                | Float::Sqrt(_)
                | Float::Recip(_)
                | Float::Hypot(_)
                | Float::Cosh(_)
                | Float::Sinh(_)
                | Float::Tan(_)
                | Float::Tanh(_)
                | Float::Sin(_)
                | Float::Cos(_)
                | Float::ArcCos(_)
                | Float::ArcSin(_)
                | Float::ArcTan(_)
                | Float::ArcTan2(_)
                | Float::ArcCosh(_)
                | Float::ArcSinh(_)
                | Float::ArcTanh(_)
                | Float::Cross(_)
        ),
        OperationIr::Module(module) => matches!(
            module,
            Module::LayerNorm(_) | Module::BatchNorm(_) | Module::CtcLoss(_)
        ),
        OperationIr::Activation(activation) => matches!(
            activation,
            Activation::Softmax(_)
                | Activation::LogSoftmax(_)
                | Activation::Softmin(_)
                | Activation::LogSigmoid(_)
                | Activation::Sigmoid(_)
                | Activation::Gelu(_)
        ),
        OperationIr::NumericFloat(_, numeric) => match numeric {
            Numeric::Div(_)
            | Numeric::Sum(_)
            | Numeric::SumDim(_)
            | Numeric::SumDims(_)
            | Numeric::Mean(_)
            | Numeric::MeanDim(_)
            | Numeric::Prod(_)
            | Numeric::ProdDim(_)
            | Numeric::CumSum(_)
            | Numeric::CumProd(_)
            | Numeric::Powi(_)
            | Numeric::PowiScalar(_) => true,
            // A square.
            Numeric::Mul(product) => product.lhs.id == product.rhs.id,
            _ => false,
        },
        _ => false,
    }
}

/// Whether the dtype has these numbers, or signed infinities in their place that are meant.
pub(crate) fn fits(half: FloatDType, scalars: &[f64]) -> bool {
    let range = match half {
        FloatDType::F16 => SMALLEST_F16..=LARGEST_F16,
        // Rounding makes an infinity of `f32::MIN`, with which masks are filled.
        FloatDType::BF16 => 0.0..=LARGEST_BF16,
        _ => return true,
    };
    scalars.iter().all(|scalar| {
        let size = scalar.abs();
        size == 0.0 || size == f64::INFINITY || range.contains(&size)
    })
}

/// Compares with numbers, or puts them in the place of others, as a clamp does, and its parts in training.
fn has_bounds(operation: &OperationIr) -> bool {
    matches!(
        operation,
        OperationIr::BaseFloat(Base::EqualElem(_) | Base::NotEqualElem(_) | Base::MaskFill(_))
            | OperationIr::NumericFloat(
                _,
                Numeric::GreaterElem(_)
                    | Numeric::GreaterEqualElem(_)
                    | Numeric::LowerElem(_)
                    | Numeric::LowerEqualElem(_)
                    | Numeric::Clamp(_)
                    | Numeric::ClampMin(_)
                    | Numeric::ClampMax(_)
            )
    )
}

/// Whether the dtype has these bounds themselves: a device that computes in it rounds them, 0.9999 to 1, where an
/// arccosine has no gradient. What a mask is filled with may be rounded.
fn is_exact(half: FloatDType, operation: &OperationIr, bounds: &[f64]) -> bool {
    let fills = matches!(operation, OperationIr::BaseFloat(Base::MaskFill(_)));
    bounds.iter().all(|bound| {
        let rounded = match half {
            FloatDType::F16 => f16::from_f64(*bound).to_f64(),
            FloatDType::BF16 => bf16::from_f64(*bound).to_f64(),
            _ => *bound,
        };
        rounded == *bound || fills && bound.abs() >= MASKED
    })
}
