//! Walks over gradients: unscale them, find what is not finite, measure and clip their norm.

pub(crate) mod forensics;

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData, Transaction};
use burn_lean_reparam::{FloatVisitor, visit_floats};

use crate::AmpError;
use crate::device::is_cpu_backend;
use crate::scaler::report::OverflowingParameter;

/// Gradients divided by the loss scale, with what is needed to decide on the step.
///
/// Made by [`GradScaler::unscale`](crate::GradScaler::unscale), consumed by
/// [`GradScaler::apply`](crate::GradScaler::apply): unscaling twice, or stepping with scaled
/// gradients, does not compile.
#[derive(Debug)]
#[must_use = "unscaled gradients do nothing until they are applied"]
pub struct Unscaled {
    pub(crate) grads: GradientsParams,
    /// The parameters with a gradient, in module order: identity and path.
    pub(crate) parameters: Vec<(ParamId, String)>,
    /// For each of `parameters` a number on the device that is finite exactly when the whole
    /// gradient is; sums of squares, which may also overflow by themselves, if `flags_are_squares`.
    /// `None` for an empty gradient; empty when the scaler checks nothing.
    pub(crate) flags: Vec<Option<Tensor<1>>>,
    pub(crate) flags_are_squares: bool,
    pub(crate) norm: Option<Tensor<1>>,
    /// The loss that these are the gradients of, where that was said; `[1]`.
    pub(crate) loss: Option<Tensor<1>>,
}

impl Unscaled {
    /// The gradients, for inspection.
    pub fn gradients(&self) -> &GradientsParams {
        &self.grads
    }

    /// Refuses a model that lacks one of the parameters.
    pub(crate) fn check_model<M: Module>(&self, model: &M) -> Result<(), AmpError> {
        let mut identities = Identities::default();
        model.visit(&mut identities);
        let foreign = self
            .parameters
            .iter()
            .find(|(id, _)| !identities.0.contains(id));
        match foreign {
            None => Ok(()),
            Some((_, path)) => Err(AmpError::ForeignGradients { path: path.clone() }),
        }
    }

    /// Says which loss these are the gradients of, unscaled: for the report and the cause of a
    /// skipped step.
    ///
    /// Without it the losses count that were [scaled](crate::GradScaler::scale) since the last
    /// [`apply`](crate::GradScaler::apply). Needed where several losses are scaled before the first
    /// of several optimizers steps.
    pub fn with_loss(mut self, loss: &Tensor<1>) -> Self {
        self.loss = Some(reported(loss));
        self
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
        self.clip_to(model, norm, max_norm);
        Ok(self)
    }

    /// As [`clip_norm`](Self::clip_norm), where the flags are the sums of squares already.
    pub(crate) fn clip_by_flags<M: Module>(mut self, model: &M, max_norm: f32) -> Self {
        let squares = self.flags.iter().flatten().cloned().collect();
        if let Some(norm) = norm(squares) {
            self.clip_to(model, norm, max_norm);
        }
        self
    }

    fn clip_to<M: Module>(&mut self, model: &M, norm: Tensor<1>, max_norm: f32) {
        let factor = Factor::of(&norm, max_norm);
        if !matches!(factor, Factor::Number(1.0)) {
            let mut multiply = Multiply {
                grads: &mut self.grads,
                factor,
            };
            visit_once(model, &mut multiply);
        }
        self.norm = Some(norm);
    }
}

/// What gradients are multiplied by to clip them.
#[allow(clippy::large_enum_variant)] // There is one at a time, on the stack.
enum Factor {
    /// On a CPU, where the norm is at hand and most steps need no multiplication.
    Number(f32),
    /// On the device, without waiting for it; `[1]`.
    Tensor(Tensor<1>),
}

impl Factor {
    /// `min(1, max_norm / (norm + 1e-6))`; 1 where the norm is not finite: of an infinity it would
    /// be 0, of NaN NaN, and no gradient would be left to look at.
    fn of(norm: &Tensor<1>, max_norm: f32) -> Self {
        if is_cpu_backend(&norm.device())
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

/// A loss as it is read for the report, in F32.
pub(crate) fn reported(loss: &Tensor<1>) -> Tensor<1> {
    loss.clone().without_autodiff().cast(DType::F32)
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
    let mut squares = Squares {
        grads,
        found: Vec::new(),
    };
    visit_once(model, &mut squares);
    norm(squares.found)
}

/// The root of the sum of these numbers, on the device of the first; `None` without any.
fn norm(squares: Vec<Tensor<1>>) -> Option<Tensor<1>> {
    let device = squares.first()?.device();
    let squares: Vec<_> = squares
        .into_iter()
        .map(|square| same_device(square, &device))
        .collect();
    Some(Tensor::cat(squares, 0).sum().sqrt())
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    found: Vec<Tensor<1>>,
}

impl FloatVisitor for Squares<'_> {
    fn visit<const D: usize>(&mut self, _path: &str, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id)
            && grad.shape().num_elements() > 0
        {
            self.found.push(sum_of_squares(grad));
        }
    }
}

/// In F32, `[1]`.
fn sum_of_squares<const D: usize>(grad: Tensor<D>) -> Tensor<1> {
    grad.square().sum().cast(DType::F32)
}

struct Multiply<'a> {
    grads: &'a mut GradientsParams,
    factor: Factor,
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
struct Identities(HashSet<ParamId>);

impl ModuleVisitor for Identities {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.insert(param.id);
    }
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
/// into by [`overflowing`].
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

/// Of the gradients at `paths`, those that are not finite. Reads the device.
pub(crate) fn overflowing<M: Module>(
    model: &M,
    grads: &GradientsParams,
    paths: &[String],
) -> Result<Vec<String>, AmpError> {
    let mut flags = Flags {
        paths,
        grads,
        found: Vec::new(),
        reads: Reads::default(),
    };
    visit_once(model, &mut flags);
    let data = flags.reads.wait()?;
    let flagged = flags.found.into_iter().zip(&data);
    Ok(flagged
        .filter(|(_, flag)| !flag.iter::<f32>().all(|flag| flag.is_finite()))
        .map(|(path, _)| path)
        .collect())
}

struct Flags<'a> {
    paths: &'a [String],
    grads: &'a GradientsParams,
    found: Vec<String>,
    reads: Reads,
}

impl FloatVisitor for Flags<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.paths.iter().any(|wanted| wanted == path)
            && let Some(grad) = self.grads.get::<D>(param.id)
        {
            self.found.push(path.to_string());
            self.reads.register(non_finite_flag(grad).cast(DType::F32));
        }
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

/// A read of tensors that may be on several devices: one transaction for each.
#[derive(Default)]
pub(crate) struct Reads {
    count: usize,
    transactions: Vec<(Device, Transaction, Vec<usize>)>,
}

impl Reads {
    /// Adds a tensor; its place among the results is that of its registration.
    pub(crate) fn register<const D: usize, K>(&mut self, tensor: Tensor<D, K>)
    where
        K: burn::tensor::kind::Transaction,
    {
        let device = tensor.device();
        let known = self.transactions.iter_mut().find(|(of, ..)| *of == device);
        match known {
            Some((_, transaction, places)) => {
                *transaction = std::mem::take(transaction).register(tensor);
                places.push(self.count);
            }
            None => {
                let transaction = Transaction::default().register(tensor);
                self.transactions
                    .push((device, transaction, vec![self.count]));
            }
        }
        self.count += 1;
    }

    /// Reads and waits.
    pub(crate) fn wait(self) -> Result<Vec<TensorData>, AmpError> {
        let mut found: Vec<(usize, TensorData)> = Vec::with_capacity(self.count);
        for (_, transaction, places) in self.transactions {
            found.extend(places.into_iter().zip(read(transaction)?));
        }
        found.sort_by_key(|(place, _)| *place);
        Ok(found.into_iter().map(|(_, data)| data).collect())
    }
}

/// Reads everything registered, in one go; all of it is on one device.
pub(crate) fn read(transaction: Transaction) -> Result<Vec<TensorData>, AmpError> {
    transaction.try_execute().map_err(|error| AmpError::Device {
        reason: error.to_string(),
    })
}
