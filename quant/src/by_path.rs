//! A visit of every float tensor of a model with its path.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// What a visit does with each tensor.
pub(crate) trait FloatVisitor {
    /// Called in module order, with a path like `encoder.0.weight`; also for running statistics and
    /// the state of reparameterizations.
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>);
}

/// Shows every float tensor of `model` to `visitor`.
pub(crate) fn visit_floats<M: Module, V: FloatVisitor>(model: &M, visitor: &mut V) {
    model.visit(&mut WithPath {
        path: Vec::new(),
        visitor,
    });
}

struct WithPath<'a, V> {
    path: Vec<String>,
    visitor: &'a mut V,
}

impl<V: FloatVisitor> ModuleVisitor for WithPath<'_, V> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visitor.visit(&self.path.join("."), param);
    }
}
