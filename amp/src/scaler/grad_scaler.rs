//! The gradient scaler: scale the loss, unscale the gradients, step or skip, update the scale.

use burn::config::Config;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{FloatDType, Tensor};
use burn_lean_graph::hooks::step_taken;
use burn_lean_reparam::Rejected;

use crate::gradients::{self, Described, InverseScale, Look, Unscaled};
use crate::scaler::report::{Overflow, SkipCause, StepReport};
use crate::scaler::running_statistics::RunningStatistics;
use crate::scaler::verdict::{Reading, Verdict};
use crate::{AmpError, LossScale, scaler::LossScaleState};

/// Configuration of a [`GradScaler`].
#[derive(Config, Debug)]
pub struct GradScalerConfig {
    /// None, static or dynamic.
    pub loss_scale: LossScale,
    /// Clip the global L2 norm of the unscaled gradients to this in [`GradScaler::step`]; positive.
    ///
    /// With [`LossScale::None`] the norm is not reported, and a step whose norm is not finite is
    /// taken without clipping: to know would cost the read that [`LossScale::Static`] of 1 makes.
    /// Default: no clipping.
    #[config(default = "None")]
    pub max_norm: Option<f32>,
    /// Skipped steps in a row that make [`GradScaler::step`] fail with [`AmpError::Diverged`];
    /// `None` for no limit. Default 50: from 65536 the scale has then fallen to 2⁻³⁴.
    #[config(default = "Some(50)")]
    pub max_consecutive_skips: Option<usize>,
}

impl GradScalerConfig {
    /// What the compute dtype needs: dynamic scaling for F16, for BF16 the check of gradients alone, nothing for
    /// F32.
    pub fn for_dtype(dtype: FloatDType) -> Self {
        Self::new(LossScale::for_dtype(dtype))
    }

    /// Builds the scaler.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidConfig`] with the field that is out of range.
    pub fn init(&self) -> Result<GradScaler, AmpError> {
        self.loss_scale.validate()?;
        if let Some(max_norm) = self.max_norm {
            gradients::check_max_norm(max_norm)?;
        }
        if self.max_consecutive_skips == Some(0) {
            return Err(AmpError::InvalidConfig {
                field: "max_consecutive_skips",
                value: "0".into(),
                expected: "at least 1, or none",
            });
        }
        Ok(GradScaler {
            config: self.clone(),
            state: self.loss_scale.init(),
            pending_losses: Vec::new(),
            unserved: 0,
            scaled_by: None,
            found_inf: None,
            report: None,
            statistics: RunningStatistics::default(),
            is_warned: false,
        })
    }
}

/// Keeps F16 gradients out of underflow and the optimizer out of infinities.
///
/// ```text
/// scale    loss · scale                                 (in F32, before backward)
/// unscale  gradient · f32(1/scale)                      (in F32)
/// apply    any gradient not finite ? skip : optimizer step
/// update   see DynamicLossScale
/// ```
///
/// [`step`](Self::step) does the last three. Take them one by one for several optimizers with one
/// scale, or to look at the unscaled gradients or clip them; order mistakes do not compile, because
/// [`unscale`](Self::unscale) turns gradients into [`Unscaled`] and only those can be applied. The
/// losses scaled since the last `apply` are those of the next one. Where the losses of several
/// optimizers are scaled before the first of them is served, only one that is not finite is told
/// from the others, by its gradients: say whose is whose with [`Unscaled::with_loss`].
///
/// The scaler reads the device once per step, in [`apply`](Self::apply), and not at all with
/// [`LossScale::None`]; [`Speculative`](crate::Speculative) hides that read too. It is a plain
/// value: clones do not share state.
///
/// # Gradient accumulation
///
/// Scale each micro-batch's loss, add up the scaled gradients with Burn's `GradientsAccumulator`,
/// and call [`step`](Self::step) with the sum: the scale only changes there.
///
/// # Example
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, GradScalerConfig};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(1, 1).with_bias(false).init(&device);
/// let (mut model, autocast) = AutocastConfig::new(FloatDType::F16).prepare(model)?;
/// let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16).init()?;
/// let mut optim = SgdConfig::new().init();
///
/// for step in 0..2 {
///     let x = Tensor::<2>::full([4, 1], if step == 0 { f32::INFINITY } else { 1.0 }, &device);
///     let loss = autocast.forward(x, |x| model.forward(x)).mean();
///     let grads = GradientsParams::from_grads(scaler.scale(loss)?.backward(), &model);
///     model = scaler.step(&mut optim, 0.1, model, grads)?;
/// }
/// // The first step was skipped, and the scale halved.
/// assert_eq!(scaler.state().skipped_steps, 1);
/// assert_eq!(scaler.loss_scale(), 32768.0);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
#[derive(Debug, Clone)]
pub struct GradScaler {
    pub(crate) config: GradScalerConfig,
    pub(crate) state: LossScaleState,
    /// The losses scaled since the last step, on the device, `[1]` each.
    pending_losses: Vec<Tensor<1>>,
    /// How many losses were scaled without a `step` for each.
    unserved: usize,
    /// What the last loss was multiplied by. Where the losses of two optimizers are scaled together, the
    /// step of the first may change the scale before that of the second.
    pub(crate) scaled_by: Option<f32>,
    /// Whether any gradients applied since the last update were not finite.
    found_inf: Option<bool>,
    report: Option<StepReport>,
    /// Of the models that it steps, for a skipped step.
    pub(crate) statistics: RunningStatistics,
    /// That the loss may not have been scaled was said.
    is_warned: bool,
}

impl GradScaler {
    /// Multiplies the loss by the loss scale. Call `backward` on the result.
    ///
    /// `loss` is F32 (or F64) of shape `[1]`. With [`LossScale::None`] it is returned unchanged.
    ///
    /// # Errors
    ///
    /// [`AmpError::LossDtype`] when the loss is in half precision: 65536 times anything is
    /// infinite there.
    pub fn scale(&mut self, loss: Tensor<1>) -> Result<Tensor<1>, AmpError> {
        gradients::check_loss(&loss)?;
        if self.is_disabled() {
            return Ok(loss);
        }
        self.pending_losses.push(gradients::reported(&loss));
        self.unserved += 1;
        self.scaled_by = Some(self.state.scale);
        match self.state.scale == 1.0 {
            true => Ok(loss),
            false => Ok(loss.mul_scalar(self.state.scale)),
        }
    }

    /// Divides the gradients of `model` by the loss scale and looks for infinities and NaN.
    ///
    /// Everything stays on the device. Parameters without a gradient are left alone, and gradients of what is
    /// not in `model` are left out: of a part of a model unscale the part's, and step the part. A part of the
    /// model and its frozen clone have one gradient, which counts once; Burn's optimizers step the
    /// one of them that comes first, so let that be the one to train.
    ///
    /// # Errors
    ///
    /// [`AmpError::NoGradients`], or [`AmpError::GradientDtype`] with the path of a parameter
    /// whose gradient is in half precision, and why it may be.
    pub fn unscale<M: Module>(
        &self,
        model: &M,
        grads: GradientsParams,
    ) -> Result<Unscaled, AmpError> {
        let check = match self.is_disabled() {
            true => None,
            false => Some(Look::Finite),
        };
        gradients::unscale(model, grads, self.inverse_scale(), check)
    }

    /// Whether one of the gradients, their norm or the loss is infinite or NaN: what replicas that do not see
    /// the same gradients have to agree on before they [`apply`](Self::apply) them
    /// ([`Unscaled::with_found_inf`]). A read of its own; false with [`LossScale::None`].
    ///
    /// # Errors
    ///
    /// [`AmpError::Device`] when the read fails.
    pub fn found_inf<M: Module>(&self, model: &M, unscaled: &Unscaled) -> Result<bool, AmpError> {
        let verdict = self.reading(unscaled).wait()?.exact(model, unscaled)?;
        Ok(!verdict.is_finite())
    }

    fn inverse_scale(&self) -> InverseScale {
        let scale = self.scaled_by.unwrap_or(self.state.scale);
        let scaled = LossScaleState {
            scale,
            ..self.state
        };
        InverseScale::Number(scaled.inverse_scale())
    }

    /// Remembers the running statistics of `model`'s BatchNorms as sound.
    ///
    /// A skipped step puts back what its forward passes made infinite or NaN: the statistics of
    /// before the last pass, or, where an earlier pass of the step was the broken one, those of the
    /// last step that was taken. The first step of a training has none before it. Then the
    /// statistics remembered here are put back, and without them 0 and 1, with which a new BatchNorm
    /// starts. [`Checkpoints::load`](crate::Checkpoints::load) has remembered them; call this where
    /// a model that was trained before is loaded in another way.
    pub fn remember_statistics<M: Module>(&mut self, model: &M) {
        self.statistics.keep(RunningStatistics::of(model).sound());
    }

    /// Steps the optimizer, or skips the step when a gradient is not finite.
    ///
    /// A skipped step leaves the parameters of `model`, and `optim`, as they were. The running
    /// statistics of a BatchNorm are not part of that: the forward pass has updated them. Where
    /// that made them infinite or NaN, they go back to what they were before; the next step that is
    /// taken does so with what the pass of another model's skipped step, which went through this one,
    /// made so. Call [`update`](Self::update) once when all optimizers have been served. This is the
    /// one place that reads the device.
    ///
    /// Quantizers of `model` move on by one step of their schedule with one that is taken, and warn after the
    /// first of layers that are called past them. Where the forward pass is not recorded, in a region say,
    /// BatchNorms go by `freeze_batch_norm_at` only if `burn_lean_quant::advance` is called after each step.
    ///
    /// # Errors
    ///
    /// The model comes back in the error. [`AmpError::ForeignGradients`] when the gradients are
    /// those of another model, [`AmpError::Device`] when the read fails.
    pub fn apply<M: Module>(
        &mut self,
        optim: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        unscaled: Unscaled,
    ) -> Result<M, Rejected<M, AmpError>> {
        let verdict = unscaled
            .check_model(&model)
            .and_then(|()| self.reading(&unscaled).wait())
            .and_then(|verdict| verdict.exact(&model, &unscaled));
        let verdict = match verdict {
            Ok(verdict) => verdict,
            Err(error) => {
                self.forget_losses();
                return Err(Rejected::new(model, error));
            }
        };
        if unscaled.loss.is_none() {
            self.pending_losses = verdict.not_of_this_step(&self.pending_losses);
        }
        let taken = self.judge(&model, &unscaled, verdict);
        let step = |model: M| {
            let model = optim.step(lr, model, unscaled.grads);
            step_taken(&model);
            model
        };
        if taken && self.is_disabled() {
            return Ok(step(model));
        }
        let before = RunningStatistics::before_forward(&model);
        Ok(match taken {
            true => {
                let (model, left) = self.statistics.mend_taken(&before, model);
                self.statistics.keep(left);
                step(model)
            }
            false => self.statistics.mend(&before, model),
        })
    }

    /// Moves the loss scale on, once per iteration.
    ///
    /// # Errors
    ///
    /// [`AmpError::NothingToUpdate`] when nothing was applied since the last call,
    /// [`AmpError::Diverged`] when too many steps in a row were skipped. After the latter the
    /// scaler can be used further: the count goes on.
    pub fn update(&mut self) -> Result<(), AmpError> {
        let found_inf = self.found_inf.take().ok_or(AmpError::NothingToUpdate)?;
        self.forget_losses();
        let before = self.state;
        self.state = self.config.loss_scale.update(before, found_inf);
        if self.state.scale != before.scale {
            tracing::info!(
                from = before.scale,
                to = self.state.scale,
                step = self.state.steps,
                "loss scale changed"
            );
        }
        match self.config.max_consecutive_skips {
            Some(limit) if found_inf && self.state.consecutive_skips as usize >= limit => {
                Err(self.diverged())
            }
            _ => Ok(()),
        }
    }

    /// Unscales, clips if configured, steps or skips, and updates: the usual iteration.
    ///
    /// Gradients are divided by the loss scale, whoever multiplied the loss by it; where that was not
    /// [`scale`](Self::scale), a warning of [`tracing`] says so, once.
    ///
    /// All losses scaled since the last step are taken for this one's, as those of micro-batches: one that
    /// is not finite skips it, and the report has their mean. Scale the losses of several optimizers one by
    /// one, each before its step, or say whose is whose with [`Unscaled::with_loss`].
    ///
    /// # Errors
    ///
    /// As [`unscale`](Self::unscale), [`apply`](Self::apply) and [`update`](Self::update). The
    /// model comes back in the error: after [`AmpError::Diverged`] its parameters are those before
    /// the first of the skipped steps.
    pub fn step<M: Module>(
        &mut self,
        optim: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        grads: GradientsParams,
    ) -> Result<M, Rejected<M, AmpError>> {
        let is_scaled = self.unserved > 0 || self.state.scale == 1.0;
        self.unserved = self.unserved.saturating_sub(1);
        if !is_scaled && !self.is_warned && !self.is_disabled() {
            self.is_warned = true;
            tracing::warn!(
                step = self.state.steps,
                loss_scale = self.state.scale,
                "`scale` was not called since the last step: if these are gradients of the loss itself, they \
                 become so many times too small; call `scaler.scale(loss)?.backward()`"
            );
        }
        let inverse = self.inverse_scale();
        let unscaled = match self.unscale_and_clip(&model, grads, inverse) {
            // One of several that were accumulated may be NaN, as that of a batch without examples.
            Ok(unscaled) => Unscaled {
                of_all_losses: true,
                ..unscaled
            },
            Err(error) => {
                self.forget_losses();
                return Err(Rejected::new(model, error));
            }
        };
        let model = self.apply(optim, lr, model, unscaled)?;
        match self.update() {
            Ok(()) => Ok(model),
            Err(error) => Err(Rejected::new(model, error)),
        }
    }

    /// What the next loss is multiplied by; 1 when disabled.
    pub fn loss_scale(&self) -> f32 {
        self.state.scale
    }

    /// The state: scale, trackers and counters.
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// The configuration.
    pub fn config(&self) -> &GradScalerConfig {
        &self.config
    }

    /// Whether this is [`LossScale::None`], which does nothing.
    pub fn is_disabled(&self) -> bool {
        self.config.loss_scale == LossScale::None
    }

    /// What the last [`apply`](Self::apply) or [`step`](Self::step) did.
    pub fn report(&self) -> Option<&StepReport> {
        self.report.as_ref()
    }

    /// Unscales, checks and clips as configured, in as few passes as that takes. The sums of squares
    /// serve as flags, so [`judge`](Self::judge) needs the gradients.
    pub(crate) fn unscale_and_clip<M: Module>(
        &self,
        model: &M,
        grads: GradientsParams,
        inverse: InverseScale,
    ) -> Result<Unscaled, AmpError> {
        self.unscale_looking(model, grads, inverse, Look::Squares)
    }

    /// As [`unscale_and_clip`](Self::unscale_and_clip), with flags that say it all when the gradients are gone.
    pub(crate) fn unscale_and_clip_flagged<M: Module>(
        &self,
        model: &M,
        grads: GradientsParams,
    ) -> Result<Unscaled, AmpError> {
        self.unscale_looking(model, grads, self.inverse_scale(), Look::Both)
    }

    /// `to_clip` is what is looked for in gradients that are clipped.
    fn unscale_looking<M: Module>(
        &self,
        model: &M,
        grads: GradientsParams,
        inverse: InverseScale,
        to_clip: Look,
    ) -> Result<Unscaled, AmpError> {
        match (self.config.max_norm, self.is_disabled()) {
            (Some(max_norm), false) => {
                let unscaled = gradients::unscale(model, grads, inverse, Some(to_clip))?;
                Ok(unscaled.clip_by_squares(model, max_norm))
            }
            (None, false) => gradients::unscale(model, grads, inverse, Some(Look::Finite)),
            (max_norm, true) => {
                let unscaled = gradients::unscale(model, grads, inverse, None)?;
                match max_norm {
                    Some(max_norm) => unscaled.clip_norm(model, max_norm),
                    None => Ok(unscaled),
                }
            }
        }
    }

    /// Tells the scaler the unscaled loss of a step that it did not scale itself.
    #[cfg(feature = "train")]
    pub(crate) fn with_pending_loss(mut self, loss: Tensor<1>) -> Self {
        self.pending_losses = vec![loss];
        self
    }

    /// Collects what must be read to decide on a step.
    pub(crate) fn reading(&self, unscaled: &Unscaled) -> Reading {
        match &unscaled.loss {
            Some(loss) => Reading::of(unscaled, std::slice::from_ref(loss)),
            None => Reading::of(unscaled, &self.pending_losses),
        }
    }

    /// Writes the report, with what there is to say of the overflowing gradients; true when the
    /// step may be taken.
    pub(crate) fn judge<M: Module>(
        &mut self,
        model: &M,
        unscaled: &Unscaled,
        verdict: Verdict,
    ) -> bool {
        let described = Described::of(model, &unscaled.grads, Some(&verdict.overflowing));
        let taken = self.record_verdict(verdict);
        if let Some(overflow) = self
            .report
            .as_mut()
            .and_then(|report| report.overflow.as_mut())
        {
            overflow.details = described;
        }
        taken
    }

    /// Writes the report from what was read; true when the step may be taken.
    pub(crate) fn record_verdict(&mut self, verdict: Verdict) -> bool {
        // That of the gradients, also where it was changed since.
        let scale = self.scaled_by.unwrap_or(self.state.scale);
        let loss = verdict.loss();
        let overflow = verdict
            .cause(&self.config.loss_scale, scale)
            .map(|cause| Overflow {
                cause,
                paths: verdict.overflowing,
                details: Described::default(),
            });
        if let Some(overflow) = &overflow {
            tracing::warn!(
                step = self.state.steps,
                loss_scale = scale,
                cause = %overflow.cause,
                parameters = overflow.paths.len(),
                first = overflow.first(),
                "skipped step"
            );
        }
        let taken = overflow.is_none();
        self.found_inf = Some(self.found_inf.unwrap_or(false) || !taken);
        self.report = Some(StepReport {
            skipped: !taken,
            loss_scale: scale,
            loss,
            grad_norm: verdict.norm,
            overflow,
        });
        taken
    }

    /// Forgets the losses of a step that failed: they are none of the next one's.
    pub(crate) fn forget_losses(&mut self) {
        self.pending_losses.clear();
    }

    /// Goes back to the first scale, if the state that the last step began with, `before`, is none
    /// of this scaler's.
    #[cfg(feature = "train")]
    pub(crate) fn restart_unless_own(&mut self, before: LossScaleState) {
        if let Err(reason) = before.validate_for(&self.config.loss_scale) {
            self.state = self.state.restarted(&self.config.loss_scale);
            self.scaled_by = None;
            tracing::warn!(%reason, scale = self.state.scale, "loss scale restarted");
        }
    }

    /// Takes over the losses that `other` has scaled since its last step.
    pub(crate) fn take_pending_loss(&mut self, other: &mut Self) {
        self.pending_losses = std::mem::take(&mut other.pending_losses);
        self.scaled_by = other.scaled_by;
    }

    fn diverged(&self) -> AmpError {
        let overflow = self
            .report
            .as_ref()
            .and_then(|report| report.overflow.as_ref());
        AmpError::Diverged {
            consecutive: self.state.consecutive_skips as usize,
            loss_scale: self
                .report
                .as_ref()
                .map_or(self.state.scale, |report| report.loss_scale),
            cause: overflow.map_or(SkipCause::ScaleTooHigh, |overflow| overflow.cause),
            parameter: overflow.and_then(|overflow| overflow.first().map(String::from)),
        }
    }
}
