//! Walks over gradients: unscale them, find what is not finite, measure and clip their norm.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData, Transaction};
use burn_lean_reparam::{FloatVisitor, visit_floats};

use crate::AmpError;
use crate::report::OverflowingParameter;

/// Gradients divided by the loss scale, with what is needed to decide on the step.
///
/// Made by [`GradScaler::unscale`](crate::GradScaler::unscale), consumed by
/// [`GradScaler::apply`](crate::GradScaler::apply): unscaling twice, or stepping with scaled
/// gradients, does not compile.
#[derive(Debug)]
#[must_use = "unscaled gradients do nothing until they are applied"]
pub struct Unscaled {
    pub(crate) grads: GradientsParams,
    /// Per parameter with a gradient, in module order: its path, and a number on the device that
    /// is finite exactly when the whole gradient is. Empty when the scaler checks nothing.
    pub(crate) flags: Vec<(String, Tensor<1>)>,
    pub(crate) norm: Option<Tensor<1>>,
}

impl Unscaled {
    /// The gradients, for inspection.
    pub fn gradients(&self) -> &GradientsParams {
        &self.grads
    }

    /// Scales all gradients down so that their global L2 norm is at most `max_norm`.
    ///
    /// The factor is `min(1, max_norm / (norm + 1e-6))`, computed on the device in F32, and the
    /// norm is over all parameters of the model together (Burn's own clipping is per parameter).
    ///
    /// A norm that is not finite changes no gradient, and makes
    /// [`GradScaler::apply`](crate::GradScaler::apply) skip the step. With
    /// [`LossScale::None`](crate::LossScale::None) nothing is read, so that step is taken, not
    /// clipped, and no norm is reported; `LossScale::Static(1.0)` checks for the price of a read.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidConfig`] unless `max_norm` is positive and finite.
    pub fn clip_norm<M: Module>(mut self, model: &M, max_norm: f32) -> Result<Self, AmpError> {
        check_max_norm(max_norm)?;
        let Some(norm) = global_norm(model, &self.grads) else {
            return Ok(self);
        };
        let factor = (norm.clone() + 1e-6)
            .recip()
            .mul_scalar(max_norm)
            .clamp_max(1.0);
        // Of an infinity it would be 0, of NaN NaN: no gradient would be left to look at.
        let factor = factor.mask_fill(norm.clone().is_finite().bool_not(), 1.0);
        self.multiply(model, factor);
        self.norm = Some(norm);
        Ok(self)
    }

    /// Multiplies every gradient by a number on the device, of shape `[1]`.
    pub(crate) fn multiply<M: Module>(&mut self, model: &M, factor: Tensor<1>) {
        let mut multiply = Multiply {
            grads: &mut self.grads,
            factor,
        };
        visit_once(model, &mut multiply);
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

/// Global L2 norm of all gradients, on the device of the first; `None` without gradients.
fn global_norm<M: Module>(model: &M, grads: &GradientsParams) -> Option<Tensor<1>> {
    let mut squares = SumOfSquares { grads, sum: None };
    visit_once(model, &mut squares);
    squares.sum.map(Tensor::sqrt)
}

struct SumOfSquares<'a> {
    grads: &'a GradientsParams,
    sum: Option<Tensor<1>>,
}

impl FloatVisitor for SumOfSquares<'_> {
    fn visit<const D: usize>(&mut self, _path: &str, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id)
            && grad.shape().num_elements() > 0
        {
            let sum = grad.square().sum().cast(DType::F32);
            self.sum = Some(match self.sum.take() {
                Some(total) => total.clone() + same_device(sum, &total.device()),
                None => sum,
            });
        }
    }
}

struct Multiply<'a> {
    grads: &'a mut GradientsParams,
    factor: Tensor<1>,
}

impl FloatVisitor for Multiply<'_> {
    fn visit<const D: usize>(&mut self, _path: &str, param: &Param<Tensor<D>>) {
        // Taken out, so that the product can reuse its memory.
        if let Some(mut grad) = self.grads.remove::<D>(param.id) {
            if grad.shape().num_elements() == 0 {
                self.grads.register::<D>(param.id, grad);
                return;
            }
            let factor = same_device(self.factor.clone(), &grad.device()).cast(grad.dtype());
            grad = grad * factor.reshape([1; D]);
            self.grads.register::<D>(param.id, grad);
        }
    }
}

/// Shows every float tensor of `model` to `visitor`, but only one of those that share an identity.
///
/// Burn's clones keep it: a model may hold a part of itself twice, as a network and the frozen copy
/// that is its target. Gradients are kept by identity, so such parameters share one: it is shown
/// where it is trained, or else where it comes first.
pub(crate) fn visit_once<M: Module, V: FloatVisitor>(model: &M, visitor: &mut V) {
    let mut trained = Trained::default();
    model.visit(&mut trained);
    let mut once = Once {
        trained: trained.0,
        shown: HashSet::new(),
        visitor,
    };
    visit_floats(model, &mut once);
}

#[derive(Default)]
struct Trained(HashSet<ParamId>);

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.0.insert(param.id);
        }
    }
}

struct Once<'a, V> {
    trained: HashSet<ParamId>,
    shown: HashSet<ParamId>,
    visitor: &'a mut V,
}

impl<V: FloatVisitor> FloatVisitor for Once<'_, V> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let trained_elsewhere = self.trained.contains(&param.id) && !param.is_require_grad();
        if !trained_elsewhere && self.shown.insert(param.id) {
            self.visitor.visit(path, param);
        }
    }
}

pub(crate) fn same_device<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    match tensor.device() == *device {
        true => tensor,
        false => tensor.to_device(device),
    }
}

/// A number that is finite exactly when every element of `x` is: 0 or NaN.
///
/// `0 · x` is 0 for every finite `x`, so the sum cannot overflow, as a sum of the gradients could.
pub(crate) fn non_finite_flag<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.mul_scalar(0.0).sum()
}

/// Multiplies every gradient by `inverse_scale`; with `check`, flags what is not finite.
///
/// Infinities are looked for *before* the multiplication, as PyTorch does, so that a scale below
/// 1 cannot make one up.
pub(crate) fn unscale<M: Module>(
    model: &M,
    grads: GradientsParams,
    inverse_scale: f32,
    check: bool,
) -> Result<Unscaled, AmpError> {
    let mut visitor = Unscale {
        inverse_scale,
        check,
        found: 0,
        error: None,
        out: Unscaled {
            grads,
            flags: Vec::new(),
            norm: None,
        },
    };
    visit_once(model, &mut visitor);
    match visitor.error {
        Some(error) => Err(error),
        None if visitor.found == 0 => Err(AmpError::NoGradients),
        None => Ok(visitor.out),
    }
}

struct Unscale {
    inverse_scale: f32,
    check: bool,
    found: usize,
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
        self.found += 1;
        let dtype = grad.dtype();
        if !matches!(dtype, DType::F32 | DType::F64) {
            self.error = Some(AmpError::GradientDtype {
                path: path.to_string(),
                dtype,
            });
            return;
        }
        // Arithmetic on nothing panics on some of Burn's backends, and there is nothing to do.
        if grad.shape().num_elements() == 0 {
            self.out.grads.register::<D>(param.id, grad);
            return;
        }
        if self.check {
            let flag = non_finite_flag(grad.clone()).cast(DType::F32);
            self.out.flags.push((path.to_string(), flag));
        }
        let grad = match self.inverse_scale == 1.0 {
            true => grad,
            false => grad.mul_scalar(self.inverse_scale),
        };
        self.out.grads.register::<D>(param.id, grad);
    }
}

/// Describes the gradients named in `paths`, on the device; nothing is read.
pub(crate) fn describe_overflow<M: Module>(
    model: &M,
    grads: &GradientsParams,
    paths: &[String],
) -> Vec<OverflowingParameter> {
    if paths.is_empty() {
        return Vec::new();
    }
    let mut visitor = Describe {
        paths,
        grads,
        found: Vec::new(),
    };
    visit_once(model, &mut visitor);
    visitor.found
}

struct Describe<'a> {
    paths: &'a [String],
    grads: &'a GradientsParams,
    found: Vec<OverflowingParameter>,
}

impl FloatVisitor for Describe<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if !self.paths.iter().any(|wanted| wanted == path) {
            return;
        }
        if let Some(grad) = self.grads.get::<D>(param.id) {
            let elements = grad.shape().num_elements();
            let bad = grad.clone().is_finite().bool_not();
            self.found.push(OverflowingParameter {
                path: path.to_string(),
                elements,
                non_finite: bad.clone().int().sum(),
                largest_finite: grad.mask_fill(bad, 0.0).abs().max(),
            });
        }
    }
}

/// Reads everything registered, in one go.
pub(crate) fn read(transaction: Transaction) -> Result<Vec<TensorData>, AmpError> {
    transaction.try_execute().map_err(|error| AmpError::Device {
        reason: error.to_string(),
    })
}
