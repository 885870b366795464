//! A gradient multiplied and looked at in one pass over memory, by a kernel of CubeCL's backends. Composed
//! of Burn's operations it takes seven kernels and three passes.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod sums;

use burn::tensor::{DType, Tensor};

#[cfg(feature = "cube")]
pub(super) use kernel::is_there_for;
#[cfg(feature = "cube")]
pub(super) use sums::Sums;

/// What is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Look {
    /// Before the multiplication: numbers that are all finite where all elements are.
    Finite,
    /// Of the product: parts of the sum of squares.
    Squares,
    /// Each of the two by itself.
    Both,
}

impl Look {
    pub(super) fn is_for_finite(self) -> bool {
        self != Self::Squares
    }

    pub(super) fn is_for_squares(self) -> bool {
        self != Self::Finite
    }
}

/// Numbers that are all finite where all elements of `x` are, which has some: F32, one number or several.
pub(crate) fn finite<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    #[cfg(feature = "cube")]
    if is_there_for(&x) {
        return Sums::exponents_of(x);
    }
    // 0 for every finite number, so that the sum cannot overflow, as that of the gradients could.
    x.mul_scalar(0.0).sum().cast(DType::F32)
}

/// The sum of squares of `x`, which has elements: one number, F32, and of F64 gradients F64, since a square may be
/// beyond F32 where the root is not.
pub(super) fn squares<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let squares = x.square().sum();
    match squares.dtype() {
        DType::F64 => squares,
        _ => squares.cast(DType::F32),
    }
}
