//! Values of parameters that several modules hold.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_lean_reparam::{FloatVisitor, visit_plain_floats};

use crate::layerwise::tuning::Values;

/// `model` with the values at `paths` wherever else the same parameters are: a walk writes them where
/// the forward pass reads them alone.
pub(crate) fn spread<M: Module>(model: M, paths: &HashSet<String>) -> M {
    let mut read = Read {
        paths,
        values: Values::default(),
    };
    visit_plain_floats(&model, &mut read);
    model.map(&mut read.values)
}

struct Read<'a> {
    paths: &'a HashSet<String>,
    values: Values,
}

impl FloatVisitor for Read<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.paths.contains(path) {
            self.values.visit_float(param);
        }
    }
}
