//! The bytes of everything that is no quantized weight.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::quantization::quantized_data_len;
use burn::tensor::{DType, Int, Tensor};

use crate::deploy::conversion_report::ConvertedWeight;
use crate::module::effective::FileNames;

/// Bytes of the tensors of a model other than its quantized weights.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OtherBytes {
    /// On the device.
    pub(crate) held: usize,
    /// In a file, which has no need of the ranges of weights.
    pub(crate) in_file: usize,
}

impl OtherBytes {
    pub(crate) fn of<M: Module>(model: &M, weights: &[ConvertedWeight]) -> Self {
        let is_quantized = |path: &str| weights.iter().any(|weight| weight.path == path);
        let mut counter = Counter {
            path: Vec::new(),
            names: FileNames::of(model, is_quantized),
            weights,
            bytes: Self::default(),
        };
        model.visit(&mut counter);
        counter.bytes
    }
}

struct Counter<'a> {
    path: Vec<String>,
    names: FileNames,
    weights: &'a [ConvertedWeight],
    bytes: OtherBytes,
}

impl Counter<'_> {
    fn add(&mut self, path: &str, bytes: usize) {
        self.bytes.held += bytes;
        if self.names.of_tensor(path).is_some() {
            self.bytes.in_file += bytes;
        }
    }
}

impl ModuleVisitor for Counter<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        if self.weights.iter().any(|weight| weight.path == path) {
            return;
        }
        let dtype = param.base().dtype();
        let bytes = match dtype {
            DType::QFloat(scheme) => quantized_data_len(&scheme, &param.shape()),
            _ => param.shape().num_elements() * dtype.size(),
        };
        self.add(&path, bytes);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let bytes = param.lazy_shape().num_elements() * 4;
        self.add(&self.path.join("."), bytes);
    }
}
