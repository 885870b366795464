//! A learning-rate schedule that waits for skipped steps.

use burn::lr_scheduler::module_lr_scheduler::{ModuleLrScheduler, ModuleLrSchedulerConfig};
use burn::lr_scheduler::{LrScheduler, LrSchedulerConfig, LrSchedulerRecord};

use super::Monitor;
use crate::AmpError;

/// Holds a schedule back while steps are skipped: it advances once per step taken.
///
/// Burn's training loops call the scheduler before each step, whether or not the step is then
/// skipped. This one repeats the learning rate of a skipped step for the next, under every
/// strategy, also across a checkpoint. [`Amp::lr_scheduler`](crate::Amp::lr_scheduler) makes one
/// from Burn's configs.
///
/// For parameter groups, wrap the schedule of each:
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::{Device, FloatDType};
/// # use burn_lean_amp::{Amp, AutocastConfig, GradScalerConfig};
/// use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
/// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
/// use burn::module::ParamGroup;
///
/// # let model = LinearConfig::new(2, 1).init(&Device::flex().autodiff());
/// # let amp = Amp::new(
/// #     model,
/// #     &AutocastConfig::new(FloatDType::F16),
/// #     &GradScalerConfig::for_dtype(FloatDType::F16),
/// # )?;
/// let mut schedule = ModuleLrScheduler::new(amp.lr_scheduler(0.1)?).with_group(
///     ParamGroup::from_path("bias"),
///     amp.lr_scheduler(CosineAnnealingLrSchedulerConfig::new(0.01, 100))?,
/// );
/// assert_eq!(schedule.step().base(), 0.1);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
#[derive(Clone)]
pub struct AmpLrScheduler {
    /// Of one group: Burn builds no other type from a config.
    schedule: ModuleLrScheduler,
    monitor: Monitor,
    lr: Option<f64>,
    /// The learning rate that a skipped step left over in the loaded checkpoint.
    resumed: Option<f64>,
}

const SCHEDULE: &str = "schedule";
const HELD: &str = "held_lr";

impl AmpLrScheduler {
    /// Wraps a scheduler of your own, for the training that `monitor` looks at.
    pub fn new(schedule: impl LrScheduler + 'static, monitor: &Monitor) -> Self {
        Self::over(ModuleLrScheduler::new(schedule), monitor)
    }

    pub(crate) fn from_config(
        config: LrSchedulerConfig,
        monitor: &Monitor,
    ) -> Result<Self, AmpError> {
        match ModuleLrSchedulerConfig::new(config).init() {
            Ok(schedule) => Ok(Self::over(schedule, monitor)),
            Err(reason) => Err(AmpError::InvalidConfig {
                field: "learning-rate schedule",
                value: format!("refused ({reason})"),
                expected: "one that Burn accepts",
            }),
        }
    }

    fn over(schedule: ModuleLrScheduler, monitor: &Monitor) -> Self {
        Self {
            schedule,
            monitor: monitor.clone(),
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
            None => self.schedule.step().base(),
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
