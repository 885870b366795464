//! Where a model is, and whether it trains.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

use crate::{BackendKind, Tensors, hooks, input_device};

/// The device of a model: one with autodiff if any of its float parameters is on one.
///
/// A model with parts for evaluation trains, too. [`Module::devices`] does not say so: it compares
/// devices without autodiff and names the first.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_graph::model_device;
///
/// let device = Device::flex().autodiff();
/// let student = LinearConfig::new(2, 2).init(&device);
/// let teacher = student.clone().valid();
/// let pair = (teacher, student);
/// assert!(model_device(&pair).unwrap().is_autodiff());
/// assert!(!pair.devices()[0].is_autodiff());
/// assert!(!model_device(&pair.0).unwrap().is_autodiff());
/// ```
pub fn model_device<M: Module>(model: &M) -> Option<Device> {
    let mut found = Found(None);
    hooks::sharing(|| model.visit(&mut found));
    found.0.or_else(|| model.devices().into_iter().next())
}

/// Whether a forward pass of a model with these inputs is part of one that is recorded on this thread: by which rules
/// and with which hooks it runs is the business of whoever records.
pub fn is_recorded<M: Module, I: Tensors>(model: &M, inputs: &I) -> bool {
    let device = || model_device(model).or_else(|| input_device(inputs));
    let captures = |device: Device| BackendKind::of(&device) == BackendKind::Capture;
    hooks::is_recording() && device().is_some_and(captures)
}

/// Whether any float parameter of a model is on a device with autodiff.
pub(crate) fn trains<M: Module>(model: &M) -> bool {
    model_device(model).is_some_and(|device| device.is_autodiff())
}

struct Found(Option<Device>);

impl ModuleVisitor for Found {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.0.as_ref().is_some_and(Device::is_autodiff) {
            return;
        }
        let device = param.lazy_device();
        if self.0.is_none() || device.is_autodiff() {
            self.0 = Some(device);
        }
    }
}
