//! What a step did, and what went wrong in it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::AmpError;
use crate::gradients::{Described, ParameterGradient};

/// Outcome of one optimizer step under a [`GradScaler`](crate::GradScaler).
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Whether the update was left out because a gradient, or the loss, was not finite.
    pub skipped: bool,
    /// The loss scale that this step's gradients carried.
    pub loss_scale: f32,
    /// Mean over the losses that were given to `scale` for this step; `None` where the scaler reads
    /// nothing ([`LossScale::None`](crate::LossScale::None)).
    pub loss: Option<f32>,
    /// Global L2 norm of the unscaled gradients before clipping; `None` without clipping, and where
    /// the scaler reads nothing.
    pub grad_norm: Option<f32>,
    /// Which gradients were not finite, on a skipped step.
    pub overflow: Option<Overflow>,
}

/// Why a step was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SkipCause {
    /// The loss is finite, gradients are not: the loss scale is too high, and is lowered.
    ScaleTooHigh,
    /// The loss itself is not finite: the forward pass is broken, whatever the scale.
    LossNotFinite,
    /// The loss is finite, and the scale is a static one above 1, which may be too high: nothing lowers it.
    ScaleIsStatic,
    /// The loss is finite and the scale is at its floor, or static and at most 1. A smaller one helps where the
    /// gradients are finite in F32: [`calibrate_scale`](crate::calibrate_scale) finds out.
    ScaleAtFloor,
    /// All gradients are finite, but the sum of their squares is not: the clipping has no factor.
    NormNotFinite,
    /// Another replica found one that is not finite
    /// ([`Unscaled::with_found_inf`](crate::Unscaled::with_found_inf)); here all are.
    OtherReplica,
}

impl fmt::Display for SkipCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ScaleTooHigh => "gradients overflow although the loss is finite",
            Self::LossNotFinite => "the loss is not finite, so the forward pass is broken",
            Self::ScaleIsStatic => {
                "gradients overflow although the loss is finite, and the loss scale is static"
            }
            Self::ScaleAtFloor => {
                "gradients overflow although the loss is finite and the loss scale is at its floor"
            }
            Self::NormNotFinite => {
                "the sum of the squared gradients, whose root is their norm, overflows F32"
            }
            Self::OtherReplica => "gradients of another replica overflow",
        })
    }
}

/// The non-finite gradients of a skipped step.
///
/// Which parameters is known at once; [`inspect`](Self::inspect) reads the rest from the device.
#[derive(Debug, Clone)]
pub struct Overflow {
    /// Why the step was skipped.
    pub cause: SkipCause,
    pub(crate) paths: Vec<String>,
    /// Described on the device while the gradients were at hand.
    pub(crate) details: Described,
}

impl Overflow {
    /// Path of the first parameter, in module order, whose gradient is not finite.
    pub fn first(&self) -> Option<&str> {
        self.paths.first().map(String::as_str)
    }

    /// Paths of all parameters whose gradient is not finite, in module order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.paths.iter().map(String::as_str)
    }

    /// How many elements of each gradient, unscaled, are not finite, and the largest that is.
    ///
    /// This reads from the device (once); nothing is read for it unless you call it. Empty under
    /// [`Speculative`](crate::Speculative), which has let go of the gradients by then.
    ///
    /// # Errors
    ///
    /// [`AmpError::Device`] when the read fails.
    pub fn inspect(&self) -> Result<Vec<ParameterGradient>, AmpError> {
        self.details.read()
    }
}
