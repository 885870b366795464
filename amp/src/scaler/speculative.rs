//! No-wait mode: the step is taken before it is known to be sound, and taken back if it was not.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{ExecutionError, Tensor, TensorData, read_sync};
use burn_lean_reparam::{Rejected, attached, lost};

use crate::gradients::Unscaled;
use crate::scaler::running_statistics::{Before, RunningStatistics};
use crate::scaler::verdict::{Reading, Verdict};
use crate::{AmpError, GradScaler, StepReport};

/// A training loop's model, optimizer and scaler, stepped without waiting for the device.
///
/// [`GradScaler::step`] has to read whether a gradient overflowed before it may touch the weights,
/// and the device idles meanwhile. Here the step is taken at once, the read is started, and its
/// outcome is looked at during the *next* step, when it has long arrived:
///
/// ```text
/// step t    grads(t); outcome of t−1: fine    → forget what was kept
///                                     overflow → restore model, optimizer, running statistics and
///                                                scaler as they were when step t−1 was taken,
///                                                lower the scale, compute grads(t) again
///           keep the handles, start reading the outcome of t, step
/// ```
///
/// Of the running statistics, what the forward pass of step t−1 made infinite or NaN goes back to
/// before that pass, as in the plain mode.
///
/// The numbers are those of [`GradScaler::step`], bit for bit, as long as the gradients are a
/// function of model, scale and batch: a batch is computed twice after an overflow, and draws new
/// random numbers (dropout) the second time. The cost is memory: weights and optimizer state of
/// the previous step are kept.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, GradScalerConfig, Speculative};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(1, 1).with_bias(false).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::F16).prepare(model)?;
/// let scaler = GradScalerConfig::for_dtype(FloatDType::F16).init()?;
///
/// let mut training = Speculative::new(model, SgdConfig::new().init(), scaler);
/// for value in [f32::INFINITY, 1.0, 1.0] {
///     let x = Tensor::<2>::full([4, 1], value, &device);
///     training.step(0.1, |model, scaler| {
///         let loss = autocast.forward(x.clone(), |x| model.forward(x)).mean();
///         Ok(GradientsParams::from_grads(scaler.scale(loss)?.backward(), model))
///     })?;
/// }
/// let (model, optim, scaler) = training.finish()?;
/// assert_eq!(scaler.state().skipped_steps, 1);
/// assert_eq!(scaler.loss_scale(), 32768.0);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
pub struct Speculative<M: Module> {
    model: M,
    optim: ModuleOptimizer,
    scaler: GradScaler,
    pending: Option<Pending<M>>,
    after_step: Box<dyn FnMut(M) -> M>,
}

/// A step that was taken, with what is needed to take it back.
struct Pending<M: Module> {
    outcome: Outcome,
    reading: Reading,
    model: M,
    buffers: Buffers,
    statistics: Before,
    /// What the step leaves, if it is sound.
    left: RunningStatistics,
    optim: ModuleOptimizer,
    scaler: GradScaler,
}

impl<M: Module> fmt::Debug for Speculative<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Speculative")
            .field("scaler", &self.scaler)
            .field("pending", &self.pending.is_some())
            .finish_non_exhaustive()
    }
}

/// What a function makes of a model after a step. A warning says which mask, quantizer or cast it took off.
pub(crate) fn changed<M: Module>(model: M, change: impl FnOnce(M) -> M) -> M {
    let before = attached(&model);
    let model = change(model);
    if let Some(one) = lost(&before, &model) {
        tracing::warn!(
            parameter = one.path,
            carried = one.name,
            "what is called after each step took off what the parameter carries: change parameters by a \
             `ModuleMapper` over the model, since `Param::map` called by itself makes a plain one"
        );
    }
    model
}

impl<M: Module> Speculative<M> {
    /// Takes over a model, its optimizer and a scaler.
    pub fn new(model: M, optim: ModuleOptimizer, mut scaler: GradScaler) -> Self {
        scaler.remember_statistics(&model);
        Self {
            model,
            optim,
            scaler,
            pending: None,
            after_step: Box::new(|model| model),
        }
    }

    /// What a loop does with its model after each step: quantizers move on, masks follow their schedule.
    /// Default: nothing.
    ///
    /// As in a loop around [`GradScaler::step`] it acts once for each batch, also after a step that
    /// is taken back: it is called again then, with the model of before that step.
    pub fn with_after_step(mut self, after_step: impl FnMut(M) -> M + 'static) -> Self {
        self.after_step = Box::new(after_step);
        self
    }

    /// One iteration: `gradients` computes the scaled gradients of this batch for the given model.
    ///
    /// It is called a second time when the previous step turns out to have overflowed, so it must
    /// not consume the batch. A step with [`LossScale::None`](crate::LossScale::None) is never
    /// taken back.
    ///
    /// # Errors
    ///
    /// Whatever `gradients` returns, and the errors of [`GradScaler::step`]. The training can go
    /// on after any of them: the parameters are those before the failed step.
    pub fn step(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        mut gradients: impl FnMut(&M, &mut GradScaler) -> Result<GradientsParams, AmpError>,
    ) -> Result<(), AmpError> {
        let mut grads = gradients(&self.model, &mut self.scaler);
        if self.resolve()? {
            grads = gradients(&self.model, &mut self.scaler);
        }
        // The gradients are gone when the outcome is known: their flags must say it all.
        let unscaled =
            grads.and_then(|grads| self.scaler.unscale_and_clip_flagged(&self.model, grads));
        match unscaled {
            // Of one optimizer: one loss of several that were accumulated may be NaN.
            Ok(unscaled) => self.take(
                lr.into(),
                Unscaled {
                    of_all_losses: true,
                    ..unscaled
                },
            ),
            Err(error) => {
                self.scaler.forget_losses();
                Err(error)
            }
        }
    }

    /// Waits for the last step's outcome and hands everything back.
    ///
    /// # Errors
    ///
    /// [`AmpError::Diverged`] or [`AmpError::Device`]; everything is inside.
    #[allow(clippy::type_complexity)]
    pub fn finish(
        mut self,
    ) -> Result<
        (M, ModuleOptimizer, GradScaler),
        Rejected<(M, ModuleOptimizer, GradScaler), AmpError>,
    > {
        let resolved = self.resolve();
        let parts = (self.model, self.optim, self.scaler);
        match resolved {
            Ok(_) => Ok(parts),
            Err(error) => Err(Rejected::new(parts, error)),
        }
    }

    /// The model after the last step, which may yet be taken back: for reading, not for saving.
    /// Use [`settle`](Self::settle) before a checkpoint or an evaluation.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Waits for the last step's outcome, after which model, optimizer and scaler are final.
    ///
    /// # Errors
    ///
    /// As [`finish`](Self::finish).
    pub fn settle(&mut self) -> Result<(&M, &ModuleOptimizer, &GradScaler), AmpError> {
        self.resolve()?;
        Ok((&self.model, &self.optim, &self.scaler))
    }

    /// What the last step with a known outcome did.
    pub fn report(&self) -> Option<&StepReport> {
        match &self.pending {
            Some(pending) => pending.scaler.report(),
            None => self.scaler.report(),
        }
    }

    /// Looks at the outcome of the pending step; true if it was taken back.
    fn resolve(&mut self) -> Result<bool, AmpError> {
        let Some(pending) = self.pending.take() else {
            return Ok(false);
        };
        let Pending {
            outcome,
            reading,
            model,
            buffers,
            statistics,
            left,
            optim,
            mut scaler,
        } = pending;
        let data = match outcome.wait() {
            Ok(data) => data,
            Err(error) => {
                scaler.forget_losses();
                self.restore(model, buffers, optim, scaler);
                return Err(AmpError::Device {
                    reason: error.to_string(),
                });
            }
        };
        if scaler.record_verdict(reading.verdict(&data)) {
            scaler.update()?;
            // The gradients computed meanwhile were scaled with the same scale and belong to the
            // next step: their loss is pending there.
            scaler.take_pending_loss(&mut self.scaler);
            scaler.statistics.keep(left);
            self.scaler = scaler;
            return Ok(false);
        }
        let updated = scaler.update();
        self.restore(model, buffers, optim, scaler);
        let mended = self.scaler.statistics.mend(&statistics, self.model.clone());
        self.model = changed(mended, &mut self.after_step);
        updated.map(|()| true)
    }

    fn restore(&mut self, model: M, buffers: Buffers, optim: ModuleOptimizer, scaler: GradScaler) {
        self.model = buffers.restore(model);
        self.optim = optim;
        self.scaler = scaler;
    }

    /// Keeps what is needed to go back, starts the read, and steps.
    fn take(&mut self, lr: ModuleLearningRate, unscaled: Unscaled) -> Result<(), AmpError> {
        let mut reading = self.scaler.reading(&unscaled);
        if !reading.paths.is_empty() {
            let transaction = std::mem::take(&mut reading.transaction);
            let outcome = Outcome::start(transaction.execute_async());
            // Before the buffers, which take the update of the forward pass in, as it is.
            let statistics = RunningStatistics::before_forward(&self.model);
            let buffers = Buffers::of(&self.model);
            let known = &self.scaler.statistics;
            let (model, left) = known.mend_taken(&statistics, self.model.clone());
            self.model = model;
            self.pending = Some(Pending {
                outcome,
                reading,
                model: self.model.clone(),
                statistics,
                buffers,
                left,
                optim: self.optim.clone(),
                scaler: self.scaler.clone(),
            });
        }
        let stepped = self.optim.step(lr, self.model.clone(), unscaled.grads);
        self.model = changed(stepped, &mut self.after_step);
        // Go on as if the step were sound; `resolve` puts the true scaler in its place.
        self.scaler.record_verdict(Verdict::default());
        self.scaler.update()
    }
}

type ReadFuture = Pin<Box<dyn Future<Output = Result<Vec<TensorData>, ExecutionError>>>>;

/// A read under way, or already done.
struct Outcome {
    arrived: Option<Result<Vec<TensorData>, ExecutionError>>,
    reading: Option<ReadFuture>,
}

impl Outcome {
    /// Polls once, which submits the copy to the device *before* the work of the next step.
    fn start(
        future: impl Future<Output = Result<Vec<TensorData>, ExecutionError>> + 'static,
    ) -> Self {
        let mut future: ReadFuture = Box::pin(future);
        match future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(data) => Self {
                arrived: Some(data),
                reading: None,
            },
            Poll::Pending => Self {
                arrived: None,
                reading: Some(future),
            },
        }
    }

    fn wait(mut self) -> Result<Vec<TensorData>, ExecutionError> {
        match (self.arrived.take(), self.reading.take()) {
            (Some(data), _) => data,
            (None, Some(future)) => read_sync(future),
            (None, None) => unreachable!("an outcome has arrived or is being read"),
        }
    }
}

/// A read that is given up leaves its staging buffer mapped, and Burn's wgpu runtime uses that
/// buffer again for the next read, which fails (seen with cubecl-wgpu 0.11.3). So it is awaited.
impl Drop for Outcome {
    fn drop(&mut self) {
        if let Some(future) = self.reading.take() {
            let _ = read_sync(future);
        }
    }
}

/// The values of everything that is not trained: running statistics.
///
/// Burn shares a `RunningState` between clones and changes it in place, so the kept model alone
/// would not bring back the statistics of before the forward pass.
struct Buffers {
    values: Values,
}

/// For each identity, one entry per parameter that has it, in module order; `None` for one that is
/// trained. A frozen clone has the identity of its original, but not its values.
type Values = HashMap<ParamId, VecDeque<Option<Box<dyn Any + Send>>>>;

impl Buffers {
    fn of<M: Module>(model: &M) -> Self {
        // Merges the updates that threads have pending in the running states of `model`.
        let _ = model.valid();
        let mut collect = CollectBuffers::default();
        model.visit(&mut collect);
        Self {
            values: collect.values,
        }
    }

    fn restore<M: Module>(self, model: M) -> M {
        // And here, so that none is merged into the restored values later.
        let _ = model.valid();
        model.map(&mut RestoreBuffers(self.values))
    }
}

/// Running states are visited as parameters that do not require a gradient.
#[derive(Default)]
struct CollectBuffers {
    values: Values,
}

impl ModuleVisitor for CollectBuffers {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value: Option<Box<dyn Any + Send>> = match param.is_require_grad() {
            true => None,
            false => Some(Box::new(param.base())),
        };
        self.values.entry(param.id).or_default().push_back(value);
    }
}

struct RestoreBuffers(Values);

impl ModuleMapper for RestoreBuffers {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = self.0.get_mut(&param.id).and_then(VecDeque::pop_front);
        match value.flatten().map(|value| value.downcast()) {
            Some(Ok(value)) => param.map(|_| *value),
            _ => param,
        }
    }
}
