//! A window on a running training: for the dashboard, and for the error that stopped it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::train::train::WorkerFailure;
use burn::train::{Interrupter, TrainingError};

use crate::{AmpError, GradScaler, StepReport, scaler::LossScaleState};

/// What a training under [`Amp`](crate::Amp) last did.
///
/// Shared by all clones, forks and replicas of the `Amp` it comes from: the last to step wins. It
/// is for looking at: the state that decides is in the module's own tensors.
#[derive(Clone)]
pub struct Monitor {
    shared: Arc<Mutex<Shared>>,
    interrupter: Interrupter,
}

struct Shared {
    state: LossScaleState,
    report: Option<StepReport>,
    error: Option<AmpError>,
    /// Whether the last step was skipped, for each thread that steps: replicas of a distributed
    /// training run ahead of each other, and each has its own schedule.
    skipped: HashMap<ThreadId, bool>,
}

impl Monitor {
    pub(crate) fn new(state: LossScaleState) -> Self {
        Self {
            shared: Arc::new(Mutex::new(Shared {
                state,
                report: None,
                error: None,
                skipped: HashMap::new(),
            })),
            interrupter: Interrupter::new(),
        }
    }

    /// The handle through which an error stops the training.
    ///
    /// Give it to `SupervisedTraining::with_interrupter`; without it, training goes on with every
    /// failed step skipped. All trainings of the `Amp` have this one: [`reset`](Self::reset) before the next.
    pub fn interrupter(&self) -> Interrupter {
        self.interrupter.clone()
    }

    /// The state after the last step; before the first, the initial one (also after a checkpoint
    /// was loaded).
    pub fn state(&self) -> LossScaleState {
        self.lock().state
    }

    /// What the last step did; `None` before the first, and without loss scaling.
    pub fn report(&self) -> Option<StepReport> {
        self.lock().report.clone()
    }

    /// The first error of a step since the last [`reset`](Self::reset).
    pub fn error(&self) -> Option<AmpError> {
        self.lock().error.clone()
    }

    /// Forgets errors, stops and the last step: another training with the same `Amp` begins.
    ///
    /// What a training failed of, or that it was stopped, would end the next one after its first batch. The state
    /// of the scaler stays; Burn keeps the reason of the last stop, which a later stop without one repeats. Not while
    /// one runs.
    pub fn reset(&self) {
        let mut shared = self.lock();
        shared.report = None;
        shared.error = None;
        shared.skipped.clear();
        self.interrupter.reset();
    }

    pub(crate) fn stepped(&self, scaler: &GradScaler) {
        let mut shared = self.lock();
        shared.state = scaler.state();
        shared.report = scaler.report().cloned();
        let skipped = scaler.report().is_some_and(|report| report.skipped);
        shared.skipped.insert(thread::current().id(), skipped);
    }

    /// A step failed, and is skipped.
    pub(crate) fn fail(&self, error: AmpError) {
        self.fail_pass(error);
        self.skipped();
    }

    /// A step was skipped.
    pub(crate) fn skipped(&self) {
        self.lock().skipped.insert(thread::current().id(), true);
    }

    /// One of the passes of a step failed.
    pub(crate) fn fail_pass(&self, error: AmpError) {
        tracing::error!(%error, "mixed precision training failed");
        // Of Burn's errors, this one carries a message.
        self.interrupter
            .fail(TrainingError::Workers(vec![WorkerFailure {
                device_id: 0,
                message: error.to_string(),
            }]));
        self.lock().error.get_or_insert(error);
    }

    /// Whether the last step of this thread was skipped; `None` before its first.
    pub(crate) fn last_step_was_skipped(&self) -> Option<bool> {
        self.lock().skipped.get(&thread::current().id()).copied()
    }

    /// Forgets the steps of this thread: another training begins.
    pub(crate) fn forget_steps(&self) {
        self.lock().skipped.remove(&thread::current().id());
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // The values are plain: a panic elsewhere cannot have left them half written.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = self.lock();
        f.debug_struct("Monitor")
            .field("state", &shared.state)
            .field("error", &shared.error)
            .finish()
    }
}
