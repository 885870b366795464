//! A model whose parameters are placeholders, and the values they stand for.

use std::collections::HashMap;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor};

use crate::Parameter;
use crate::capture::{as_autodiff, as_leaf, id, placeholder};
use crate::hooks::{self, Carried};

/// How parameters take part in the recording.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Evaluation: plain tensors.
    Evaluate,
    /// Training: autodiff tensors without gradients.
    Train,
    /// Training, with a recorded backward pass: leaves.
    TrainWithBackward,
}

/// Replaces the values of all parameters by placeholders.
pub(crate) struct Placeholders<'a> {
    capture: &'a Device,
    mode: Mode,
    path: Vec<String>,
    occurrences: HashMap<String, usize>,
    pub(crate) found: Vec<Parameter>,
}

impl<'a> Placeholders<'a> {
    pub(crate) fn new(capture: &'a Device, mode: Mode) -> Self {
        Self {
            capture,
            mode,
            path: Vec::new(),
            occurrences: HashMap::new(),
            found: Vec::new(),
        }
    }

    /// The placeholder, and whether it stands for a running statistic.
    fn stand_in(&mut self, shape: Shape, dtype: DType, param: ParamId) -> (DispatchTensor, bool) {
        let tensor = placeholder(shape.clone(), dtype, self.capture);
        let running = matches!(
            self.path.last().map(String::as_str),
            Some("running_mean" | "running_var")
        );
        let path = self.path.join(".");
        let count = self.occurrences.entry(path.clone()).or_default();
        self.found.push(Parameter {
            path,
            id: param,
            shape: shape.to_vec(),
            tensor: id(&tensor).expect("the placeholder is on the capture device"),
            update: None,
            occurrence: *count,
            running,
        });
        *count += 1;
        (tensor, running)
    }
}

impl ModuleMapper for Placeholders<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let dtype = match value.dtype() {
            // The capture device holds no quantized tensors: an execution dequantizes them.
            DType::QFloat(_) => DType::F32,
            dtype => dtype,
        };
        let (tensor, running) = self.stand_in(value.shape(), dtype, id);
        let tensor = match self.mode {
            // Buffers take part without gradients.
            Mode::Train | Mode::TrainWithBackward if running => tensor,
            Mode::Evaluate => tensor,
            Mode::Train => as_autodiff(tensor),
            Mode::TrainWithBackward => as_leaf(tensor),
        };
        Param::from_mapped_value(id, Tensor::from_dispatch(tensor), mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (id, value, mapper) = param.consume();
        let (tensor, _) = self.stand_in(value.shape(), value.dtype(), id);
        Param::from_mapped_value(id, Tensor::from_dispatch(tensor), mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let (id, value, mapper) = param.consume();
        let (tensor, _) = self.stand_in(value.shape(), value.dtype(), id);
        Param::from_mapped_value(id, Tensor::from_dispatch(tensor), mapper)
    }

    /// `valid` has switched modules out of training mode.
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        match self.mode {
            Mode::Evaluate => flag,
            Mode::Train | Mode::TrainWithBackward => flag.train(),
        }
    }
}

/// The tensors of a model by path and occurrence, as its placeholders are.
#[derive(Default)]
pub(crate) struct Values {
    path: Vec<String>,
    occurrences: HashMap<String, usize>,
    pub(crate) found: HashMap<(String, usize), DispatchTensor>,
}

impl Values {
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        Self::with_hooks(model).0
    }

    /// And the hooks that the model offers.
    pub(crate) fn with_hooks<M: Module>(model: &M) -> (Self, Vec<Carried>) {
        let mut values = Self::default();
        let ((), hooks) = hooks::collecting(|| model.visit(&mut values));
        (values, hooks)
    }

    fn insert(&mut self, value: DispatchTensor) {
        let path = self.path.join(".");
        let count = self.occurrences.entry(path.clone()).or_default();
        self.found.insert((path, *count), value);
        *count += 1;
    }

    pub(crate) fn get(&self, parameter: &Parameter) -> Option<&DispatchTensor> {
        let key = (parameter.path.clone(), parameter.occurrence);
        let value = self.found.get(&key)?;
        (value.shape().to_vec() == parameter.shape).then_some(value)
    }
}

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, container: &str) {
        hooks::entered(name, container);
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        hooks::exited();
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.insert(param.base().into_dispatch());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.insert(param.val().into_dispatch());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.insert(param.val().into_dispatch());
    }
}
