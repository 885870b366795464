//! Rows of the gradient matrix by one backward pass each.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Gradients, Tensor};
use burn_lean_reparam::catch_quietly;

use crate::fisher::collection::Put;
use crate::model::checks::check_number;
use crate::model::evaluation::gradient_model;
use crate::model::flatten::flat;
use crate::{Batch, PruneError, Selection};

/// Backward passes over m examples at a time: slow, and right for every model.
pub(crate) struct PlainRows<'a, M, B> {
    /// In evaluation mode, with gradients.
    model: M,
    selection: &'a Selection,
    loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    /// Per layer of the layout: whether a gradient ever arrived.
    reached: Vec<bool>,
}

impl<'a, M: Module, B: Batch> PlainRows<'a, M, B> {
    pub(crate) fn new(
        model: &M,
        selection: &'a Selection,
        loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    ) -> Self {
        Self {
            model: gradient_model(model, selection),
            selection,
            loss,
            reached: vec![false; selection.layout().layers().len()],
        }
    }

    /// Paths of the parameters that no gradient reached.
    pub(crate) fn unreached(&self) -> Vec<String> {
        let layers = self.selection.layout().layers().iter().zip(&self.reached);
        layers
            .filter(|(_, reached)| !**reached)
            .map(|(layer, _)| layer.path.clone())
            .collect()
    }

    /// Puts the gradient of the mean loss over `batch` into a row, and returns that loss.
    fn row(&mut self, batch: &B, row: usize, put: Put<'_>) -> Result<Tensor<1>, PruneError> {
        // What the graph could not record comes here, too.
        let loss = catch_quietly(|| (self.loss)(&self.model, batch));
        let loss = loss.map_err(|message| PruneError::Loss {
            reason: format!("it panics ({message}): check the shapes of the batch"),
        })?;
        check_number(&loss)?;
        if !loss.is_tracked() {
            return Err(PruneError::Loss {
                reason: "it depends on no prunable parameter: compute it from the model that the \
                         closure is given, without detaching"
                    .into(),
            });
        }
        let grads = loss.backward();
        let mut collect = CollectGradients {
            grads,
            positions: self.selection.positions(),
            parts: vec![None; self.reached.len()],
            device: self.selection.device().clone(),
        };
        self.model.visit(&mut collect);
        for (index, layer) in self.selection.layout().layers().iter().enumerate() {
            let Some(grad) = collect.parts[index].take() else {
                continue;
            };
            self.reached[index] = true;
            put(row..row + 1, layer.offset, grad.unsqueeze())?;
        }
        Ok(loss.without_autodiff())
    }

    /// Puts rows of `batch_size` examples each; returns the mean loss, `[1]`.
    pub(crate) fn rows(
        &mut self,
        batch: &B,
        batch_size: usize,
        put: Put<'_>,
    ) -> Result<Tensor<1>, PruneError> {
        let count = batch.examples() / batch_size;
        let mut losses = Vec::with_capacity(count);
        for row in 0..count {
            let first = row * batch_size;
            losses.push(self.row(&batch.slice(first..first + batch_size), row, put)?);
        }
        Ok(Tensor::cat(losses, 0).mean())
    }
}

struct CollectGradients {
    grads: Gradients,
    positions: HashMap<ParamId, usize>,
    parts: Vec<Option<Tensor<1>>>,
    device: Device,
}

impl ModuleVisitor for CollectGradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(position) = self.positions.get(&param.id).copied() else {
            return;
        };
        let Some(grad) = param.base().grad_remove(&mut self.grads) else {
            return;
        };
        let grad = flat(grad, &self.device);
        // Tied copies of one parameter each have their share.
        let part = &mut self.parts[position];
        *part = Some(match part.take() {
            Some(share) => share + grad,
            None => grad,
        });
    }
}
