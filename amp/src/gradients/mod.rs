//! Walks over gradients: unscale them, find what is not finite, measure and clip their norm.

pub(crate) mod forensics;
mod norm;
mod one_pass;
mod overflow;
mod reads;
mod seen;
mod unscale;
mod unscaled;
mod walk;

pub(crate) use forensics::Described;
pub use forensics::{ParameterGradient, ScaleCalibration, calibrate_scale, inspect_gradients};
pub(crate) use norm::check_max_norm;
pub(crate) use one_pass::{Look, finite};
pub(crate) use overflow::overflowing;
pub(crate) use reads::{Reads, read};
pub(crate) use seen::Place;
pub(crate) use unscale::{InverseScale, unscale};
pub use unscaled::Unscaled;
pub(crate) use unscaled::{check_loss, reported};
pub(crate) use walk::{same_device, visit_once};
