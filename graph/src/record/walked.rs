//! A model, and what walks of it have found.

use burn::module::Module;
use burn::tensor::Device;

use super::model_device;
use crate::hooks::{self, Carried};

/// A model that is walked once for all who ask about it in one step.
pub(crate) struct Walked<'a, M> {
    pub(crate) model: &'a M,
    /// Where it is, by [`model_device`].
    pub(crate) device: Option<Device>,
    /// The hooks that it offers.
    pub(crate) hooks: Vec<Carried>,
}

impl<'a, M: Module> Walked<'a, M> {
    pub(crate) fn of(model: &'a M) -> Self {
        Self {
            model,
            device: model_device(model),
            hooks: hooks::offered(model),
        }
    }
}
