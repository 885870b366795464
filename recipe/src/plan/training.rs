//! A stage of training, or what is trained inside of another stage.

use serde::{Deserialize, Serialize};

use super::numbers::ComputeDtype;
use crate::check::Check;
use crate::{Distillation, RecipeError};

/// How the learning rate moves over the steps of a training, after its warmup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RateSchedule {
    /// It stays.
    #[default]
    Constant,
    /// Along half a cosine to 0.
    Cosine,
    /// Along a line to 0.
    Linear,
}

/// A training: from the start, or fine-tuning after pruning, with fake quantization, or both.
///
/// ```
/// use burn_lean_recipe::{RateSchedule, TrainStage};
///
/// let training = TrainStage::new(10, 1e-3).with_schedule(RateSchedule::Cosine);
/// assert_eq!(training.rate(0.0), 1e-3);
/// assert!((training.rate(0.5) - 5e-4).abs() < 1e-9);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainStage {
    /// Passes over what the loader gives; at least 1.
    pub epochs: usize,
    /// The learning rate, positive: where it starts, or what warmup leads to.
    pub learning_rate: f64,
    /// How it moves. Default: it stays.
    #[serde(default)]
    pub schedule: RateSchedule,
    /// Share of the steps, 0 to 1, in which it rises from 0. Default: 0.
    #[serde(default)]
    pub warmup: f64,
    /// The global L2 norm that gradients are clipped to, positive. Default: no clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_norm: Option<f32>,
    /// Instead of the [`dtype`](crate::Recipe::dtype) of the recipe. Default: that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<ComputeDtype>,
    /// Learning from the dense model, too: in fine-tuning only. Default: no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distillation: Option<Distillation>,
}

impl TrainStage {
    /// With the defaults.
    pub fn new(epochs: usize, learning_rate: f64) -> Self {
        Self {
            epochs,
            learning_rate,
            schedule: RateSchedule::Constant,
            warmup: 0.0,
            max_norm: None,
            dtype: None,
            distillation: None,
        }
    }

    /// With another schedule of the learning rate.
    pub fn with_schedule(mut self, schedule: RateSchedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// With a share of the steps, 0 to 1, in which the learning rate rises.
    pub fn with_warmup(mut self, warmup: f64) -> Self {
        self.warmup = warmup;
        self
    }

    /// With gradients clipped to this global L2 norm.
    pub fn with_max_norm(mut self, max_norm: f32) -> Self {
        self.max_norm = Some(max_norm);
        self
    }

    /// In another dtype than the rest of the recipe.
    pub fn with_dtype(mut self, dtype: ComputeDtype) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Learning from the dense model, too.
    pub fn with_distillation(mut self, distillation: Distillation) -> Self {
        self.distillation = Some(distillation);
        self
    }

    /// The learning rate at `progress`, the share of the steps that are done, 0 to 1.
    pub fn rate(&self, progress: f64) -> f64 {
        if progress < self.warmup {
            return self.learning_rate * progress / self.warmup;
        }
        let rest = (1.0 - self.warmup).max(f64::MIN_POSITIVE);
        let t = ((progress - self.warmup) / rest).clamp(0.0, 1.0);
        match self.schedule {
            RateSchedule::Constant => self.learning_rate,
            RateSchedule::Cosine => {
                0.5 * self.learning_rate * (1.0 + (std::f64::consts::PI * t).cos())
            }
            RateSchedule::Linear => self.learning_rate * (1.0 - t),
        }
    }

    pub(crate) fn validate(&self, stage: &str, has_teacher: bool) -> Result<(), RecipeError> {
        let check = Check(stage);
        check.accept(self.epochs >= 1, "epochs", self.epochs, "at least 1")?;
        let rate = self.learning_rate;
        check.accept(
            rate.is_finite() && rate > 0.0,
            "learning_rate",
            rate,
            "positive and finite",
        )?;
        check.accept(
            (0.0..=1.0).contains(&self.warmup),
            "warmup",
            self.warmup,
            "a share of the steps, 0 to 1",
        )?;
        if let Some(norm) = self.max_norm {
            check.accept(
                norm.is_finite() && norm > 0.0,
                "max_norm",
                norm,
                "positive and finite",
            )?;
        }
        match &self.distillation {
            None => Ok(()),
            Some(_) if !has_teacher => check.refuse(
                "distillation",
                "given",
                "left out: the teacher is the dense model, which this stage makes; it belongs into \
                 `shrink.tune`, `prune.tune` and `quantize.train`",
            ),
            Some(distillation) => distillation.validate(stage),
        }
    }
}
