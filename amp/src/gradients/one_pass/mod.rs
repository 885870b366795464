//! A gradient multiplied and looked at in one pass over memory, by a kernel of CubeCL's backends. Composed
//! of Burn's operations it takes seven kernels and three passes.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cube")]
mod kernel;

use burn::tensor::{DType, Tensor};

/// What is summed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Look {
    /// Before the multiplication: numbers that are all finite where all elements are.
    Finite,
    /// Of the product: parts of the sum of squares.
    Squares,
}

impl Look {
    /// What there is to see in `x`, which has elements: F32, one number or several.
    pub(crate) fn at<const D: usize>(self, x: Tensor<D>) -> Tensor<1> {
        #[cfg(feature = "cube")]
        if kernel::is_there_for(&x) {
            return kernel::multiply_and_look(x, None, self).1;
        }
        let sum = match self {
            // 0 for every finite number, so that the sum cannot overflow, as that of the gradients could.
            Self::Finite => x.mul_scalar(0.0).sum(),
            Self::Squares => x.square().sum(),
        };
        sum.cast(DType::F32)
    }
}

/// `x · factor`, and what there is to see; `x` again where that takes several passes. `factor` makes an F32 tensor,
/// `[1]`, where `x` is; without one nothing is multiplied.
#[allow(clippy::result_large_err)] // It is no error: the tensor goes on.
pub(super) fn one_pass<const D: usize>(
    x: Tensor<D>,
    factor: impl FnOnce() -> Option<Tensor<1>>,
    look: Look,
) -> Result<(Tensor<D>, Tensor<1>), Tensor<D>> {
    #[cfg(feature = "cube")]
    if kernel::is_there_for(&x) {
        return Ok(kernel::multiply_and_look(x, factor(), look));
    }
    #[cfg(not(feature = "cube"))]
    let _ = (factor, look);
    Err(x)
}
