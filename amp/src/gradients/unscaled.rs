//! Gradients that were divided by the loss scale.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use burn_lean_reparam::each_float;

use super::norm::{Factor, Multiply, check_max_norm, global_norm, norm};
use super::one_pass::Look;
use super::seen::Numbers;
use super::unscale::look_at;
use super::walk::visit_once;
use crate::AmpError;

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
    /// For each of `parameters` numbers on the device that are finite exactly when the whole
    /// gradient is; parts of sums of squares, which may also overflow by themselves, if `flags_are_squares`.
    /// Empty when the scaler checks nothing.
    pub(crate) flags: Numbers,
    pub(crate) flags_are_squares: bool,
    /// Parts of the sum of squares of the gradients, where they are to be clipped.
    pub(crate) squares: Vec<Tensor<1>>,
    pub(crate) norm: Option<Tensor<1>>,
    /// The loss that these are the gradients of, where that was said; `[1]`.
    pub(crate) loss: Option<Tensor<1>>,
    /// Whether another replica found an infinity or NaN in its gradients of this step.
    pub(crate) found_elsewhere: bool,
    /// Whether they are the gradients of every loss that was scaled: no other optimizer has a part of them.
    pub(crate) of_all_losses: bool,
}

impl Unscaled {
    /// The gradients, for inspection.
    pub fn gradients(&self) -> &GradientsParams {
        &self.grads
    }

    /// Refuses a model that lacks one of the parameters.
    pub(crate) fn check_model<M: Module>(&self, model: &M) -> Result<(), AmpError> {
        let mut known = HashSet::new();
        each_float(model, |_, float| {
            known.insert(float.id());
        });
        match self.parameters.iter().find(|(id, _)| !known.contains(id)) {
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

    /// Says whether another replica found an infinity or NaN among its own gradients of this step:
    /// then the step is skipped here, too.
    ///
    /// Replicas that all get the same reduced gradients take the same decision by themselves. This
    /// is for those that do not: a model whose parts are in several processes, gradients that are
    /// exchanged after they were unscaled. Each asks
    /// [`GradScaler::found_inf`](crate::GradScaler::found_inf), all take the *or* of the answers, and
    /// their scales stay the same.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::{GradientsParams, SgdConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_amp::{GradScalerConfig, LossScale, SkipCause};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(1, 1).init(&device);
    /// let mut scaler = GradScalerConfig::new(LossScale::Static(8.0)).init()?;
    /// let loss = scaler.scale(model.forward(Tensor::<2>::ones([1, 1], &device)).mean())?;
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    ///
    /// let unscaled = scaler.unscale(&model, grads)?;
    /// let here = scaler.found_inf(&model, &unscaled)?;
    /// let there = true; // As the other replica says.
    /// let unscaled = unscaled.with_found_inf(here || there);
    /// let model = scaler.apply(&mut SgdConfig::new().init(), 0.1, model, unscaled)?;
    /// scaler.update()?;
    /// let overflow = scaler.report().unwrap().overflow.as_ref().unwrap();
    /// assert_eq!((here, overflow.cause), (false, SkipCause::OtherReplica));
    /// # Ok::<(), burn_lean_amp::AmpError>(())
    /// ```
    pub fn with_found_inf(mut self, elsewhere: bool) -> Self {
        self.found_elsewhere = elsewhere;
        self
    }

    /// With gradients that `change` makes of these: centralized, with noise, reduced over replicas after they
    /// were unscaled.
    ///
    /// What is not finite, before or after, skips the step. Clip the norm afterwards.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::{GradientsParams, SgdConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_amp::{GradScalerConfig, LossScale};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
    /// let mut scaler = GradScalerConfig::new(LossScale::Static(8.0)).init()?;
    /// let x = Tensor::<2>::from_floats([[1.0, 3.0]], &device);
    /// let loss = scaler.scale(model.forward(x).sum())?;
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    ///
    /// // Gradient centralization: 1 and 3 less their mean.
    /// let unscaled = scaler.unscale(&model, grads)?.with_gradients(&model, |mut grads| {
    ///     if let Some(grad) = grads.remove::<2>(model.weight.id) {
    ///         let mean = grad.clone().mean_dim(0);
    ///         grads.register(model.weight.id, grad - mean);
    ///     }
    ///     grads
    /// })?;
    /// let grad = unscaled.gradients().get::<2>(model.weight.id).unwrap();
    /// assert_eq!(grad.into_data().try_to_vec::<f32>().unwrap(), [-1.0, 1.0]);
    /// let model = scaler.apply(&mut SgdConfig::new().init(), 0.1, model, unscaled)?;
    /// # Ok::<(), burn_lean_amp::AmpError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`GradScaler::unscale`](crate::GradScaler::unscale) of the changed ones.
    pub fn with_gradients<M: Module>(
        self,
        model: &M,
        change: impl FnOnce(GradientsParams) -> GradientsParams,
    ) -> Result<Self, AmpError> {
        let look = (!self.flags.places.is_empty()).then_some(Look::Finite);
        let changed = look_at(model, change(self.grads), look)?;
        let known = changed.parameters.iter().enumerate();
        let known: HashMap<ParamId, usize> = known.map(|(at, (id, _))| (*id, at)).collect();
        let mut changed = Self {
            loss: self.loss,
            found_elsewhere: self.found_elsewhere,
            of_all_losses: self.of_all_losses,
            ..changed
        };
        // What was found in them before stays found.
        let flags = &mut changed.flags;
        let first = flags.tensors.len();
        flags.tensors.extend(self.flags.tensors);
        for ((id, path), mut before) in self.parameters.into_iter().zip(self.flags.places) {
            for place in &mut before {
                place.tensor += first;
            }
            match known.get(&id) {
                Some(at) => flags.places[*at].extend(before),
                None => {
                    changed.parameters.push((id, path));
                    flags.places.push(before);
                }
            }
        }
        Ok(changed)
    }

    /// Scales all gradients down so that their global L2 norm is at most `max_norm`.
    ///
    /// The factor is `min(1, max_norm / (norm + 1e-6))`, computed on the device in F32, and the
    /// norm is over all parameters of the model together (Burn's own clipping is per parameter). Squares are summed up
    /// in F32, in which a gradient beyond 1.8e19 has none that is finite; where there are F64 gradients, in F64.
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

    /// As [`clip_norm`](Self::clip_norm), where the squares are summed up already.
    pub(crate) fn clip_by_squares<M: Module>(mut self, model: &M, max_norm: f32) -> Self {
        if let Some(norm) = norm(std::mem::take(&mut self.squares)) {
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

/// A loss that can be scaled: 65536 times anything is infinite in F16.
pub(crate) fn check_loss(loss: &Tensor<1>) -> Result<(), AmpError> {
    match loss.dtype() {
        DType::F32 | DType::F64 => Ok(()),
        dtype => Err(AmpError::LossDtype { dtype }),
    }
}

/// A loss as it is read for the report, in F32.
pub(crate) fn reported(loss: &Tensor<1>) -> Tensor<1> {
    loss.clone().without_autodiff().cast(DType::F32)
}
