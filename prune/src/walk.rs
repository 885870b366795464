//! A visit of every float parameter with its path.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// What a walk does with each parameter.
pub(crate) trait FloatVisitor {
    /// Called for each float parameter, in module order, with a path like `encoder.0.weight`.
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>);
}

/// Shows every float parameter of `model` to `visitor`, but none that belongs to a
/// reparameterization.
pub(crate) fn walk<M: Module, V: FloatVisitor>(model: &M, visitor: &mut V) {
    model.visit(&mut WithPath {
        path: Vec::new(),
        depth: 0,
        visitor,
    });
}

struct WithPath<'a, V> {
    path: Vec<String>,
    /// Reparameterizations around.
    depth: usize,
    visitor: &'a mut V,
}

impl<V: FloatVisitor> ModuleVisitor for WithPath<'_, V> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.depth += usize::from(container_type == "Reparameterization");
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.depth -= usize::from(container_type == "Reparameterization");
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.depth == 0 {
            self.visitor.visit(&self.path.join("."), param);
        }
    }
}
