//! The global norm of gradients, and clipping to one.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use burn_lean_graph::in_host_memory;
use burn_lean_reparam::FloatVisitor;

use super::one_pass::Look;
use super::seen::Seen;
use super::unscale::{Inverse, InverseScale};
use super::walk::{same_device, visit_once};
use crate::AmpError;

/// What gradients are multiplied by to clip them.
#[allow(clippy::large_enum_variant)] // There is one at a time, on the stack.
pub(super) enum Factor {
    /// On a CPU, where the norm is at hand and most steps need no multiplication.
    Number(f32),
    /// On the device, without waiting for it; `[1]`.
    Tensor(Tensor<1>),
}

impl Factor {
    /// `min(1, max_norm / (norm + 1e-6))`; 1 where the norm is not finite: of an infinity it would
    /// be 0, of NaN NaN, and no gradient would be left to look at.
    pub(super) fn of(norm: &Tensor<1>, max_norm: f32) -> Self {
        if in_host_memory(&norm.device())
            && let Ok(data) = norm.clone().try_into_data()
            && let Some(norm) = data.iter::<f32>().next()
        {
            return Self::Number(match norm.is_finite() {
                true => ((norm + 1e-6).recip() * max_norm).min(1.0),
                false => 1.0,
            });
        }
        let factor = (norm.clone() + 1e-6)
            .recip()
            .mul_scalar(max_norm)
            .clamp_max(1.0);
        Self::Tensor(factor.mask_fill(norm.clone().is_finite().bool_not(), 1.0))
    }

    fn apply<const D: usize>(&self, grad: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Number(factor) => grad.mul_scalar(*factor),
            Self::Tensor(factor) => {
                let factor = same_device(factor.clone(), &grad.device()).cast(grad.dtype());
                grad * factor.reshape([1; D])
            }
        }
    }
}

/// Global L2 norm of all gradients, on the device of the first; `None` without gradients.
pub(super) fn global_norm<M: Module>(model: &M, grads: &GradientsParams) -> Option<Tensor<1>> {
    let mut squares = Squares {
        grads,
        seen: Seen::new(model, grads, Look::Squares),
        inverse: Inverse::new(InverseScale::Number(1.0)),
    };
    visit_once(model, &mut squares);
    let (_, found) = squares.seen.found();
    norm(found)
}

/// The root of the sum of these numbers, in F32 on the device of the first; `None` without any.
pub(super) fn norm(squares: Vec<Tensor<1>>) -> Option<Tensor<1>> {
    let device = squares.first()?.device();
    let is_wide = squares.iter().any(|part| part.dtype() == DType::F64);
    let is_wide = is_wide && device.supports_dtype(DType::F64);
    let there = |part: Tensor<1>| match is_wide {
        true => same_device(part, &device).cast(DType::F64),
        false => same_device(part.cast(DType::F32), &device),
    };
    let squares: Vec<_> = squares.into_iter().map(there).collect();
    let squares = match <[Tensor<1>; 1]>::try_from(squares) {
        Ok([squares]) => squares,
        Err(squares) => Tensor::cat(squares, 0),
    };
    Some(squares.sum().sqrt().cast(DType::F32))
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    seen: Seen,
    inverse: Inverse,
}

impl FloatVisitor for Squares<'_> {
    fn visit<const D: usize>(&mut self, _path: &str, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            let _ = self.seen.look(grad, &mut self.inverse);
        }
    }
}

pub(super) struct Multiply<'a> {
    pub(super) grads: &'a mut GradientsParams,
    pub(super) factor: Factor,
}

impl FloatVisitor for Multiply<'_> {
    fn visit<const D: usize>(&mut self, _path: &str, param: &Param<Tensor<D>>) {
        // Taken out, so that the product can reuse its memory.
        if let Some(mut grad) = self.grads.remove::<D>(param.id) {
            if grad.shape().num_elements() > 0 {
                grad = self.factor.apply(grad);
            }
            self.grads.register::<D>(param.id, grad);
        }
    }
}

/// A norm that gradients can be clipped to.
pub(crate) fn check_max_norm(max_norm: f32) -> Result<(), AmpError> {
    match max_norm.is_finite() && max_norm > 0.0 {
        true => Ok(()),
        false => Err(AmpError::InvalidConfig {
            field: "max_norm",
            value: max_norm.to_string(),
            expected: "positive and finite",
        }),
    }
}
