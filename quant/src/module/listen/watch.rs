//! A look at what passes through the quantizers of a model, from outside.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_lean_reparam::{FloatVisitor, visit_floats};

use crate::fake::op::clipped;
use crate::format::groups::Groups;
use crate::module::effective::Effective;
use crate::{FakeQuantize, QuantParams, Scheme, Site, quantizers};

/// One pass of a tensor through a quantizer that quantized it.
pub(crate) struct Seen<'a> {
    /// Path of the quantizer.
    pub(crate) path: &'a str,
    pub(crate) scheme: &'a Scheme,
    pub(crate) groups: Groups,
    pub(crate) shape: Vec<usize>,
    /// What came in; F32, flat, without gradient.
    pub(crate) x: Tensor<1>,
    /// What went out; likewise.
    pub(crate) y: Tensor<1>,
    /// 1 for each element that was clipped, 0 for the others; likewise.
    pub(crate) clipped: Tensor<1>,
}

/// Called with every tensor that a quantizer quantizes.
pub(crate) type Watcher = dyn Fn(&Seen<'_>) + Send + Sync;

/// What is done with a weight, of any rank, and its quantizer; the weight is what the quantizer is given, without
/// gradient; what is stored, if that is quantized.
pub(crate) trait WeightVisitor {
    fn visit<const D: usize>(&mut self, path: &str, quantizer: &FakeQuantize, weight: Tensor<D>);
}

/// Shows `visitor` every weight that carries a quantizer which is switched on.
pub(crate) fn visit_weights<M: Module>(model: &M, visitor: &mut impl WeightVisitor) {
    let on = quantizers(model)
        .into_iter()
        .filter(|located| located.site == Site::Weight && located.quantizer.is_enabled());
    let quantizers = on.filter_map(|located| Some((located.parameter?, located.quantizer)));
    let mut weights = Weights {
        quantizers: quantizers.collect(),
        effective: Effective::of(model),
        visitor,
    };
    visit_floats(model, &mut weights);
}

/// Burn hides from visitors what a parameter carries, so quantizers are found by path.
struct Weights<'a, V> {
    quantizers: HashMap<String, FakeQuantize>,
    effective: Effective,
    visitor: &'a mut V,
}

impl<V: WeightVisitor> FloatVisitor for Weights<'_, V> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(quantizer) = self.quantizers.get(path) {
            let weight = self.effective.given(path, param.base().without_autodiff());
            self.visitor.visit(path, quantizer, weight);
        }
    }
}

/// Shows the watcher what became of `x` in the quantizer with this path and scheme.
pub(crate) fn show<const D: usize>(
    watcher: &Watcher,
    (path, scheme): (&str, &Scheme),
    (x, y): (&Tensor<D>, &Tensor<D>),
    qparams: &QuantParams,
) {
    let shape = x.dims();
    let Ok(groups) = Groups::new(&scheme.granularity, &shape) else {
        return;
    };
    let flat = |tensor: &Tensor<D>| {
        let tensor = tensor.clone().without_autodiff().cast(FloatDType::F32);
        tensor.flatten::<1>(0, D - 1)
    };
    let seen = Seen {
        path,
        scheme,
        shape: shape.to_vec(),
        x: flat(x),
        y: flat(y),
        clipped: flat(&clipped(x.clone(), qparams, scheme)),
        groups,
    };
    watcher(&seen);
}
