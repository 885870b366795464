//! Dividing by the loss scale, and a look on the way.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
#[cfg(feature = "cube")]
use burn::tensor::Device;
use burn::tensor::{DType, Tensor};
use burn_lean_reparam::FloatVisitor;

use super::one_pass::Look;
use super::seen::{Numbers, Seen};
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

/// The same for gradients on any device.
pub(super) struct Inverse {
    scale: InverseScale,
    /// On the device of the last gradient.
    #[cfg(feature = "cube")]
    uploaded: Option<Tensor<1>>,
}

impl Inverse {
    pub(super) fn new(scale: InverseScale) -> Self {
        Self {
            scale,
            #[cfg(feature = "cube")]
            uploaded: None,
        }
    }

    pub(super) fn apply<const D: usize>(&self, grad: Tensor<D>) -> Tensor<D> {
        match &self.scale {
            InverseScale::Number(1.0) => grad,
            InverseScale::Number(inverse) => grad.mul_scalar(*inverse),
            #[cfg(feature = "train")]
            InverseScale::Tensor(inverse) => {
                let inverse = same_device(inverse.clone(), &grad.device()).cast(grad.dtype());
                grad * inverse.reshape([1; D])
            }
        }
    }

    /// The inverse scale on `device`; `None` for 1.
    #[cfg(feature = "cube")]
    pub(super) fn factor(&mut self, device: &Device) -> Option<Tensor<1>> {
        if let InverseScale::Number(1.0) = self.scale {
            return None;
        }
        let known = self.uploaded.take();
        let factor = known.filter(|factor| factor.device() == *device);
        let factor = factor.unwrap_or_else(|| match &self.scale {
            InverseScale::Number(inverse) => Tensor::from_data([*inverse], (device, DType::F32)),
            #[cfg(feature = "train")]
            InverseScale::Tensor(inverse) => same_device(inverse.clone(), device),
        });
        self.uploaded = Some(factor.clone());
        Some(factor)
    }
}

/// Multiplies every gradient by the inverse scale and looks at it on the way: whether it is finite, or for its
/// sum of squares, which is finite only if the gradient is, or both. Nothing is looked for without a `look`.
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
    let seen = look.map(|look| Seen::new(model, scaled.as_ref().unwrap_or(&grads), look));
    let mut visitor = Unscale {
        scaled,
        inverse: Inverse::new(inverse_scale),
        seen,
        error: None,
        out: Unscaled {
            grads,
            parameters: Vec::new(),
            flags: Numbers::default(),
            flags_are_squares: look == Some(Look::Squares),
            squares: Vec::new(),
            norm: None,
            loss: None,
            found_elsewhere: false,
            of_all_losses: false,
        },
    };
    visit_once(model, &mut visitor);
    let Unscale {
        seen,
        error,
        mut out,
        ..
    } = visitor;
    if let Some(error) = error {
        return Err(error);
    }
    if out.parameters.is_empty() {
        return Err(AmpError::NoGradients);
    }
    if let Some(seen) = seen {
        (out.flags, out.squares) = seen.found();
    }
    Ok(out)
}

struct Unscale {
    /// Where gradients are taken from, unless they are changed in place.
    scaled: Option<GradientsParams>,
    inverse: Inverse,
    /// `None` where nothing is looked for.
    seen: Option<Seen>,
    error: Option<AmpError>,
    out: Unscaled,
}

impl FloatVisitor for Unscale {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let given = self.scaled.as_mut().unwrap_or(&mut self.out.grads);
        // One that was made by hand may be on the device of the model, with autodiff: Burn's backward pass and its
        // optimizers know gradients without.
        let grad = given.remove::<D>(param.id).map(Tensor::without_autodiff);
        let Some(grad) = grad else {
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
        let grad = match &mut self.seen {
            Some(seen) => seen.look(grad, &mut self.inverse),
            None if grad.shape().num_elements() == 0 => grad,
            None => self.inverse.apply(grad),
        };
        self.out.grads.register::<D>(param.id, grad);
    }
}
