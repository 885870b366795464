//! Mixed precision under Burn's `Learner`: the model with its grad scaler, as one module.

mod after_step;
mod lr_scheduler;
mod metric;
mod monitor;
mod own_steps;
mod resumed_loader;
mod state;
mod statistics;
mod step;

use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleDisplay};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_lean_graph::hooks::step_taken;
use burn_lean_reparam::{AttachError, Rejected};

use crate::gradients::{self, InverseScale, Unscaled};
use crate::scaler::running_statistics::RunningStatistics;
use crate::{
    AmpError, Autocast, AutocastConfig, GradScaler, GradScalerConfig, scaler::LossScaleState,
};

pub use after_step::AfterStep;
use after_step::Hook;
pub use lr_scheduler::AmpLrScheduler;
pub use metric::{LossScaleMetric, SkippedStepsMetric};
pub use monitor::Monitor;
pub use own_steps::{OwnSteps, StepLoss};
pub use resumed_loader::ResumedDataLoader;
use state::StateTensors;
use statistics::Statistics;
pub use step::{AmpInferenceStep, AmpTrainStep};
use step::{resumable, stepped};

/// A model that trains in mixed precision under Burn's `Learner` and `SupervisedTraining`.
///
/// It is a module made of the prepared model and of the state of a [`GradScaler`] as two small
/// tensors, so Burn's own checkpoints save and restore the loss scale with the weights, bit for
/// bit. Paths in optimizer and learning-rate groups are those of the inner model; paths in records
/// start with `model.`.
///
/// - Each step reads the device once, as with [`GradScaler::step`]; not at all with
///   [`LossScale::None`](crate::LossScale::None).
/// - A step that is not finite changes neither parameters nor optimizer, and leaves no infinity or
///   NaN in the running statistics of a BatchNorm. The schedule of
///   [`lr_scheduler`](Self::lr_scheduler) waits for it too. With
///   [`LossScale::None`](crate::LossScale::None) nothing is checked, and a gradient norm that is not
///   finite clips nothing.
/// - What is in several places of the model stays one parameter, as by
///   [`join_copies`](burn_lean_reparam::join_copies). Freeze a copy that is to stay as it is (`no_grad`), before or
///   behind the one that trains.
/// - Burn's Learner trains leaves alone: scale an initialization with
///   [`map_leaf`](burn_lean_reparam::map_leaf). What `Param::map` made of a weight by an operation stays as it is.
/// - Gradient accumulation: the scale changes once per optimizer step.
/// - Several devices: workers read the scale, the main device moves it. In distributed data
///   parallel training each replica has a scaler of its own, and since all get the same reduced
///   gradients, all take the same decisions, but for one: a loss that is not finite over gradients that are
///   (0/0 in the mean of a share without examples) is its replica's alone, which skips the step that the
///   others take, and they differ from then on. Divide by a count of at least 1.
/// - A checkpoint of a training with another loss scale (none, another static one, one outside of
///   floor and ceiling) loads: its scale serves one step, then the scale restarts with a warning.
/// - [`with_after_step`](Self::with_after_step) is for what has to happen after each step. Clip weights
///   there: a mapper over the whole of it changes the loss scale, too, which the next step refuses.
/// - An error ([`AmpError::Diverged`], a record that makes no sense) leaves the parameters as they
///   are, and stops the training through [`Monitor::interrupter`]; [`Monitor::error`] keeps it. Another training
///   of the same value begins with [`Monitor::reset`].
///
/// # Example
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn::train::Learner;
/// use burn_lean_amp::{
///     Amp, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, GradScalerConfig,
/// };
///
/// #[derive(Module, Debug)]
/// struct Model {
///     linear: Linear,
/// }
///
/// impl AmpTrainStep for Model {
///     type Input = Tensor<2>;
///     type Output = ();
///
///     fn train_step(&self, autocast: &Autocast, x: Tensor<2>) -> (Tensor<1>, ()) {
///         let y = autocast.forward(x, |x| self.linear.forward(x));
///         (y.mean(), ())
///     }
/// }
///
/// impl AmpInferenceStep for Model {
///     type Input = Tensor<2>;
///     type Output = ();
///
///     fn inference_step(&self, _autocast: &Autocast, _x: Tensor<2>) {}
/// }
///
/// let device = Device::flex().autodiff();
/// let model = Model { linear: LinearConfig::new(2, 1).with_bias(false).init(&device) };
/// let amp = Amp::new(
///     model,
///     &AutocastConfig::new(FloatDType::F16),
///     &GradScalerConfig::for_dtype(FloatDType::F16),
/// )?;
/// let schedule = amp.lr_scheduler(0.1)?;
/// let mut learner = Learner::new(amp, SgdConfig::new().init(), schedule);
///
/// // What `SupervisedTraining` does with each batch:
/// for value in [0.5, f32::INFINITY, 0.5] {
///     let step = learner.train_step(Tensor::full([4, 2], value, &device));
///     learner.lr_step();
///     learner.optimizer_step(step.grads);
/// }
/// let state = learner.model().state()?;
/// assert_eq!((state.steps, state.skipped_steps, state.scale), (3, 1, 32768.0));
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
///
/// Under `SupervisedTraining`, with everything connected:
///
/// ```
/// # use burn::module::{Module, ModuleDisplay};
/// # use burn::optim::ModuleOptimizer;
/// # use burn::train::{Learner, LearningResult, SupervisedTraining};
/// # use burn_lean_amp::{
/// #     Amp, AmpInferenceStep, AmpTrainStep, LossScaleMetric, SkippedStepsMetric,
/// #     AmpError,
/// # };
/// # fn train<M>(
/// #     training: SupervisedTraining<Amp<M>>,
/// #     amp: Amp<M>,
/// #     optim: ModuleOptimizer,
/// # ) -> Result<LearningResult<Amp<M>>, AmpError>
/// # where
/// #     M: Module + ModuleDisplay + AmpTrainStep + AmpInferenceStep + 'static,
/// # {
/// let monitor = amp.monitor();
/// let schedule = amp.lr_scheduler(1e-3)?;
/// let result = training
///     .with_default_checkpointers()
///     .with_interrupter(monitor.interrupter())
///     .metric_train_numeric(LossScaleMetric::new(&monitor))
///     .metric_train_numeric(SkippedStepsMetric::new(&monitor))
///     .launch(Learner::new(amp, optim, schedule));
/// if let Some(error) = monitor.error() {
///     return Err(error);
/// }
/// # Ok(result)
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Amp<M> {
    model: M,
    grad_scaler: StateTensors,
    #[module(skip)]
    config: GradScalerConfig,
    #[module(skip)]
    autocast: Autocast,
    #[module(skip)]
    monitor: Monitor,
    #[module(skip)]
    statistics: Statistics,
    #[module(skip)]
    after_step: Hook,
}

impl<M: Module + ModuleDisplay + 'static> Amp<M> {
    /// Prepares `model` for autocast and gives it a grad scaler.
    ///
    /// For steps that run in a region ([`Autocast::forward`]). [`Autocast::run`], and with it [`OwnSteps`], needs no
    /// preparation: [`from_prepared`](Self::from_prepared) with [`Autocast::new`] leaves weights as they are.
    ///
    /// # Errors
    ///
    /// As [`AutocastConfig::prepare`] and [`GradScalerConfig::init`]; the model comes back.
    pub fn new(
        model: M,
        autocast: &AutocastConfig,
        scaler: &GradScalerConfig,
    ) -> Result<Self, Rejected<M, AmpError>> {
        if let Err(error) = scaler.init() {
            return Err(Rejected::new(model, error));
        }
        let (model, autocast) = autocast.prepare(model)?;
        Self::from_prepared(model, autocast, scaler)
    }

    /// Gives a grad scaler to a model that is prepared, for example with
    /// [`AutocastConfig::prepare_with`].
    ///
    /// # Errors
    ///
    /// As [`GradScalerConfig::init`], or [`AmpError::Attach`] when the model has no parameters;
    /// the model comes back.
    pub fn from_prepared(
        model: M,
        autocast: Autocast,
        scaler: &GradScalerConfig,
    ) -> Result<Self, Rejected<M, AmpError>> {
        let state = match scaler.init() {
            Ok(scaler) => scaler.state(),
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let Some(device) = model.devices().into_iter().next() else {
            return Err(Rejected::new(model, AttachError::NoParameters.into()));
        };
        Ok(Self {
            model: resumable(model),
            grad_scaler: StateTensors::new(&state, &device),
            config: scaler.clone(),
            autocast,
            monitor: Monitor::new(state),
            statistics: Statistics::default(),
            after_step: Hook::default(),
        })
    }

    /// Calls `after_step` with the inner model after each optimizer step, and goes on with what it
    /// returns.
    ///
    /// For what a plain loop does after `optim.step`: to replace pruning masks by a schedule, to clip weights.
    /// The quantizers of a model in quantization-aware training count the steps that are taken by themselves;
    /// `advance` is for learned scales of weights on several devices, which begin there, and for BatchNorms in a
    /// region that a schedule freezes. A skipped step is none, so it is not called then. All clones and replicas
    /// share it; what it captures is in no checkpoint. [`AfterStep`] is the same for a model without mixed precision.
    ///
    /// ```
    /// # use burn::module::{Module, ModuleMapper, Param};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::{Device, FloatDType, Tensor};
    /// # use burn_lean_amp::{Amp, AutocastConfig, GradScalerConfig};
    /// use burn_lean_reparam::map_leaf;
    ///
    /// # let model = LinearConfig::new(2, 1).init(&Device::flex().autodiff());
    /// # let (autocast, scaler) = (
    /// #     AutocastConfig::new(FloatDType::F16),
    /// #     GradScalerConfig::for_dtype(FloatDType::F16),
    /// # );
    /// /// A mapper, since `Param::map` outside of one takes off what the parameter carries.
    /// struct Clip;
    ///
    /// impl ModuleMapper for Clip {
    ///     fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    ///         map_leaf(param, |value| value.clamp(-0.1, 0.1))
    ///     }
    /// }
    ///
    /// let clip = |model: Linear| model.map(&mut Clip);
    /// let amp = Amp::new(model, &autocast, &scaler)?.with_after_step(clip);
    /// # Ok::<(), burn_lean_amp::AmpError>(())
    /// ```
    pub fn with_after_step(mut self, after_step: impl FnMut(M) -> M + Send + 'static) -> Self {
        self.after_step = Hook::new(after_step);
        self
    }

    /// The inner model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The inner model, without the scaler; its master weights are F32.
    ///
    /// Of an `Amp` that was made with [`new`](Self::new) each weight carries the casts of
    /// [`AutocastConfig::prepare`] still. [`Module::materialize`] takes them off, before the model is pruned, quantized
    /// or given to a recipe, which refuse a weight that carries something.
    pub fn into_model(self) -> M {
        self.model
    }

    /// The region that the steps run in.
    pub fn autocast(&self) -> Autocast {
        self.autocast.clone()
    }

    /// The state of the grad scaler. Reads the device.
    ///
    /// # Errors
    ///
    /// [`AmpError::Record`] when a record of another version, or a damaged one, was loaded;
    /// [`AmpError::Device`] when the read fails.
    pub fn state(&self) -> Result<LossScaleState, AmpError> {
        self.grad_scaler.read()
    }

    /// The window on the training that this value and all its clones share.
    pub fn monitor(&self) -> Monitor {
        self.monitor.clone()
    }

    /// A schedule that waits for skipped steps, from one of Burn's configs or a constant.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidConfig`] with Burn's reason.
    pub fn lr_scheduler(
        &self,
        schedule: impl Into<LrSchedulerConfig>,
    ) -> Result<AmpLrScheduler, AmpError> {
        AmpLrScheduler::from_config(schedule.into(), &self.monitor)
    }

    /// The loss as the backward pass needs it.
    fn scale(&self, loss: Tensor<1>) -> Result<Tensor<1>, AmpError> {
        gradients::check_loss(&loss)?;
        if !loss.is_tracked() {
            return Err(AmpError::NoGradients);
        }
        if self.is_disabled() {
            return Ok(loss);
        }
        let scale = self.grad_scaler.scale().cast(loss.dtype());
        Ok(loss * scale)
    }

    /// The loss of a pass tells a broken forward pass from an overflow; NaN one that failed. It travels as the
    /// gradient of the state, so whatever accumulates gradients accumulates it too.
    fn tell(&self, grads: &mut GradientsParams, loss: Tensor<1>) {
        let one = loss.ones_like();
        grads.register(self.grad_scaler.id(), Tensor::cat(vec![loss, one], 0));
    }

    fn is_disabled(&self) -> bool {
        self.config.loss_scale == crate::LossScale::None
    }

    /// Unscales and clips on the device, then reads flags and state in one go.
    fn decide(
        &self,
        grads: GradientsParams,
        losses: Option<Tensor<1>>,
    ) -> Result<(GradScaler, Unscaled, bool), AmpError> {
        let mut scaler = self.config.init()?;
        if scaler.is_disabled() {
            let one = InverseScale::Number(1.0);
            let unscaled = scaler.unscale_and_clip(&self.model, grads, one)?;
            return Ok((scaler, unscaled, true));
        }
        let inverse = InverseScale::Tensor(self.grad_scaler.inverse_scale());
        let unscaled = scaler.unscale_and_clip(&self.model, grads, inverse)?;
        if let Some(losses) = losses {
            let [sum, count] = [losses.clone().slice(0..1), losses.slice(1..2)];
            scaler = scaler.with_pending_loss(sum / count);
        }
        let mut reading = scaler.reading(&unscaled);
        let device = match unscaled.flags.tensors.first() {
            Some(flag) => flag.device(),
            None => self.grad_scaler.scale().device(),
        };
        let transaction = std::mem::take(&mut reading.transaction);
        let data = gradients::read(self.grad_scaler.register(transaction, &device))?;
        let (verdict, state) = data.split_at(data.len().saturating_sub(2));
        scaler.state = state::parse(state)?;
        let verdict = reading.verdict(verdict).exact(&self.model, &unscaled)?;
        let taken = scaler.judge(&self.model, &unscaled, verdict);
        Ok((scaler, unscaled, taken))
    }
}

impl<M: Module + ModuleDisplay + AmpTrainStep + 'static> Amp<M> {
    /// Unscales, clips, steps or skips, and updates. In the error, no parameter has changed.
    fn try_optimize(
        mut self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        mut grads: GradientsParams,
    ) -> Result<Self, Rejected<Self, AmpError>> {
        let losses = grads.remove::<1>(self.grad_scaler.id());
        if self.is_disabled() && losses.is_some() {
            // Only a pass that failed tells of its loss then.
            self.monitor.skipped();
            return Ok(self);
        }
        let decision = self.decide(grads, losses);
        let (mut scaler, unscaled, taken) = match decision {
            Ok(decision) => decision,
            Err(error) => return Err(Rejected::new(self, error)),
        };
        let before_step = self.statistics.take();
        if taken {
            let grads = unscaled.grads;
            self.model = stepped(self.model, |model| model.optimize(optim, lr, grads));
            step_taken(&self.model);
            self.model = self.after_step.call(self.model);
        } else {
            let before = RunningStatistics::before_forward(&self.model);
            self.model = before_step.mend(&before, self.model);
        }
        if scaler.is_disabled() {
            self.monitor.stepped(&scaler);
            return Ok(self);
        }
        let loaded = scaler.state();
        let updated = scaler.update();
        scaler.restart_unless_own(loaded);
        self.grad_scaler = self.grad_scaler.with_state(&scaler.state());
        self.monitor.stepped(&scaler);
        match updated {
            Ok(()) => Ok(self),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }
}
