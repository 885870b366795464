//! The loss scale: rules and state, pure arithmetic on F32.

use serde::{Deserialize, Serialize};

use crate::AmpError;

/// How the loss is scaled before the backward pass.
///
/// Half precision has few exponents: an F16 gradient below 2⁻²⁴ is zero. A factor on the loss
/// shifts all gradients up, the unscaling brings them back in F32
/// ([Mixed Precision Training, Micikevicius et al., 2018](https://arxiv.org/abs/1710.03740)).
/// BF16 has the exponents of F32 and needs none.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum LossScale {
    /// No scaling and no check; nothing is read from the device.
    None,
    /// A fixed scale; steps with non-finite gradients are skipped. A scale of 1 is that check
    /// alone, for F32 and BF16.
    Static(f32),
    /// A scale that backs off when gradients overflow and grows when they have not for a while.
    Dynamic(DynamicLossScale),
}

impl LossScale {
    /// The usual choice: [dynamic](DynamicLossScale) for F16; for BF16, which needs no scale, 1: steps whose
    /// gradients are not finite are skipped and reported; none for other dtypes.
    pub fn for_dtype(dtype: burn::tensor::FloatDType) -> Self {
        match dtype {
            burn::tensor::FloatDType::F16 => Self::Dynamic(DynamicLossScale::default()),
            burn::tensor::FloatDType::BF16 => Self::Static(1.0),
            _ => Self::None,
        }
    }
}

/// Parameters of dynamic loss scaling. The defaults are those of `torch.amp.GradScaler`.
///
/// ```text
/// found_inf:  hysteresis_left -= 1;  growth_tracker = 0
///             hysteresis_left <= 0:  scale = max(scale · backoff_factor, min_scale)
/// otherwise:  hysteresis_left = hysteresis;  growth_tracker += 1
///             growth_tracker == growth_interval:
///                 scale = scale · growth_factor unless that exceeds max_scale
///                 growth_tracker = 0
/// ```
///
/// With `hysteresis` 1 (the default) this is PyTorch's rule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicLossScale {
    /// First scale; finite and positive. Default 65536.
    pub init_scale: f32,
    /// Factor on growth, above 1. Default 2.
    pub growth_factor: f64,
    /// Factor on overflow, in (0, 1). Default 0.5.
    pub backoff_factor: f64,
    /// Steps without overflow before the scale grows, at least 1. Default 2000.
    pub growth_interval: u32,
    /// Steps with overflow in a row before the scale backs off, at least 1. Default 1.
    pub hysteresis: u32,
    /// The scale never falls below; a positive normal number. Default 2⁻¹²⁶, the smallest whose
    /// reciprocal is finite.
    pub min_scale: f32,
    /// The scale never grows above; finite. Default `f32::MAX`.
    pub max_scale: f32,
}

impl DynamicLossScale {
    /// As a state counts them: more than it can count are never used up.
    fn overflows_tolerated(&self) -> i32 {
        i32::try_from(self.hysteresis).unwrap_or(i32::MAX)
    }
}

impl Default for DynamicLossScale {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            hysteresis: 1,
            min_scale: f32::MIN_POSITIVE,
            max_scale: f32::MAX,
        }
    }
}

impl LossScale {
    /// Checks every number.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidConfig`] with the first field that is out of range.
    pub fn validate(&self) -> Result<(), AmpError> {
        let check = |ok: bool, field, value: f64, expected| match ok {
            true => Ok(()),
            false => Err(AmpError::InvalidConfig {
                field,
                value: value.to_string(),
                expected,
            }),
        };
        match *self {
            Self::None => Ok(()),
            Self::Static(scale) => check(
                scale.is_normal() && scale > 0.0,
                "static loss scale",
                scale.into(),
                "a positive, finite, normal number",
            ),
            Self::Dynamic(dynamic) => {
                let DynamicLossScale {
                    init_scale,
                    growth_factor,
                    backoff_factor,
                    growth_interval,
                    hysteresis,
                    min_scale,
                    max_scale,
                } = dynamic;
                check(
                    min_scale.is_normal() && min_scale > 0.0,
                    "min_scale",
                    min_scale.into(),
                    "a positive, finite, normal number",
                )?;
                check(
                    max_scale.is_finite() && max_scale >= min_scale,
                    "max_scale",
                    max_scale.into(),
                    "finite and not below min_scale",
                )?;
                check(
                    (min_scale..=max_scale).contains(&init_scale),
                    "init_scale",
                    init_scale.into(),
                    "between min_scale and max_scale",
                )?;
                check(
                    growth_factor.is_finite() && growth_factor > 1.0,
                    "growth_factor",
                    growth_factor,
                    "finite and above 1",
                )?;
                check(
                    backoff_factor > 0.0 && backoff_factor < 1.0,
                    "backoff_factor",
                    backoff_factor,
                    "between 0 and 1, both excluded",
                )?;
                check(
                    growth_interval >= 1,
                    "growth_interval",
                    growth_interval.into(),
                    "at least 1",
                )?;
                check(
                    hysteresis >= 1,
                    "hysteresis",
                    hysteresis.into(),
                    "at least 1",
                )
            }
        }
    }

    /// The state before the first step.
    pub fn init(&self) -> LossScaleState {
        let (scale, hysteresis_left) = match self {
            Self::None => (1.0, 0),
            Self::Static(scale) => (*scale, 0),
            Self::Dynamic(dynamic) => (dynamic.init_scale, dynamic.overflows_tolerated()),
        };
        LossScaleState {
            scale,
            growth_tracker: 0,
            hysteresis_left,
            consecutive_skips: 0,
            skipped_steps: 0,
            steps: 0,
        }
    }

    /// The state after a step.
    ///
    /// ```
    /// use burn_lean_amp::{DynamicLossScale, LossScale};
    ///
    /// let rule = LossScale::Dynamic(DynamicLossScale { growth_interval: 2, ..Default::default() });
    /// let state = rule.update(rule.init(), true);
    /// assert_eq!((state.scale, state.skipped_steps), (32768.0, 1));
    /// let state = rule.update(rule.update(state, false), false);
    /// assert_eq!((state.scale, state.growth_tracker), (65536.0, 0));
    /// ```
    pub fn update(&self, state: LossScaleState, found_inf: bool) -> LossScaleState {
        let mut next = LossScaleState {
            steps: state.steps.saturating_add(1),
            ..state
        };
        if found_inf {
            next.skipped_steps = state.skipped_steps.saturating_add(1);
            next.consecutive_skips = state.consecutive_skips.saturating_add(1);
        } else {
            next.consecutive_skips = 0;
        }
        let Self::Dynamic(rule) = self else {
            return next;
        };
        if found_inf {
            next.growth_tracker = 0;
            // Below zero only "exhausted" matters; saturate for a run of any length.
            next.hysteresis_left = state.hysteresis_left.saturating_sub(1).max(0);
            if next.hysteresis_left == 0 {
                next.scale = times(state.scale, rule.backoff_factor).max(rule.min_scale);
            }
        } else {
            next.hysteresis_left = rule.overflows_tolerated();
            next.growth_tracker = state.growth_tracker.saturating_add(1);
            if next.growth_tracker >= rule.growth_interval {
                let grown = times(state.scale, rule.growth_factor);
                if grown <= rule.max_scale {
                    next.scale = grown;
                }
                next.growth_tracker = 0;
            }
        }
        next
    }

    /// Whether the scale cannot be lowered from `scale`.
    pub(crate) fn at_floor(&self, scale: f32) -> bool {
        match self {
            Self::None | Self::Static(_) => true,
            Self::Dynamic(rule) => scale <= rule.min_scale,
        }
    }
}

/// Rounded once, as PyTorch does.
fn times(scale: f32, factor: f64) -> f32 {
    (f64::from(scale) * factor) as f32
}

/// What changes from step to step; a plain value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScaleState {
    /// The factor on the next loss.
    pub scale: f32,
    /// Steps without overflow since the scale last changed.
    pub growth_tracker: u32,
    /// Steps with overflow that are left before the scale backs off.
    pub hysteresis_left: i32,
    /// Skipped steps in a row, up to now.
    pub consecutive_skips: u32,
    /// Skipped steps since the start.
    pub skipped_steps: u64,
    /// Steps since the start, skipped ones included.
    pub steps: u64,
}

impl LossScaleState {
    /// What the gradients are multiplied by: `1 / scale`, computed in F64 and rounded once.
    pub fn inverse_scale(&self) -> f32 {
        (1.0 / f64::from(self.scale)) as f32
    }

    /// Checks a state that comes from outside.
    pub(crate) fn validate(&self) -> Result<(), AmpError> {
        let counts = self.skipped_steps <= self.steps
            && u64::from(self.consecutive_skips) <= self.skipped_steps;
        match self.scale.is_normal() && self.scale > 0.0 && counts {
            true => Ok(()),
            false => Err(self.refuse("no grad scaler")),
        }
    }

    /// Checks also that a scaler with this rule can be in the state.
    ///
    /// A state does not say which rule it followed. One that fits by chance is let through: that of
    /// a static scale after a skipped step looks as if a dynamic one had just backed off to it.
    /// [`continued`](Self::continued) says what a scale of 1 makes of one that does not fit.
    pub(crate) fn validate_for(&self, rule: &LossScale) -> Result<(), AmpError> {
        self.validate()?;
        match rule {
            LossScale::Static(scale) if self.scale != *scale => {
                Err(self.refuse("another scaler than one with this static scale"))
            }
            // After a step that was taken, a dynamic scale tolerates at least one overflow.
            LossScale::Dynamic(_) if self.hysteresis_left < 1 && self.consecutive_skips == 0 => {
                Err(self.refuse("a scaler without dynamic loss scale"))
            }
            LossScale::Dynamic(rule)
                if !(rule.min_scale..=rule.max_scale).contains(&self.scale) =>
            {
                Err(self.refuse("a scaler with another floor or ceiling"))
            }
            _ => Ok(()),
        }
    }

    /// Where a scaler with this rule goes on from the state: a static scale of 1 is a check alone, which
    /// has no scale to be wrong about, so it keeps of another run's state the steps counted so far.
    pub(crate) fn continued(self, rule: &LossScale) -> Result<Self, AmpError> {
        match rule {
            LossScale::Static(scale) if *scale == 1.0 && self.scale != 1.0 => {
                self.validate()?;
                Ok(self.restarted(rule))
            }
            _ => self.validate_for(rule).map(|()| self),
        }
    }

    /// The first state of `rule`, with the steps counted so far.
    pub(crate) fn restarted(&self, rule: &LossScale) -> Self {
        Self {
            skipped_steps: self.skipped_steps,
            steps: self.steps,
            ..rule.init()
        }
    }

    fn refuse(&self, whose: &str) -> AmpError {
        AmpError::Record {
            what: "loss scale state".into(),
            reason: format!(
                "scale {} with {} of {} steps skipped, {} of them in a row, is the state of {whose}",
                self.scale, self.skipped_steps, self.steps, self.consecutive_skips
            ),
        }
    }
}
