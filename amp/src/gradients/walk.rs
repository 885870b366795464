//! Walks over the parameters of a model.

use std::collections::HashSet;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_lean_reparam::{FloatVisitor, each_float, visit_floats};

/// Shows every float tensor of `model` to `visitor`, but only one of those that share an identity.
///
/// Burn's clones keep it: a model may hold a part of itself twice, as a network and the frozen copy
/// that is its target. Gradients are kept by identity, so such parameters share one: it is shown
/// where it is trained, or else where it comes first.
pub(crate) fn visit_once<M: Module, V: FloatVisitor>(model: &M, visitor: &mut V) {
    let mut trained = HashSet::new();
    each_float(model, |_, float| {
        if float.is_require_grad() {
            trained.insert(float.id());
        }
    });
    let mut once = Once {
        trained,
        shown: HashSet::new(),
        visitor,
    };
    visit_floats(model, &mut once);
}

struct Once<'a, V> {
    trained: HashSet<ParamId>,
    shown: HashSet<ParamId>,
    visitor: &'a mut V,
}

impl<V: FloatVisitor> FloatVisitor for Once<'_, V> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let trained_elsewhere = self.trained.contains(&param.id) && !param.is_require_grad();
        if !trained_elsewhere && self.shown.insert(param.id) {
            self.visitor.visit(path, param);
        }
    }
}

/// `tensor` on `device` as a constant: without autodiff, whatever the two have. Devices are equal with it and
/// without, and beside a tensor without it, one that has it would hand it on.
pub(crate) fn same_device<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    let tensor = tensor.without_autodiff();
    match tensor.device() == *device {
        true => tensor,
        false => tensor.to_device(&device.clone().without_autodiff()),
    }
}
