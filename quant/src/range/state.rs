//! What a quantizer remembers: numbers on the device, and numbers on the host, both recorded.
//!
//! Burn's own `RunningState` is shared by the clones of a module and changed in place by
//! `to_device` and `map`, so that two copies of a model would change each other's ranges. The types
//! here are values: a clone is a copy.

use burn::module::{Content, ModuleDisplay, ModuleDisplayDefault};
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{
    DType, Device, FloatDType, GradientCheckpointingStrategy, Int, Tensor, TensorData,
};

/// What is left of a `Module` that goes with a model and does not train.
macro_rules! plain_state {
    () => {
        fn fork(self, device: &::burn::tensor::Device) -> Self {
            self.to_device(device)
        }

        fn valid(&self) -> Self {
            self.clone()
        }

        fn train(self) -> Self {
            self
        }

        fn materialize(self) -> Self {
            self
        }
    };
}
pub(crate) use plain_state;

/// An F32 vector that is recorded and moved with the model, but not trained.
///
/// It never has an autodiff association: combined with a tensor that has one, it is a constant. A mapper
/// alone is given it on the autodiff device of a model that trains, since Burn's distributed training asks
/// that of every float parameter.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    id: ParamId,
    value: Tensor<1>,
    /// That of the model's device, where it has autodiff.
    strategy: Option<GradientCheckpointingStrategy>,
}

impl Buffer {
    pub(crate) fn zeros(len: usize, device: &Device) -> Self {
        Self {
            id: ParamId::new(),
            value: Tensor::zeros([len], (&device.clone().inner(), DType::F32)),
            strategy: device.gradient_checkpointing_strategy(),
        }
    }

    pub(crate) fn value(&self) -> Tensor<1> {
        self.value.clone()
    }

    pub(crate) fn set(&mut self, value: Tensor<1>) {
        self.value = value.without_autodiff().cast(FloatDType::F32);
    }
}

impl Module for Buffer {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.visit_float(&Param::initialized(self.id, self.value.clone()));
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let value = self.value.clone();
        let given = match self.strategy {
            Some(strategy) => value
                .autodiff()
                .with_gradient_checkpointing_strategy(strategy),
            None => value,
        };
        let mapped = mapper.map_float(Param::initialized(self.id, given));
        let (id, value, _) = mapped.consume();
        // Ranges stay in F32 in a model that is cast or quantized as a whole.
        let value = match value.dtype() {
            DType::F32 => value,
            DType::QFloat(_) => self.value,
            _ => value.cast(FloatDType::F32),
        };
        Self {
            id,
            value: value.without_autodiff(),
            strategy: self.strategy,
        }
    }

    fn to_device(self, device: &Device) -> Self {
        // Burn's tensors keep the autodiff that they have, too.
        Self {
            value: self.value.to_device(&device.clone().inner()),
            ..self
        }
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn valid(&self) -> Self {
        Self {
            strategy: None,
            ..self.clone()
        }
    }

    fn train(self) -> Self {
        Self {
            strategy: Some(GradientCheckpointingStrategy::Disabled),
            ..self
        }
    }

    fn materialize(self) -> Self {
        self
    }

    fn collect_devices(&self, mut devices: Devices) -> Devices {
        let device = self.value.device();
        if !devices.contains(&device) {
            devices.push(device);
        }
        devices
    }
}

/// Integers on the host that are recorded with the model.
///
/// Visitors see a parameter that is not yet initialized, so that only what looks at its value (a
/// record) makes a tensor of it; a mapper that returns it so has not changed it, and nothing is
/// read back from the device.
#[derive(Debug, Clone)]
pub(crate) struct HostIntegers {
    id: ParamId,
    pub(crate) values: Vec<i32>,
    device: Device,
}

impl HostIntegers {
    pub(crate) fn new(values: Vec<i32>, device: &Device) -> Self {
        Self {
            id: ParamId::new(),
            values,
            device: device.clone().inner(),
        }
    }

    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.device == device.clone().inner()
    }

    /// Mapped, and whether the mapper looked at the values or replaced them.
    pub(crate) fn mapped<M: ModuleMapper>(mut self, mapper: &mut M) -> (Self, bool) {
        let mapped = mapper.map_int(self.parameter());
        self.id = mapped.id;
        let touched = mapped.is_initialized();
        if touched {
            self.values = mapped.val().into_data().iter::<i32>().collect();
        }
        (self, touched)
    }

    fn parameter(&self) -> Param<Tensor<1, Int>> {
        let values = self.values.clone();
        let shape = [values.len()];
        Param::uninitialized(
            self.id,
            move |device, _| {
                let data = TensorData::new(values, shape);
                Tensor::from_data(data, (device, DType::I32))
            },
            self.device.clone(),
            false,
            shape.into(),
        )
    }
}

impl Module for HostIntegers {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.visit_int(&self.parameter());
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.mapped(mapper).0
    }

    fn to_device(mut self, device: &Device) -> Self {
        self.device = device.clone().inner();
        self
    }

    fn collect_devices(&self, mut devices: Devices) -> Devices {
        if !devices.contains(&self.device) {
            devices.push(self.device.clone());
        }
        devices
    }

    plain_state!();
}

impl ModuleDisplayDefault for Buffer {
    fn content(&self, content: Content) -> Option<Content> {
        let string = format!("{:?}", self.value.shape().as_slice());
        content.add_formatted(&string).optional()
    }
}

impl ModuleDisplay for Buffer {}
