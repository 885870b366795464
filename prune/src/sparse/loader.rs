//! Tensors into the parameters of a model.

use std::collections::HashMap;

use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

/// What each parameter of a model must look like in a record, and where it goes.
#[derive(Default)]
pub(super) struct Places {
    path: Vec<String>,
    pub(super) shapes: HashMap<String, Vec<usize>>,
    pub(super) remaining: HashMap<String, (Vec<usize>, Device)>,
}

impl Places {
    fn insert(&mut self, shape: Vec<usize>, device: Device) {
        let path = self.path.join(".");
        self.shapes.insert(path.clone(), shape.clone());
        self.remaining.insert(path, (shape, device));
    }
}

impl ModuleVisitor for Places {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let saved = param.transform_for_save().val();
        self.insert(saved.shape().to_vec(), saved.device());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let saved = param.transform_for_save().val();
        self.insert(saved.shape().to_vec(), saved.device());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let saved = param.transform_for_save().val();
        self.insert(saved.shape().to_vec(), saved.device());
    }
}

pub(super) struct Loader {
    path: Vec<String>,
    tensors: HashMap<String, (ParamId, TensorData)>,
}

impl Loader {
    pub(super) fn new(tensors: HashMap<String, (ParamId, TensorData)>) -> Self {
        Self {
            path: Vec::new(),
            tensors,
        }
    }
}

impl ModuleMapper for Loader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.tensors.remove(&self.path.join(".")) {
            Some((id, data)) => {
                let dtype = data.dtype();
                let tensor = Tensor::from_data(data, (&param.lazy_device(), dtype));
                param.transform_for_load(tensor, id)
            }
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.tensors.remove(&self.path.join(".")) {
            Some((id, data)) => {
                let dtype = data.dtype();
                let tensor = Tensor::from_data(data, (&param.lazy_device(), dtype));
                param.transform_for_load(tensor, id)
            }
            None => param,
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.tensors.remove(&self.path.join(".")) {
            Some((id, data)) => {
                let tensor = Tensor::from_data(data, &param.lazy_device());
                param.transform_for_load(tensor, id)
            }
            None => param,
        }
    }
}
