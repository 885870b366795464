//! The way between the prunable parameters of a model and one flat weight vector.

use std::collections::HashMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean_graph::as_constants;
use burn_lean_reparam::{
    AnyFloat, PathMapper, PathVisitor, Rejected, Trail, each_float, map_with_path, visit_with_path,
};

use crate::host::read;
use crate::model::carried::{attached_masks, zero_pruned};
use crate::model::layout::Layout;
use crate::{PruneError, Selection};

impl Selection {
    /// The prunable weights of `model` as one vector `[p]` in F32, on [`device`](Self::device): of
    /// reparameterized ones the base, with zeros where a mask prunes.
    ///
    /// # Errors
    ///
    /// [`PruneError::OtherModel`] where `model` is not the one that was selected from.
    pub fn flatten<M: Module>(&self, model: &M) -> Result<Tensor<1>, PruneError> {
        let mut gather = Gather {
            selected: Selected::new(self),
            parts: vec![None; self.ids().len()],
        };
        visit_with_path(model, &mut gather);
        // What an optimizer left behind a mask is no weight.
        let layers = self.layers_by_path();
        for mask in attached_masks(model) {
            let position = layers.get(mask.path.as_str());
            if let Some(part) = position.and_then(|at| gather.parts[*at].as_mut()) {
                let kept = as_constants(&mask.kept, self.device());
                *part = zero_pruned(part.clone(), kept);
            }
        }
        let parts: Option<Vec<Tensor<1>>> = gather.parts.into_iter().collect();
        match parts {
            Some(parts) => Ok(Tensor::cat(parts, 0)),
            None => Err(self.other_model()),
        }
    }

    /// [`flatten`](Self::flatten) on the host, or [`PruneError::NonFiniteWeight`].
    pub(crate) fn finite_weights<M: Module>(&self, model: &M) -> Result<Vec<f32>, PruneError> {
        finite(self.layout(), self.flatten(model)?)
    }

    /// Writes the vector `[p]` into the prunable weights of `model`; trainability, dtypes, devices
    /// and reparameterizations stay as they are. Tied copies get the same weights. A weight in F64 whose
    /// value in the vector's dtype is the one that it has keeps all of its digits.
    ///
    /// # Errors
    ///
    /// The model comes back in the error, unchanged: [`PruneError::Mismatch`] unless there are p
    /// weights, [`PruneError::OtherModel`] where `model` is not the one that was selected from.
    pub fn unflatten<M: Module>(
        &self,
        model: M,
        weights: Tensor<1>,
    ) -> Result<M, Rejected<M, PruneError>> {
        let [found] = weights.dims();
        if found != self.layout().len() {
            let error = PruneError::Mismatch {
                what: "weights of the model",
                expected: self.layout().len(),
                found,
            };
            return Err(Rejected::new(model, error));
        }
        let selected = Selected::new(self);
        let mut found = vec![false; self.ids().len()];
        each_float(&model, |at, float| {
            if let Some(position) = selected.position(at, float) {
                found[position] = true;
            }
        });
        if found.contains(&false) {
            return Err(Rejected::new(model, self.other_model()));
        }
        let mut scatter = Scatter {
            selected,
            weights: weights.without_autodiff(),
        };
        Ok(map_with_path(model, &mut scatter))
    }

    fn other_model(&self) -> PruneError {
        PruneError::OtherModel {
            expected: self
                .layout()
                .layers()
                .iter()
                .map(|l| l.path.clone())
                .collect(),
        }
    }
}

/// What is selected, by identity.
struct Selected<'a> {
    selection: &'a Selection,
    positions: HashMap<ParamId, usize>,
}

impl<'a> Selected<'a> {
    fn new(selection: &'a Selection) -> Self {
        Self {
            selection,
            positions: selection.positions(),
        }
    }

    /// Position of a parameter among the layers of the layout, if it is selected; nothing in a
    /// reparameterization is.
    fn position(&self, at: &Trail, float: &dyn AnyFloat) -> Option<usize> {
        let position = *self.positions.get(&float.id())?;
        let layer = &self.selection.layout().layers()[position];
        (!at.is_attached() && layer.shape == float.shape()).then_some(position)
    }
}

struct Gather<'a> {
    selected: Selected<'a>,
    parts: Vec<Option<Tensor<1>>>,
}

impl PathVisitor for Gather<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let Some(position) = self.selected.position(at, param) else {
            return;
        };
        let part = &mut self.parts[position];
        if part.is_none() {
            *part = Some(flat(
                param.base().without_autodiff(),
                self.selected.selection.device(),
            ));
        }
    }
}

/// A parameter, or its gradient, as a vector in F32 on `device`.
pub(crate) fn flat<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<1> {
    let elements = tensor.shape().num_elements();
    tensor
        .cast(FloatDType::F32)
        .reshape([elements])
        .to_device(device)
}

struct Scatter<'a> {
    selected: Selected<'a>,
    weights: Tensor<1>,
}

impl PathMapper for Scatter<'_> {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(position) = self.selected.position(at, &param) else {
            return param;
        };
        let layer = &self.selected.selection.layout().layers()[position];
        let new = self.weights.clone().slice([layer.range()]);
        param.map(|old| like(new.reshape(old.shape()), &old))
    }
}

/// `new` with the dtype, device and trainability of `old`, as a leaf of the graph.
fn like<const D: usize>(new: Tensor<D>, old: &Tensor<D>) -> Tensor<D> {
    let new = new.to_device(&old.device().inner());
    let new = in_dtype_of(new, old.clone().without_autodiff());
    match old.gradient_checkpointing_strategy() {
        Some(strategy) => Tensor::from_inner(new)
            .with_gradient_checkpointing_strategy(strategy)
            .set_require_grad(old.is_require_grad()),
        None => new,
    }
}

/// `new` in the dtype of `old`; both without autodiff, on one device. Of F64, where `old` in the dtype of
/// `new` is the same number, it is `old` with all of its digits; but a zero is a zero, however small `old` is.
pub(crate) fn in_dtype_of<const D: usize>(new: Tensor<D>, old: Tensor<D>) -> Tensor<D> {
    if old.dtype() != DType::F64 {
        return new.cast(old.dtype());
    }
    let same = old.clone().cast(new.dtype()).equal(new.clone());
    let stays = same.bool_and(new.clone().not_equal_elem(0.0));
    new.cast(DType::F64).mask_where(stays, old)
}

/// Dense weights `[p]` on the host, none of them NaN or infinite.
pub(crate) fn finite(layout: &Layout, dense: Tensor<1>) -> Result<Vec<f32>, PruneError> {
    let dense = read(dense)?;
    match dense.iter().position(|weight| !weight.is_finite()) {
        None => Ok(dense),
        Some(index) => {
            let (path, local) = locate(layout, index);
            Err(PruneError::NonFiniteWeight {
                path,
                index: local,
                value: dense[index],
            })
        }
    }
}

/// The parameter of an element of the flat vector, and its index there.
pub(crate) fn locate(layout: &Layout, index: usize) -> (String, usize) {
    match layout.layer_at(index) {
        Some(layer) => (layer.path.clone(), index - layer.offset),
        None => ("weights".into(), index),
    }
}
