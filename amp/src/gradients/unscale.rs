//! Dividing by the loss scale, and a look on the way.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use burn_lean_reparam::FloatVisitor;

use super::norm::sum_of_squares;
use super::overflow::non_finite_flag;
use super::unscaled::Unscaled;
#[cfg(feature = "train")]
use super::walk::same_device;
use super::walk::visit_once;
use crate::AmpError;

/// What gradients are multiplied by.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // There is one at a time, on the stack.
pub(crate) enum InverseScale {
    Number(f32),
    /// On a device, `[1]`, F32.
    #[cfg(feature = "train")]
    Tensor(Tensor<1>),
}

impl InverseScale {
    fn apply<const D: usize>(&self, grad: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Number(1.0) => grad,
            Self::Number(inverse) => grad.mul_scalar(*inverse),
            #[cfg(feature = "train")]
            Self::Tensor(inverse) => {
                let inverse = same_device(inverse.clone(), &grad.device()).cast(grad.dtype());
                grad * inverse.reshape([1; D])
            }
        }
    }
}

/// What is found out about each gradient on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    Nothing,
    /// Whether it is finite.
    Finite,
    /// Its sum of squares: for the norm, and finite only if the gradient is.
    Squares,
}

/// Multiplies every gradient by the inverse scale and checks it, in one pass.
///
/// Infinities are looked for *before* the multiplication, as PyTorch does, so that a scale below
/// 1 cannot make one up. A sum of squares is that of the product; one that is not finite is looked
/// into by [`overflowing`](super::overflow::overflowing).
pub(crate) fn unscale<M: Module>(
    model: &M,
    grads: GradientsParams,
    inverse_scale: InverseScale,
    check: Check,
) -> Result<Unscaled, AmpError> {
    let mut visitor = Unscale {
        inverse_scale,
        check,
        error: None,
        out: Unscaled {
            grads,
            parameters: Vec::new(),
            flags: Vec::new(),
            flags_are_squares: check == Check::Squares,
            norm: None,
            loss: None,
            found_elsewhere: false,
        },
    };
    visit_once(model, &mut visitor);
    match visitor.error {
        Some(error) => Err(error),
        None if visitor.out.parameters.is_empty() => Err(AmpError::NoGradients),
        None => Ok(visitor.out),
    }
}

struct Unscale {
    inverse_scale: InverseScale,
    check: Check,
    error: Option<AmpError>,
    out: Unscaled,
}

impl FloatVisitor for Unscale {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let Some(grad) = self.out.grads.remove::<D>(param.id) else {
            return;
        };
        self.out.parameters.push((param.id, path.to_string()));
        let dtype = grad.dtype();
        if !matches!(dtype, DType::F32 | DType::F64) {
            self.error = Some(AmpError::GradientDtype {
                path: path.to_string(),
                dtype,
                parameter: param.base().dtype(),
            });
            return;
        }
        // Arithmetic on nothing panics on some of Burn's backends, and there is nothing to do.
        let (grad, flag) = match (grad.shape().num_elements(), self.check) {
            (0, _) => (grad, None),
            (_, Check::Nothing) => (self.inverse_scale.apply(grad), None),
            (_, Check::Finite) => {
                let flag = non_finite_flag(grad.clone()).cast(DType::F32);
                (self.inverse_scale.apply(grad), Some(flag))
            }
            (_, Check::Squares) => {
                let grad = self.inverse_scale.apply(grad);
                let squares = sum_of_squares(grad.clone());
                (grad, Some(squares))
            }
        };
        if self.check != Check::Nothing {
            self.out.flags.push(flag);
        }
        self.out.grads.register::<D>(param.id, grad);
    }
}
