//! The way between the prunable parameters of a model and one flat weight vector.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};

use crate::selection::REPARAMETERIZATION;
use crate::{Layer, PruneError, Selection};

impl Selection {
    /// The prunable weights of `model` as one vector `[p]` in F32, on [`device`](Self::device).
    ///
    /// # Errors
    ///
    /// [`PruneError::OtherModel`] where `model` is not the one that was selected from.
    pub fn flatten<M: Module>(&self, model: &M) -> Result<Tensor<1>, PruneError> {
        let mut gather = Gather {
            selection: self,
            positions: self.positions(),
            nested: 0,
            parts: vec![None; self.ids().len()],
        };
        model.visit(&mut gather);
        let parts: Option<Vec<Tensor<1>>> = gather.parts.into_iter().collect();
        match parts {
            Some(parts) => Ok(Tensor::cat(parts, 0)),
            None => Err(self.other_model()),
        }
    }

    /// Writes the vector `[p]` into the prunable weights of `model`; trainability, dtypes, devices
    /// and reparameterizations stay as they are. Tied copies get the same weights.
    ///
    /// # Errors
    ///
    /// [`PruneError::Mismatch`] unless there are p weights, [`PruneError::OtherModel`] where
    /// `model` is not the one that was selected from.
    pub fn unflatten<M: Module>(&self, model: M, weights: Tensor<1>) -> Result<M, PruneError> {
        let [found] = weights.dims();
        if found != self.layout().len() {
            return Err(PruneError::Mismatch {
                what: "weights of the model",
                expected: self.layout().len(),
                found,
            });
        }
        let mut scatter = Scatter {
            selection: self,
            positions: self.positions(),
            weights: weights.without_autodiff(),
            nested: 0,
            written: vec![false; self.ids().len()],
        };
        let model = model.map(&mut scatter);
        match scatter.written.iter().all(|written| *written) {
            true => Ok(model),
            false => Err(self.other_model()),
        }
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

struct Gather<'a> {
    selection: &'a Selection,
    positions: HashMap<ParamId, usize>,
    nested: usize,
    parts: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for Gather<'_> {
    fn enter_module(&mut self, _name: &str, container_type: &str) {
        self.nested += usize::from(container_type == REPARAMETERIZATION);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.nested -= usize::from(container_type == REPARAMETERIZATION);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(position) = self.position(&param.id, &param.lazy_shape()) else {
            return;
        };
        let part = &mut self.parts[position];
        if part.is_none() {
            *part = Some(flat(
                param.base().without_autodiff(),
                self.selection.device(),
            ));
        }
    }
}

impl Gather<'_> {
    fn position(&self, id: &ParamId, shape: &[usize]) -> Option<usize> {
        let position = *self.positions.get(id)?;
        let layer = &self.selection.layout().layers()[position];
        (self.nested == 0 && layer.shape == shape).then_some(position)
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
    selection: &'a Selection,
    positions: HashMap<ParamId, usize>,
    weights: Tensor<1>,
    nested: usize,
    written: Vec<bool>,
}

impl ModuleMapper for Scatter<'_> {
    fn enter_module(&mut self, _name: &str, container_type: &str) {
        self.nested += usize::from(container_type == REPARAMETERIZATION);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.nested -= usize::from(container_type == REPARAMETERIZATION);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(position) = self.positions.get(&param.id).copied() else {
            return param;
        };
        let layer: &Layer = &self.selection.layout().layers()[position];
        if self.nested > 0 || *layer.shape != *param.lazy_shape() {
            return param;
        }
        self.written[position] = true;
        let new = self.weights.clone().slice([layer.range()]);
        param.map(|old| like(new.reshape(old.shape()), &old))
    }
}

/// `new` with the dtype, device and trainability of `old`, as a leaf of the graph.
fn like<const D: usize>(new: Tensor<D>, old: &Tensor<D>) -> Tensor<D> {
    let device = old.device();
    let new = new.to_device(&device.clone().inner()).cast(old.dtype());
    match device.is_autodiff() {
        true => Tensor::from_inner(new).set_require_grad(old.is_require_grad()),
        false => new,
    }
}
