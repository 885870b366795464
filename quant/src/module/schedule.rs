//! When quantizers observe and quantize, and when BatchNorm statistics stop, by training step.

use std::fmt;

use burn::config::Config;

use crate::QuantError;

/// The phases of quantization-aware training, as numbers of training steps.
///
/// ```text
/// step    0 ………… quantize_from ………… freeze_observers_at …………
///         observe      observe + quantize          quantize
/// ```
///
/// Step 0 is the first; what moves on by one, [`advance`](crate::advance) says. Each forward pass that a step of
/// an optimizer follows is one: two of them for one batch, each with its step, count as two. The schedule and the
/// step are part of the model's record. Up to 2³¹ − 2 steps.
///
/// ```
/// use burn_lean_quant::{Schedule, module::Phase};
///
/// let schedule = Schedule::new()
///     .with_quantize_from(100)
///     .with_freeze_observers_at(Some(1000));
/// assert_eq!(schedule.phase(99), Phase::Observe);
/// assert_eq!(schedule.phase(100), Phase::ObserveAndQuantize);
/// assert_eq!(schedule.phase(1000), Phase::Quantize);
/// ```
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// First step that computes with quantized values. Default 0.
    #[config(default = 0)]
    pub quantize_from: u64,
    /// First step at which ranges no longer change; not before `quantize_from`. Default: never.
    #[config(default = "None")]
    pub freeze_observers_at: Option<u64>,
    /// First step at which BatchNorm layers use their running statistics instead of those of the
    /// batch, as they will after training. Default: never.
    #[config(default = "None")]
    pub freeze_batch_norm_at: Option<u64>,
}

/// What a quantizer does in a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum Phase {
    /// Nothing: values pass through.
    Off,
    /// Collects ranges; values pass through.
    Observe,
    /// Collects ranges and quantizes.
    ObserveAndQuantize,
    /// Quantizes.
    Quantize,
}

impl Phase {
    /// Whether ranges are collected.
    pub fn observes(self) -> bool {
        matches!(self, Self::Observe | Self::ObserveAndQuantize)
    }

    /// Whether values are quantized.
    pub fn quantizes(self) -> bool {
        matches!(self, Self::ObserveAndQuantize | Self::Quantize)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Observe => "observe",
            Self::ObserveAndQuantize => "observe and quantize",
            Self::Quantize => "quantize",
        })
    }
}

impl Schedule {
    /// The phase of a step.
    pub fn phase(&self, step: u64) -> Phase {
        if step < self.quantize_from {
            Phase::Observe
        } else if self.freeze_observers_at.is_none_or(|at| step < at) {
            Phase::ObserveAndQuantize
        } else {
            Phase::Quantize
        }
    }

    /// Whether BatchNorm statistics are frozen at a step.
    pub fn freezes_batch_norm(&self, step: u64) -> bool {
        self.freeze_batch_norm_at.is_some_and(|at| step >= at)
    }

    /// # Errors
    ///
    /// [`QuantError::InvalidConfig`] if it does not quantize from the start, for what needs a model
    /// that quantizes without any training.
    pub(crate) fn refuse_delay(&self) -> Result<(), QuantError> {
        match self.quantize_from {
            0 => Ok(()),
            step => Err(QuantError::InvalidConfig {
                field: "quantize_from",
                value: step.to_string(),
                expected: "0 where nothing is trained; to train the result on, give it another \
                           schedule with `set_schedule`",
            }),
        }
    }

    /// # Errors
    ///
    /// [`QuantError::InvalidConfig`] if observers are frozen before quantization starts, or a
    /// number of steps is too large.
    pub fn validate(&self) -> Result<(), QuantError> {
        if let Some(at) = self.freeze_observers_at
            && at < self.quantize_from
        {
            return Err(QuantError::InvalidConfig {
                field: "freeze_observers_at",
                value: at.to_string(),
                expected: "at or after quantize_from: what quantizes next must have been observed",
            });
        }
        let steps = [
            ("quantize_from", Some(self.quantize_from)),
            ("freeze_observers_at", self.freeze_observers_at),
            ("freeze_batch_norm_at", self.freeze_batch_norm_at),
        ];
        for (field, step) in steps {
            if let Some(step) = step
                && step >= i32::MAX as u64
            {
                return Err(QuantError::InvalidConfig {
                    field,
                    value: step.to_string(),
                    expected: "below 2147483647",
                });
            }
        }
        Ok(())
    }
}
