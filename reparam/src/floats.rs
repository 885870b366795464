//! A visit of every float tensor of a model with its path.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::{PathVisitor, Trail, visit_with_path};

/// What a visit does with each float tensor.
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
    visit_with_path(model, &mut Floats { attached, visitor });
}

struct Floats<'a, V> {
    /// Whether what belongs to reparameterizations is shown.
    attached: bool,
    visitor: &'a mut V,
}

impl<V: FloatVisitor> PathVisitor for Floats<'_, V> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        if self.attached || !at.is_attached() {
            self.visitor.visit(&at.path(), param);
        }
    }
}

/// A float tensor of a model, whatever its rank.
pub trait AnyFloat {
    /// Its identity.
    fn id(&self) -> ParamId;
    /// Its shape.
    fn shape(&self) -> Vec<usize>;
    /// What its numbers are stored as.
    fn dtype(&self) -> DType;
    /// Where they are.
    fn device(&self) -> Device;
    /// Whether it is trained.
    fn is_require_grad(&self) -> bool;
    /// Its stored numbers.
    fn data(&self) -> TensorData;
    /// The values that they stand for, quantized or not.
    fn values(&self) -> Vec<f32>;
}

impl<const D: usize> AnyFloat for Param<Tensor<D>> {
    fn id(&self) -> ParamId {
        self.id
    }

    fn shape(&self) -> Vec<usize> {
        self.base().shape().to_vec()
    }

    fn dtype(&self) -> DType {
        self.base().dtype()
    }

    fn device(&self) -> Device {
        self.base().device()
    }

    fn is_require_grad(&self) -> bool {
        self.base().is_require_grad()
    }

    fn data(&self) -> TensorData {
        self.base().into_data()
    }

    fn values(&self) -> Vec<f32> {
        let base = self.base();
        let values = match base.dtype() {
            DType::QFloat(_) => base.dequantize(),
            _ => base,
        };
        values.into_data().iter::<f32>().collect()
    }
}

/// Shows every float tensor of `model` to a closure, which learns what does not depend on the rank.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_reparam::each_float;
///
/// let mut shapes = Vec::new();
/// let linear = LinearConfig::new(4, 2).init(&Device::flex());
/// each_float(&linear, |at, float| shapes.push((at.path(), float.shape())));
/// assert_eq!(shapes, [("weight".into(), vec![4, 2]), ("bias".into(), vec![2])]);
/// ```
pub fn each_float<M: Module>(model: &M, show: impl FnMut(&Trail, &dyn AnyFloat)) {
    visit_with_path(model, &mut Each(show));
}

/// As [`each_float`], but leaves out what belongs to reparameterizations.
pub fn each_plain_float<M: Module>(model: &M, mut show: impl FnMut(&Trail, &dyn AnyFloat)) {
    each_float(model, |at, float| {
        if !at.is_attached() {
            show(at, float);
        }
    });
}

struct Each<F>(F);

impl<F: FnMut(&Trail, &dyn AnyFloat)> PathVisitor for Each<F> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        (self.0)(at, param);
    }
}
