//! Dividing by the loss scale, and a look on the way.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_lean_reparam::FloatVisitor;

use super::one_pass::{Look, one_pass};
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

/// Multiplies every gradient by the inverse scale and looks at it on the way: whether it is finite, or for its
/// sum of squares, which is finite only if the gradient is. Nothing is looked for without a `look`.
///
/// Infinities are looked for *before* the multiplication, as PyTorch does, so that a scale below
/// 1 cannot make one up. A sum of squares is that of the product; one that is not finite is looked
/// into by [`overflowing`](super::overflow::overflowing).
///
/// Gradients that `model` has no parameter of are left out: they are still scaled.
pub(crate) fn unscale<M: Module>(
    model: &M,
    grads: GradientsParams,
    inverse_scale: InverseScale,
    look: Option<Look>,
) -> Result<Unscaled, AmpError> {
    let none = GradientsParams::new();
    walk(model, Some(grads), none, inverse_scale, look)
}

/// Looks at gradients that are unscaled already; those that `model` has no parameter of stay as they are.
pub(crate) fn look_at<M: Module>(
    model: &M,
    grads: GradientsParams,
    look: Option<Look>,
) -> Result<Unscaled, AmpError> {
    walk(model, None, grads, InverseScale::Number(1.0), look)
}

/// From `scaled`, or in place, to `grads`.
fn walk<M: Module>(
    model: &M,
    scaled: Option<GradientsParams>,
    grads: GradientsParams,
    inverse_scale: InverseScale,
    look: Option<Look>,
) -> Result<Unscaled, AmpError> {
    let mut visitor = Unscale {
        scaled,
        inverse_scale,
        uploaded: None,
        look,
        error: None,
        out: Unscaled {
            grads,
            parameters: Vec::new(),
            flags: Vec::new(),
            flags_are_squares: look == Some(Look::Squares),
            norm: None,
            loss: None,
            found_elsewhere: false,
            of_all_losses: false,
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
    /// Where gradients are taken from, unless they are changed in place.
    scaled: Option<GradientsParams>,
    inverse_scale: InverseScale,
    /// The same on the device of the last gradient.
    uploaded: Option<Tensor<1>>,
    look: Option<Look>,
    error: Option<AmpError>,
    out: Unscaled,
}

impl Unscale {
    /// Multiplied and looked at, one after the other.
    fn in_turn<const D: usize>(&self, grad: Tensor<D>, look: Look) -> (Tensor<D>, Tensor<1>) {
        if look == Look::Finite {
            let seen = look.at(grad.clone());
            return (self.inverse_scale.apply(grad), seen);
        }
        let grad = self.inverse_scale.apply(grad);
        (grad.clone(), look.at(grad))
    }

    /// The inverse scale on `device`; `None` for 1.
    fn factor(&mut self, device: &Device) -> Option<Tensor<1>> {
        if let InverseScale::Number(1.0) = self.inverse_scale {
            return None;
        }
        let known = self.uploaded.take();
        let factor = known.filter(|factor| factor.device() == *device);
        let factor = factor.unwrap_or_else(|| match &self.inverse_scale {
            InverseScale::Number(inverse) => Tensor::from_data([*inverse], (device, DType::F32)),
            #[cfg(feature = "train")]
            InverseScale::Tensor(inverse) => same_device(inverse.clone(), device),
        });
        self.uploaded = Some(factor.clone());
        Some(factor)
    }
}

impl FloatVisitor for Unscale {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let given = self.scaled.as_mut().unwrap_or(&mut self.out.grads);
        let Some(grad) = given.remove::<D>(param.id) else {
            return;
        };
        self.out.parameters.push((param.id, path.to_string()));
        let (dtype, device) = (grad.dtype(), grad.device());
        if !matches!(dtype, DType::F32 | DType::F64) {
            self.error = Some(AmpError::GradientDtype {
                path: path.to_string(),
                dtype,
                parameter: param.base().dtype(),
            });
            return;
        }
        // Arithmetic on nothing panics on some of Burn's backends, and there is nothing to do.
        let (grad, flag) = match (grad.shape().num_elements(), self.look) {
            (0, _) => (grad, None),
            (_, None) => (self.inverse_scale.apply(grad), None),
            (_, Some(look)) => {
                let factor = || self.factor(&device);
                let (grad, seen) = match one_pass(grad, factor, look) {
                    Ok(done) => done,
                    Err(grad) => self.in_turn(grad, look),
                };
                (grad, Some(seen))
            }
        };
        if self.look.is_some() {
            self.out.flags.push(flag);
        }
        self.out.grads.register::<D>(param.id, grad);
    }
}
