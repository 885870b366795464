//! Values of parameters that several modules hold.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_lean_reparam::{FloatVisitor, PathMapper, Trail, map_with_path, visit_plain_floats};

use crate::layerwise::tuning::Values;

/// `model` with the values at `paths`, running statistics among them, wherever else the same parameters are:
/// a walk writes them where the forward pass reads them alone.
pub(crate) fn spread<M: Module>(model: M, paths: &HashSet<String>) -> M {
    let mut spread = Spread {
        paths,
        values: Values::default(),
    };
    visit_plain_floats(&model, &mut spread);
    map_with_path(model, &mut spread)
}

struct Spread<'a> {
    paths: &'a HashSet<String>,
    values: Values,
}

impl FloatVisitor for Spread<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.paths.contains(path) {
            self.values.visit_float(param);
        }
    }
}

impl PathMapper for Spread<'_> {
    fn float<const D: usize>(&mut self, _at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.values.map_float(param)
    }
}
