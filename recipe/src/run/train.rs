//! Training that goes on where it was killed.

use std::cell::RefCell;

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{FloatDType, Tensor};
use burn_lean_amp::{Autocast, Checkpoints, GradScaler, GradScalerConfig};
use burn_lean_prune::Masks;
use burn_lean_quant::{QuantizedForward, advance, quantizers};
use burn_lean_reparam::{
    PathVisitor, Trail, catch_quietly, join_copies, reductions, visit_with_path,
};

use super::session::{Examples, Outputs, Session, own};
use super::{Progress, dtype, seed};
use crate::tensors::on_device;
use crate::{Distillation, RateSchedule, RecipeError, TrainStage};

/// Where a training is: steps before `batch` of `epoch` are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) epoch: u64,
    batch: u64,
}

impl Position {
    fn start_of(epoch: u64) -> Self {
        Self { epoch, batch: 0 }
    }

    /// As the number of a checkpoint.
    fn number(self) -> u64 {
        self.epoch << 32 | self.batch
    }

    fn of_number(number: u64) -> Self {
        Self {
            epoch: number >> 32,
            batch: number & u64::from(u32::MAX),
        }
    }
}

/// One training: its optimizer, scaler and checkpoints.
pub(crate) struct Trainer<'t, 's, 'r, 'a, M, I, T, O> {
    session: &'t Session<'s, 'r, 'a, M, I, T, O>,
    /// Of the state folder.
    key: String,
    /// Of the rows.
    stage: String,
    dtype: FloatDType,
    max_norm: Option<f32>,
    autocast: Autocast,
    quantized: QuantizedForward,
    /// Whether the model carries quantizers.
    quantizes: bool,
    /// Whether the learning rate moves from step to step.
    rate_moves: bool,
    /// Batches of the first epoch, where they had to be counted.
    counted: Option<usize>,
    /// The dense model, and what is learned from it.
    teacher: Option<(M, Distillation)>,
    checkpoints: Option<Checkpoints>,
    optim: ModuleOptimizer,
    scaler: GradScaler,
    position: Position,
    /// Of the last step, without autodiff.
    loss: Option<Tensor<1>>,
    /// Paths of parameters that had infinities before the training: a mask of attention, say.
    infinite: Vec<String>,
}

impl<'t, 's, 'r, 'a, M: Module, I: Examples, T: Examples, O: Outputs>
    Trainer<'t, 's, 'r, 'a, M, I, T, O>
{
    pub(crate) fn new(
        session: &'t Session<'s, 'r, 'a, M, I, T, O>,
        key: &str,
        stage: &str,
        plan: &TrainStage,
        teacher: Option<&M>,
    ) -> Result<Self, RecipeError> {
        let dtype = session.dtype(plan)?;
        let scaler = scaler(dtype, plan.max_norm)?;
        let teacher = plan.distillation.zip(teacher);
        Ok(Self {
            session,
            key: key.into(),
            stage: stage.into(),
            dtype,
            max_norm: plan.max_norm,
            autocast: dtype::autocast(dtype, session.recipe.fallback),
            quantized: QuantizedForward::new().without_schedule(),
            quantizes: false,
            rate_moves: plan.schedule != RateSchedule::Constant || plan.warmup > 0.0,
            counted: None,
            teacher: teacher.map(|(distillation, model)| (model.valid(), distillation)),
            checkpoints: session.state.checkpoints(key),
            optim: session.task.optimizer(&session.device),
            scaler,
            position: Position::start_of(0),
            loss: None,
            infinite: Vec::new(),
        })
    }

    /// Begins a training over these epochs with a new optimizer, or goes on from its checkpoint, if that has
    /// the masks of `model`.
    pub(crate) fn begin(
        &mut self,
        model: M,
        epochs: std::ops::Range<u64>,
    ) -> Result<M, RecipeError> {
        let model = join_copies(model);
        self.quantizes = !quantizers(&model).is_empty();
        if self.scaler.is_disabled() {
            self.infinite = not_finite(&model)?;
        }
        self.optim = self.session.task.optimizer(&self.session.device);
        self.scaler = scaler(self.dtype, self.max_norm)?;
        self.position = Position::start_of(epochs.start);
        let Some(checkpoints) = &self.checkpoints else {
            return Ok(model);
        };
        let Some(latest) = checkpoints.latest()? else {
            return Ok(model);
        };
        let position = Position::of_number(latest);
        if position < self.position {
            return Ok(model);
        }
        if position > Position::start_of(epochs.end) {
            checkpoints.discard_after(self.position.number())?;
            return Ok(model);
        }
        let masks = Masks::of(&model)?;
        // Burn loads running statistics in place.
        let given = (!masks.is_empty()).then(|| own(&model));
        let optim = self.session.task.optimizer(&self.session.device);
        let (model, optim, scaler) = checkpoints.load(latest, model, optim)?;
        if let Some(given) = given
            && Masks::of(&model)? != masks
        {
            // Not everywhere pruning again gives the same zeros, and these are what the stage reports.
            let stage = &self.stage;
            tracing::warn!(
                stage,
                "the checkpoint is of other zeros than now: its stage is trained anew"
            );
            checkpoints.discard_after(self.position.number())?;
            return Ok(join_copies(given));
        }
        // `auto` and fallbacks are of the device: another one may have another dtype, and its loss scale.
        match scaler.config().loss_scale == self.scaler.config().loss_scale {
            true => self.scaler = scaler,
            false => self.scaler.remember_statistics(&model),
        }
        (self.optim, self.position) = (optim, position);
        Ok(join_copies(model))
    }

    /// One epoch, or what is left of it; `of` are its number and that of all as they are shown, and
    /// `rate` gives the learning rate for the share of the epoch that is done.
    pub(crate) fn epoch(
        &mut self,
        mut model: M,
        epoch: u64,
        of: (usize, usize),
        rate: impl Fn(f64) -> f64,
    ) -> Result<M, RecipeError> {
        if self.position.epoch > epoch {
            return Ok(model);
        }
        let session = self.session;
        let batches = session.batches(&self.key, epoch);
        let (least, most) = batches.size_hint();
        let count = match most == Some(least) {
            true => most,
            false => self.rate_moves.then(|| self.count_batches()),
        };
        let mut seen = 0;
        for (index, (inputs, targets)) in batches.enumerate() {
            seen = index + 1;
            if (index as u64) < self.position.batch {
                continue;
            }
            if inputs.examples() == 0 {
                // Its mean loss is NaN, and so would be all weights.
                return Err(RecipeError::EmptyBatch {
                    stage: self.stage.clone(),
                });
            }
            session
                .device
                .seed(seed(session.recipe.seed, &self.key, epoch, index as u64));
            let progress = count.map_or(0.0, |count| index as f64 / count.max(1) as f64);
            let progress = progress.min(1.0);
            model = self.step(model, inputs, targets, rate(progress))?;
            self.position.batch = index as u64 + 1;
            session.listener().tell(&Progress::Step {
                stage: self.stage.clone(),
                epoch: of,
                batch: (index, count),
            })?;
            let every = session.recipe.checkpoint_steps;
            // Skipped steps leave nothing to keep, and the next one may be taken: the epoch's end judges.
            if every.is_some_and(|every| seen % every == 0) && !self.none_taken() {
                // What went wrong is not to take the place of what has not.
                self.check_progress(&model, of.0)?;
                self.save(&model)?;
            }
        }
        if seen == 0 {
            return Err(RecipeError::NoBatch {
                stage: self.stage.clone(),
            });
        }
        self.check_progress(&model, of.0)?;
        self.position = Position::start_of(epoch + 1);
        self.save(&model)?;
        Ok(model)
    }

    /// Refuses an epoch that left NaN in the weights, or took no step for such losses.
    fn check_progress(&mut self, model: &M, epoch: usize) -> Result<(), RecipeError> {
        let Some(loss) = self.loss.take() else {
            return Ok(());
        };
        let read = loss.try_into_scalar::<f32>();
        let loss = read.map_err(|error| RecipeError::task(error.to_string()))?;
        // Where anybody looks, what is not finite is skipped; a loss scale that is too high skips, too.
        let failed = !loss.is_finite() && (self.scaler.is_disabled() || self.none_taken());
        // Of the last step no loss tells.
        let broken = match self.scaler.is_disabled() {
            true => not_finite(model)?,
            false => Vec::new(),
        };
        let mut broken = broken.into_iter();
        let broken = broken.find(|path| !self.infinite.contains(path));
        match failed || broken.is_some() {
            true => Err(RecipeError::Diverged {
                stage: self.stage.clone(),
                epoch,
                loss,
                parameter: broken,
            }),
            false => Ok(()),
        }
    }

    /// Whether all steps of the epoch so far have been skipped.
    fn none_taken(&self) -> bool {
        u64::from(self.scaler.state().consecutive_skips) >= self.position.batch
    }

    /// The batches of a pass over the first epoch: the same number before a restart and after it.
    fn count_batches(&mut self) -> usize {
        let (session, key) = (self.session, &self.key);
        *self
            .counted
            .get_or_insert_with(|| session.batches(key, 0).count())
    }

    fn save(&self, model: &M) -> Result<(), RecipeError> {
        let Some(checkpoints) = &self.checkpoints else {
            return Ok(());
        };
        checkpoints.save(self.position.number(), model, &self.optim, &self.scaler)?;
        let stage = self.stage.clone();
        self.session
            .listener()
            .tell(&Progress::Checkpoint { stage })
    }

    fn step(&mut self, model: M, inputs: I, targets: T, rate: f64) -> Result<M, RecipeError> {
        let (task, device) = (self.session.task, &self.session.device);
        let inputs = on_device(&inputs, device);
        let targets = on_device(&targets, device);
        let taught = self.teacher.as_ref().map(|(teacher, _)| {
            let inputs = on_device(&inputs, &self.session.inner);
            on_device(&(task.forward)(teacher, inputs), device)
        });
        let distillation = self.teacher.as_ref().map(|(_, distillation)| *distillation);
        let refused = RefCell::new(None);
        let loss = |model: &M, (inputs, targets, taught): (I, T, Option<O>)| {
            let outputs = (task.forward)(model, inputs);
            let (Some(distillation), Some(taught), Some(logits)) =
                (distillation, taught, &task.logits)
            else {
                return (task.loss)(outputs, targets);
            };
            let features = match &task.features {
                Some(features) if distillation.features > 0.0 => {
                    (features(&outputs), features(&taught))
                }
                _ => (Vec::new(), Vec::new()),
            };
            if let Err(error) = Distillation::check_features(&features.0, &features.1) {
                *refused.borrow_mut() = Some(error);
                return (task.loss)(outputs, targets);
            }
            let logits = (logits(&outputs), logits(&taught));
            if features.0.is_empty()
                && let Err(error) = Distillation::check_logits(&logits.0)
            {
                *refused.borrow_mut() = Some(error);
                return (task.loss)(outputs, targets);
            }
            let at_targets: Tensor<1> = (task.loss)(outputs, targets);
            distillation.blend(at_targets, logits, features)
        };
        let input = (inputs, targets, taught);
        // In F32 autocast runs the model as it is, past the quantizers of its activations.
        let loss = catch_quietly(|| -> Result<Tensor<1>, RecipeError> {
            Ok(match self.dtype == FloatDType::F32 && self.quantizes {
                true => self.quantized.run(&model, input, loss)?,
                false => self.autocast.run(&model, input, loss)?,
            })
        });
        let loss = loss.map_err(|panic| {
            RecipeError::task(format!(
                "the forward pass or the loss panics ({panic}): look at the shapes that the loader gives"
            ))
        })??;
        if let Some(error) = refused.into_inner() {
            return Err(error);
        }
        if !loss.is_tracked() {
            let reason = "the loss has no gradient: parameters that train, a model on a device with \
                          autodiff, and a loss without `detach` are needed";
            return Err(RecipeError::task(reason));
        }
        self.loss = Some(loss.clone().without_autodiff());
        let grads = self.scaler.scale(loss)?.backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let model = self.scaler.step(&mut self.optim, rate, model, grads)?;
        Ok(advance(join_copies(model)))
    }
}

fn scaler(dtype: FloatDType, max_norm: Option<f32>) -> Result<GradScaler, RecipeError> {
    let config = GradScalerConfig::for_dtype(dtype);
    Ok(config.with_max_norm(max_norm).init()?)
}

/// Paths of the parameters that train and have an infinity or NaN.
fn not_finite<M: Module>(model: &M) -> Result<Vec<String>, RecipeError> {
    struct Look(Result<Vec<String>, RecipeError>);
    impl PathVisitor for Look {
        fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
            let Ok(found) = &mut self.0 else { return };
            if at.is_attached() || !param.is_require_grad() {
                return;
            }
            let finite = reductions::all(param.base().without_autodiff().is_finite());
            match finite.try_into_scalar::<bool>() {
                Ok(true) => {}
                Ok(false) => found.push(at.path()),
                Err(error) => self.0 = Err(RecipeError::task(error.to_string())),
            }
        }
    }
    let mut look = Look(Ok(Vec::new()));
    visit_with_path(model, &mut look);
    look.0
}
