//! Rows of the gradient matrix by one backward pass each.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Gradients, Tensor};
use burn_lean_reparam::catch_quietly;

use crate::fisher::collection::{CHUNK_EXAMPLES, Put};
use crate::model::checks::check_number;
use crate::model::evaluation::gradient_model;
use crate::model::flatten::flat;
use crate::{Batch, PruneError, Selection};

/// Backward passes over m examples at a time: slow, and right for every model.
pub(crate) struct PlainRows<'a, M, B> {
    /// As the caller has it.
    original: &'a M,
    /// In evaluation mode, with gradients for the columns.
    model: M,
    selection: &'a Selection,
    columns: Range<usize>,
    loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    /// Per layer of the layout: whether a gradient ever arrived.
    reached: Vec<bool>,
    /// The loss is known to depend on prunable parameters outside of the columns.
    depends_on_others: bool,
}

impl<'a, M: Module, B: Batch> PlainRows<'a, M, B> {
    pub(crate) fn new(
        original: &'a M,
        selection: &'a Selection,
        columns: Range<usize>,
        loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    ) -> Self {
        Self {
            original,
            model: gradient_model(original, selection, &columns),
            selection,
            columns,
            loss,
            reached: vec![false; selection.layout().layers().len()],
            depends_on_others: false,
        }
    }

    /// Paths of the parameters in the block that no gradient reached.
    pub(crate) fn unreached(&self) -> Vec<String> {
        let layers = self.selection.layout().layers().iter().zip(&self.reached);
        layers
            .filter(|(layer, reached)| !**reached && !self.part(&layer.range()).is_empty())
            .map(|(layer, _)| layer.path.clone())
            .collect()
    }

    /// The columns of this block that lie in a layer.
    fn part(&self, layer: &Range<usize>) -> Range<usize> {
        let start = layer.start.max(self.columns.start);
        start..layer.end.min(self.columns.end).max(start)
    }

    /// Puts the gradient of the mean loss over `batch` into a row, and returns that loss.
    fn row(&mut self, batch: &B, row: usize, put: Put<'_>) -> Result<Tensor<1>, PruneError> {
        // What the graph could not record comes here, too.
        let loss = catch_quietly(|| (self.loss)(&self.model, batch));
        let loss = loss.map_err(|message| PruneError::Loss {
            reason: format!("it panics ({message}): check the shapes of the batch"),
        })?;
        if !self.reaches_columns(&loss, batch)? {
            return Ok(loss.without_autodiff());
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
            let range = layer.range();
            let part = self.part(&range);
            let Some(grad) = collect.parts[index].take() else {
                continue;
            };
            if part.is_empty() {
                continue;
            }
            self.reached[index] = true;
            let grad = match part == range {
                true => grad,
                false => grad.slice([part.start - range.start..part.end - range.start]),
            };
            put(
                row..row + 1,
                part.start - self.columns.start,
                grad.unsqueeze(),
            )?;
        }
        Ok(loss.without_autodiff())
    }

    /// Whether the loss of a batch depends on the columns; fails where it depends on no prunable
    /// parameter at all.
    fn reaches_columns(&mut self, loss: &Tensor<1>, batch: &B) -> Result<bool, PruneError> {
        check_number(loss)?;
        if loss.is_tracked() {
            return Ok(true);
        }
        if !self.depends_on_others {
            let all = 0..self.selection.layout().len();
            let model = gradient_model(self.original, self.selection, &all);
            self.depends_on_others = (self.loss)(&model, batch).is_tracked();
        }
        match self.depends_on_others {
            true => Ok(false),
            false => Err(PruneError::Loss {
                reason: "it depends on no prunable parameter: compute it from the model that the \
                         closure is given, without detaching"
                    .into(),
            }),
        }
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

/// Paths of the prunable parameters that the loss of none of the batches depends on: backward
/// passes over some Fisher samples at a time, until all parameters are reached.
pub(crate) fn unreached<M: Module, B: Batch>(
    model: &M,
    selection: &Selection,
    batch_size: usize,
    loss: &dyn Fn(&M, &B) -> Tensor<1>,
    batches: &[B],
) -> Result<Vec<String>, PruneError> {
    let mut rows = PlainRows::new(model, selection, 0..selection.layout().len(), loss);
    let size = batch_size * (CHUNK_EXAMPLES / batch_size).max(1);
    for batch in batches {
        let batch = batch.clone().to_device(selection.device());
        let examples = batch.examples() / batch_size * batch_size;
        for first in (0..examples).step_by(size) {
            let part = batch.slice(first..examples.min(first + size));
            rows.row(&part, 0, &mut |_, _, _| Ok(()))?;
            if rows.reached.iter().all(|reached| *reached) {
                return Ok(Vec::new());
            }
        }
    }
    Ok(rows.unreached())
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
