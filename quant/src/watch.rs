//! A look at what passes through the quantizers of a model, from outside.

use std::cell::RefCell;
use std::collections::HashMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_lean_reparam::{FloatVisitor, visit_floats};

use crate::effective::Effective;
use crate::groups::Groups;
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
    /// Scale of each element.
    pub(crate) scale: Tensor<1>,
    /// Zero point of each element.
    pub(crate) zero_point: Tensor<1>,
}

impl Seen<'_> {
    /// The quantized numbers: integers as floats.
    pub(crate) fn codes(&self) -> Tensor<1> {
        (self.y.clone() / self.scale.clone()).round() + self.zero_point.clone()
    }
}

type Watcher = Box<dyn FnMut(&Seen<'_>)>;

thread_local! {
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// Runs `model_code` and shows `watcher` every tensor that a quantizer quantizes on this thread.
pub(crate) fn watch<O>(
    watcher: impl FnMut(&Seen<'_>) + 'static,
    model_code: impl FnOnce() -> O,
) -> O {
    /// Puts the outer watcher back, also after a panic of the model's.
    struct Scope(Option<Watcher>);
    impl Drop for Scope {
        fn drop(&mut self) {
            WATCHER.set(self.0.take());
        }
    }
    let _scope = Scope(WATCHER.replace(Some(Box::new(watcher))));
    model_code()
}

/// Shows `watcher` every weight that carries a quantizer, as it is quantized.
///
/// It is what the quantizer is given, behind what acts on the stored weight before it.
pub(crate) fn watch_weights<M: Module>(model: &M, watcher: impl FnMut(&Seen<'_>) + 'static) {
    watch(watcher, || visit_weights(model, &mut Quantize));
}

/// What is done with a weight, of any rank, and its quantizer.
pub(crate) trait WeightVisitor {
    fn visit<const D: usize>(&mut self, path: &str, quantizer: &FakeQuantize, weight: Weight<D>);
}

/// A weight.
pub(crate) struct Weight<const D: usize> {
    pub(crate) id: ParamId,
    /// What its quantizer is given, without gradient; what is stored, if that is quantized.
    pub(crate) value: Tensor<D>,
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
            let weight = Weight {
                id: param.id,
                value: self.effective.given(path, param.base().without_autodiff()),
            };
            self.visitor.visit(path, quantizer, weight);
        }
    }
}

/// Quantizes each weight, for a watcher.
struct Quantize;

impl WeightVisitor for Quantize {
    fn visit<const D: usize>(&mut self, _path: &str, quantizer: &FakeQuantize, weight: Weight<D>) {
        if !matches!(weight.value.dtype(), DType::QFloat(_)) {
            let _ = quantizer.forward(weight.value);
        }
    }
}

/// Quantizes `x`, and shows the watcher what came of it.
pub(crate) fn seen<const D: usize>(
    path: &str,
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
    quantize: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    // Taken out meanwhile: what the watcher computes is not watched. Nobody keeps `x` alive where
    // nobody watches, so that it can be quantized in place.
    let Some(mut watcher) = WATCHER.take() else {
        return quantize(x);
    };
    let y = quantize(x.clone());
    let shape = x.dims();
    if let Ok(groups) = Groups::new(&scheme.granularity, &shape) {
        let flat = |tensor: &Tensor<D>| {
            let tensor = tensor.clone().without_autodiff().cast(FloatDType::F32);
            tensor.flatten::<1>(0, D - 1)
        };
        let elements = [shape.iter().product::<usize>()];
        let spread = |values: &Tensor<1>| {
            let values = values.clone().without_autodiff();
            groups.expand(values, elements)
        };
        watcher(&Seen {
            path,
            scheme,
            shape: shape.to_vec(),
            x: flat(&x),
            y: flat(&y),
            scale: spread(&qparams.scale),
            zero_point: spread(&qparams.zero_point),
            groups,
        });
    }
    WATCHER.set(Some(watcher));
    y
}
