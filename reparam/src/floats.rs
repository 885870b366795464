//! A visit of every float tensor of a model with its path.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// What a visit does with each float tensor.
///
/// Burn's [`ModuleVisitor`] leaves it to the visitor to keep track of the path.
pub trait FloatVisitor {
    /// Called in module order, with a path like `encoder.0.weight`.
    ///
    /// Running statistics are among the tensors, too.
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>);
}

/// Shows every float tensor of `model` to `visitor`, with those that belong to reparameterizations.
///
/// ```
/// use burn::module::Param;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::{FloatVisitor, visit_floats};
///
/// #[derive(Default)]
/// struct Shapes(Vec<(String, Vec<usize>)>);
///
/// impl FloatVisitor for Shapes {
///     fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
///         self.0.push((path.to_string(), param.shape().to_vec()));
///     }
/// }
///
/// let model = vec![LinearConfig::new(4, 2).init(&Device::flex())];
/// let mut shapes = Shapes::default();
/// visit_floats(&model, &mut shapes);
/// assert_eq!(shapes.0, [("0.weight".into(), vec![4, 2]), ("0.bias".into(), vec![2])]);
/// ```
pub fn visit_floats<M: Module, V: FloatVisitor>(model: &M, visitor: &mut V) {
    visit(model, visitor, true);
}

/// As [`visit_floats`], but leaves out what belongs to reparameterizations: the tensors of the
/// model as it was written.
pub fn visit_plain_floats<M: Module, V: FloatVisitor>(model: &M, visitor: &mut V) {
    visit(model, visitor, false);
}

fn visit<M: Module, V: FloatVisitor>(model: &M, visitor: &mut V, attached: bool) {
    model.visit(&mut WithPath {
        path: Vec::new(),
        inside: 0,
        attached,
        visitor,
    });
}

struct WithPath<'a, V> {
    path: Vec<String>,
    /// Reparameterizations around.
    inside: usize,
    /// Whether what is inside of them is shown.
    attached: bool,
    visitor: &'a mut V,
}

impl<V: FloatVisitor> ModuleVisitor for WithPath<'_, V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.inside += usize::from(container == "Reparameterization");
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.inside -= usize::from(container == "Reparameterization");
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.attached || self.inside == 0 {
            self.visitor.visit(&self.path.join("."), param);
        }
    }
}
