//! A learning-rate schedule that waits for skipped steps.

use burn::lr_scheduler::{DynLrScheduler, LrScheduler, LrSchedulerRecord};

use super::Monitor;

/// Holds a schedule back while steps are skipped: it advances once per step taken.
///
/// Burn's training loops call the scheduler before each step, whether or not the step is then
/// skipped. This one repeats the learning rate of a skipped step for the next, under every
/// strategy, also across a checkpoint. Made by [`Amp::lr_scheduler`](crate::Amp::lr_scheduler).
#[derive(Clone)]
pub struct AmpLrScheduler {
    schedule: DynLrScheduler,
    monitor: Monitor,
    lr: Option<f64>,
    /// The learning rate that a skipped step left over in the loaded checkpoint.
    resumed: Option<f64>,
}

const SCHEDULE: &str = "schedule";
const HELD: &str = "held_lr";

impl AmpLrScheduler {
    pub(crate) fn new(schedule: DynLrScheduler, monitor: Monitor) -> Self {
        Self {
            schedule,
            monitor,
            lr: None,
            resumed: None,
        }
    }

    /// The learning rate that the next step has to repeat.
    fn held(&self) -> Option<f64> {
        match self.monitor.last_step_was_skipped() {
            Some(true) => self.lr.or(self.resumed),
            Some(false) => None,
            None => self.resumed,
        }
    }
}

impl LrScheduler for AmpLrScheduler {
    fn step(&mut self) -> f64 {
        let lr = match self.held() {
            Some(lr) => lr,
            None => self.schedule.step(),
        };
        self.lr = Some(lr);
        lr
    }

    fn to_record(&self) -> LrSchedulerRecord {
        let record = LrSchedulerRecord::new().with_record(SCHEDULE, self.schedule.to_record());
        match self.held() {
            Some(lr) => record.with_scalar(HELD, lr),
            None => record,
        }
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        self.schedule = self.schedule.clone().load_record(record.record(SCHEDULE));
        self.resumed = record.scalar(HELD);
        self.lr = None;
        self.monitor.forget_steps();
    }
}

impl std::fmt::Debug for AmpLrScheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AmpLrScheduler")
            .field("lr", &self.lr)
            .finish_non_exhaustive()
    }
}
