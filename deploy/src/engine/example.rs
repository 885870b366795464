//! Inputs to measure with.

use burn::backend::{DispatchDevice, DispatchTensor};
use rten::Value;

use super::values::{read, results};
use crate::{DeployError, ElementType, Export, ValueInfo};

/// Inputs of the recorded shapes.
pub(super) struct Example {
    pub(super) values: Vec<Value>,
    /// The same on the device of the model.
    pub(super) tensors: Vec<DispatchTensor>,
    pub(super) device: Option<DispatchDevice>,
    pub(super) has_integers: bool,
}

impl Example {
    /// With this number where they are integers.
    pub(super) fn of<O>(
        export: &Export<O>,
        infos: &[ValueInfo],
        integer: i32,
    ) -> Result<Self, DeployError> {
        let shapes = export.inputs.iter().map(|(shape, _)| shape);
        let values = infos.iter().zip(shapes);
        let values = values.map(|(info, shape)| numbers(info, shape, integer));
        let values: Vec<Value> = values.collect();
        let device = export.device.clone();
        let tensors = match &device {
            Some(device) => results(values.clone(), infos, device)?,
            None => Vec::new(),
        };
        let has_integers = infos.iter().any(|info| info.element != ElementType::F32);
        Ok(Self {
            has_integers,
            values,
            tensors,
            device,
        })
    }

    /// The inputs on the host, read from the device if there is one.
    pub(super) fn read(&self) -> Result<Vec<Value>, DeployError> {
        match self.device {
            Some(_) => self.tensors.iter().cloned().map(read).collect(),
            None => Ok(self.values.clone()),
        }
    }
}

/// Numbers for an input: between -1 and 1, or one where they are integers.
fn numbers(info: &ValueInfo, shape: &[usize], integer: i32) -> Value {
    let count = shape.iter().product();
    match info.element {
        ElementType::F32 => {
            let numbers = (0..count).map(|i: usize| (i * 7919 % 2003) as f32 / 1001.5 - 1.0);
            rten_tensor::Tensor::from_data(shape, numbers.collect::<Vec<_>>()).into()
        }
        _ => rten_tensor::Tensor::from_data(shape, vec![integer; count]).into(),
    }
}
