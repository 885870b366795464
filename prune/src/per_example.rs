//! Rows of the gradient matrix of many examples from one backward pass.
//!
//! For a linear layer y = x·W the gradient of example i is xᵢ ⊗ δᵢ, with δ the gradient of the loss
//! in y; a convolution is a linear layer over the patches of its input. So one backward pass over
//! B examples, which yields all δ, is enough. It does not even compute weight gradients: a zero
//! ("tap") is added to each layer's output, and the gradient of the tap is δ. With a mean loss over
//! B examples, δᵢ is 1/B of that of example i alone:
//!
//! ```text
//! row of the m examples in I  =  (B / m) · Σ_{i in I} xᵢ ⊗ δᵢ
//! ```
//!
//! Whether that holds for a model (does it treat examples independently? is its loss their mean?)
//! is checked on the first rows against plain backward passes.

use std::collections::HashMap;
use std::ops::Range;

use burn::backend::ir::{OperationIr, TensorId};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_lean_reparam::{FloatVisitor, visit_plain_floats};

use crate::collection::Put;
use crate::executor::{Observer, Tensors, execute};
use crate::gradient_matrix::{in_host_memory, read};
use crate::plain_rows::{PlainRows, check_number};
use crate::product::{Product, Products};
use crate::trace::Trace;
use crate::{Batch, PruneError, Selection};

/// Rows that are compared with plain backward passes, at most.
const CHECKED_ROWS: usize = 16;
/// Largest distance of the checked rows from the plain ones, as a fraction of their length, both
/// over all rows together: where the model is certain of an example, its gradient is little more
/// than the rounding of a probability near 1.
const TOLERANCE: f64 = 1e-3;
/// Bytes of the part of some rows that is made at once on a GPU.
const DEVICE_PART_BYTES: usize = 64 << 20;
/// The same in the host's memory: it should stay in a processor's cache until it is written.
const HOST_PART_BYTES: usize = 1 << 20;

/// Batched backward passes.
pub(crate) struct PerExample<'a, M, B> {
    /// In evaluation mode, without autodiff.
    model: M,
    selection: &'a Selection,
    columns: Range<usize>,
    loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    parameters: HashMap<String, DispatchTensor>,
    /// Rows of one pass that were compared with plain ones.
    checked: usize,
}

impl<'a, M: Module, B: Batch> PerExample<'a, M, B> {
    pub(crate) fn new(
        model: &M,
        selection: &'a Selection,
        columns: Range<usize>,
        loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    ) -> Self {
        let model = model.valid();
        let parameters = bases(&model);
        Self {
            model,
            selection,
            columns,
            loss,
            parameters,
            checked: 0,
        }
    }

    /// Puts the rows of a batch and returns its mean loss, or the reason why it cannot; checked
    /// against `plain` at first.
    pub(crate) fn rows(
        &mut self,
        batch: &B,
        batch_size: usize,
        plain: &mut PlainRows<'a, M, B>,
        put: Put<'_>,
    ) -> Result<Result<Tensor<1>, String>, PruneError> {
        let uses = match self.uses(batch, batch_size) {
            Ok(uses) => uses,
            Err(reason) => return Ok(Err(reason)),
        };
        // A row that is alone in its pass has none to mix with: it says nothing about two of them.
        let count = CHECKED_ROWS.min(uses.groups);
        if self.checked < count.min(2) {
            let first = batch.slice(0..count * batch_size);
            let expected = self.dense(count, |put| {
                plain.rows(&first, batch_size, put)?;
                Ok(())
            })?;
            let found = self.dense(count, |put| self.put(&uses, 0..count, put))?;
            if let Some(reason) = difference(&found, &expected, count) {
                return Ok(Err(reason));
            }
            self.checked = count;
        }
        self.put(&uses, 0..uses.groups, put)?;
        Ok(Ok(uses.loss))
    }

    /// One forward and one backward pass.
    fn uses(&self, batch: &B, batch_size: usize) -> Result<Uses, String> {
        let trace = Trace::record(&self.model, self.loss, batch)?;
        let device = self.selection.device();
        let mut taps = Taps {
            products: Products::new(&trace, self.selection, &self.columns, batch.examples()),
            device: device.clone().autodiff(),
            taps: Vec::new(),
        };
        let loss = execute(
            &trace,
            &by_tensor(&trace, &self.parameters),
            device,
            &mut taps,
        )?;
        let loss = Tensor::<1>::from_dispatch(loss);
        check_number(&loss).map_err(|error| error.to_string())?;
        let groups = batch.examples() / batch_size;
        let mut layers: Vec<Vec<(Product, Tensor<1>)>> = Vec::new();
        layers.resize_with(self.selection.ids().len(), Vec::new);
        if !loss.is_tracked() {
            // Whether that may be is decided by the plain rows that these are compared with.
            return Ok(Uses {
                layers,
                groups,
                size: batch_size,
                loss,
            });
        }
        let mut grads = loss.backward();
        for tap in taps.taps {
            if let Some(delta) = tap.zero.grad_remove(&mut grads) {
                let delta = delta.mul_scalar(groups as f64);
                let product = tap.product.without_autodiff();
                layers[product.layer].push((product, delta));
            }
        }
        Ok(Uses {
            layers,
            groups,
            size: batch_size,
            loss: loss.without_autodiff(),
        })
    }

    /// Puts some rows, a few at a time.
    fn put(&self, uses: &Uses, rows: Range<usize>, put: Put<'_>) -> Result<(), PruneError> {
        let layers = self.selection.layout().layers();
        let bytes = match in_host_memory(self.selection.device()) {
            true => HOST_PART_BYTES,
            false => DEVICE_PART_BYTES,
        };
        for (layer, uses_of_layer) in layers.iter().zip(&uses.layers) {
            let Some((product, _)) = uses_of_layer.first() else {
                continue;
            };
            let range = layer.range();
            let start = range.start.max(self.columns.start);
            let end = range.end.min(self.columns.end);
            let columns = start - range.start..end - range.start;
            let made = product.made(columns.len(), layer.len());
            let step = (bytes / (4 * made)).max(1);
            for first in rows.clone().step_by(step) {
                let part = first..rows.end.min(first + step);
                let sums = uses_of_layer.iter().map(|(product, delta)| {
                    product.rows(delta, part.clone(), columns.clone(), uses)
                });
                let Some(sum) = sums.reduce(|sum, other| sum + other) else {
                    continue;
                };
                put(part, start - self.columns.start, sum)?;
            }
        }
        Ok(())
    }

    /// What `fill` puts, as a matrix `[count, columns]`.
    fn dense(
        &self,
        count: usize,
        fill: impl FnOnce(Put<'_>) -> Result<(), PruneError>,
    ) -> Result<Vec<f32>, PruneError> {
        let columns = self.columns.len();
        let mut dense = vec![0.0; count * columns];
        fill(&mut |rows, first, part| {
            let [_, width] = part.dims();
            for (row, values) in rows.zip(read(part)?.chunks(width)) {
                let at = row * columns + first;
                dense[at..at + width].copy_from_slice(values);
            }
            Ok(())
        })?;
        Ok(dense)
    }
}

/// How the rows that were `found` differ from the `expected`, if they do.
fn difference(found: &[f32], expected: &[f32], count: usize) -> Option<String> {
    // A NaN is no difference: whoever collects the rows reports it.
    let length = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
    };
    let distance = length(&mut found.iter().zip(expected).map(|(x, y)| x - y));
    let expected = length(&mut expected.iter().copied());
    (distance > TOLERANCE * expected).then(|| {
        format!(
            "the first {count} rows are {distance:e} from those of plain backward passes, of \
             length {expected:e}: the model mixes examples, or its loss is not their mean"
        )
    })
}

/// The uses of all prunable weights in one pass: what rows are made from.
pub(crate) struct Uses {
    /// Per parameter of the layout, each use with the flat gradient in its output, times the number
    /// of groups.
    layers: Vec<Vec<(Product, Tensor<1>)>>,
    /// Rows.
    pub(crate) groups: usize,
    /// Examples per row.
    pub(crate) size: usize,
    /// Mean loss, `[1]`.
    loss: Tensor<1>,
}

/// A use of a prunable weight, and the zero `[elements]` that was added to its output.
struct Tap {
    product: Product,
    zero: Tensor<1>,
}

/// Puts taps where prunable weights are used.
struct Taps {
    products: Products,
    device: Device,
    taps: Vec<Tap>,
}

impl Observer for Taps {
    fn observe(
        &mut self,
        operation: &OperationIr,
        tensors: &Tensors,
        output: DispatchTensor,
    ) -> Result<DispatchTensor, String> {
        let Some(product) = self.products.find(operation, tensors)? else {
            return Ok(output);
        };
        let shape = output.shape();
        let zero = Tensor::<1>::zeros([shape.num_elements()], &self.device).require_grad();
        let tap = Dispatch::float_reshape(zero.clone().into_dispatch(), shape);
        self.taps.push(Tap { product, zero });
        Ok(Dispatch::float_add(output, tap))
    }
}

/// The stored parameters of a model on its own device, by path.
pub(crate) fn bases<M: Module>(model: &M) -> HashMap<String, DispatchTensor> {
    struct Bases(HashMap<String, DispatchTensor>);
    impl FloatVisitor for Bases {
        fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
            let base = param.base().without_autodiff();
            self.0.insert(path.to_string(), base.into_dispatch());
        }
    }
    let mut bases = Bases(HashMap::new());
    visit_plain_floats(model, &mut bases);
    bases.0
}

/// Parameters by the tensors that stand for them in a trace.
pub(crate) fn by_tensor(
    trace: &Trace,
    parameters: &HashMap<String, DispatchTensor>,
) -> HashMap<TensorId, DispatchTensor> {
    let found = trace.parameters.iter().filter_map(|(id, path)| {
        let tensor = parameters.get(path)?;
        Some((*id, tensor.clone()))
    });
    found.collect()
}
