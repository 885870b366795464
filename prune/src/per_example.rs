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

use crate::collection::Rows;
use crate::executor::{Observer, Tensors, execute};
use crate::gradient_matrix::read;
use crate::plain_rows::{PlainRows, check_loss};
use crate::product::{Product, Products};
use crate::trace::Trace;
use crate::walk::{FloatVisitor, walk};
use crate::{Batch, PruneError, Selection};

/// Rows that are compared with plain backward passes, at most.
const CHECKED_ROWS: usize = 16;
/// Largest distance of the checked rows from the plain ones, as a fraction of their length, both
/// over all rows together: where the model is certain of an example, its gradient is little more
/// than the rounding of a probability near 1.
const TOLERANCE: f64 = 1e-3;

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

    /// Rows of a batch, or the reason why there are none; checked against `plain` at first.
    pub(crate) fn rows(
        &mut self,
        batch: &B,
        batch_size: usize,
        plain: &mut PlainRows<'a, M, B>,
    ) -> Result<Result<Rows, String>, PruneError> {
        let rows = match self.batched(batch, batch_size) {
            Ok(rows) => rows,
            Err(reason) => return Ok(Err(reason)),
        };
        // A row that is alone in its pass has none to mix with: it says nothing about two of them.
        let count = CHECKED_ROWS.min(batch.examples() / batch_size);
        if self.checked < count.min(2) {
            let reference = plain.rows(&batch.slice(0..count * batch_size), batch_size)?;
            for (_, expected) in reference.parts {
                if let Some(reason) = self.difference(&rows.parts, expected)? {
                    return Ok(Err(reason));
                }
            }
            self.checked = count;
        }
        Ok(Ok(rows))
    }

    fn batched(&self, batch: &B, batch_size: usize) -> Result<Rows, String> {
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
        check_loss(&loss).map_err(|error| error.to_string())?;
        let grads = loss.backward();
        let groups = batch.examples() / batch_size;
        let mut layers: Vec<Option<Tensor<2>>> = vec![None; self.selection.ids().len()];
        for tap in taps.taps {
            let Some(delta) = tap.zero.grad(&grads) else {
                continue;
            };
            let layer = &mut layers[tap.product.layer];
            let rows = tap.product.rows(delta, groups, batch_size);
            *layer = Some(match layer.take() {
                Some(sum) => sum + rows,
                None => rows,
            });
        }
        let mut parts = Vec::new();
        for (layer, rows) in self.selection.layout().layers().iter().zip(layers) {
            let Some(rows) = rows else { continue };
            let range = layer.range();
            let start = range.start.max(self.columns.start);
            let end = range.end.min(self.columns.end);
            let rows = match end - start == layer.len() {
                true => rows,
                false => rows.slice([0..groups, start - range.start..end - range.start]),
            };
            parts.push((start - self.columns.start, rows));
        }
        Ok(Rows {
            parts,
            loss: loss.without_autodiff(),
        })
    }

    /// How the first rows differ from the `expected` `[rows, columns]`, if they do.
    fn difference(
        &self,
        found: &[(usize, Tensor<2>)],
        expected: Tensor<2>,
    ) -> Result<Option<String>, PruneError> {
        let [count, columns] = expected.dims();
        let expected = read(expected)?;
        let mut rows = vec![0.0; count * columns];
        for (first, part) in found {
            let [_, width] = part.dims();
            let values = read(part.clone().slice([0..count]))?;
            for (row, values) in rows.chunks_mut(columns).zip(values.chunks(width)) {
                row[*first..first + width].copy_from_slice(values);
            }
        }
        // A NaN is no difference: whoever collects the rows reports it.
        let length = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
        };
        let distance = length(&mut rows.iter().zip(&expected).map(|(x, y)| x - y));
        let expected = length(&mut expected.into_iter());
        Ok((distance > TOLERANCE * expected).then(|| {
            format!(
                "the first {count} rows are {distance:e} from those of plain backward passes, of \
                 length {expected:e}: the model mixes examples, or its loss is not their mean"
            )
        }))
    }
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
    walk(model, &mut bases);
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
