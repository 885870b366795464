//! The bytes of everything that is no quantized weight.

use burn::module::{Module, Param};
use burn::tensor::quantization::quantized_data_len;
use burn::tensor::{Bool, DType, Int, Tensor};
use burn_lean_reparam::{PathVisitor, Trail, visit_with_path};

use crate::deploy::conversion_report::ConvertedWeight;
use crate::deploy::safetensors_file::activations::activations;
use crate::module::effective::FileNames;

/// Bytes of the tensors of a model other than its quantized weights.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OtherBytes {
    /// On the device.
    pub(crate) held: usize,
    /// In a file, which says ranges in its metadata or beside the codes.
    pub(crate) in_file: usize,
}

impl OtherBytes {
    pub(crate) fn of<M: Module>(model: &M, weights: &[ConvertedWeight]) -> Self {
        let is_quantized = |path: &str| weights.iter().any(|weight| weight.path == path);
        let names = FileNames::of(model, is_quantized);
        let mut counter = Counter {
            names: names.without_ranges(activations(model).into_keys()),
            weights,
            bytes: Self::default(),
        };
        visit_with_path(model, &mut counter);
        counter.bytes
    }
}

struct Counter<'a> {
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

impl PathVisitor for Counter<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let path = at.path();
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

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        let base = param.base();
        self.add(
            &at.path(),
            base.shape().num_elements() * base.dtype().size(),
        );
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        let base = param.base();
        let (path, elements) = (at.path(), base.shape().num_elements());
        self.bytes.held += elements * base.dtype().size();
        // A file has integers.
        if self.names.of_tensor(&path).is_some() {
            self.bytes.in_file += elements * base.int().dtype().size();
        }
    }
}
