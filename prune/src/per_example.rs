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

use crate::executor::{Observer, Tensors, execute};
use crate::fisher::{RowSource, Rows};
use crate::gradient_matrix::read;
use crate::plain_rows::{PlainRows, check_loss};
use crate::product::{Product, Products};
use crate::trace::Trace;
use crate::walk::{FloatVisitor, walk};
use crate::{Batch, PruneError, Selection};

/// Rows that are compared with plain backward passes.
const CHECKED_ROWS: usize = 2;
/// Largest difference of a checked element, as a fraction of the largest element of its row. Sums
/// over positions and examples in another order differ by some 1e-6 of it.
const TOLERANCE: f32 = 1e-4;

/// Batched backward passes.
pub(crate) struct PerExample<'a, M, B> {
    /// In evaluation mode, without autodiff.
    model: M,
    selection: &'a Selection,
    columns: Range<usize>,
    loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    parameters: HashMap<String, DispatchTensor>,
    checked: bool,
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
            checked: false,
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
        if !self.checked {
            let count = CHECKED_ROWS.min(batch.examples() / batch_size);
            let reference = plain.rows(&batch.slice(0..count * batch_size), batch_size)?;
            let found = rows.gradients.clone().slice([0..count]);
            if let Some(reason) = difference(found, reference.gradients)? {
                return Ok(Err(reason));
            }
            self.checked = true;
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
            let range = layer.range();
            let start = range.start.max(self.columns.start);
            let end = range.end.min(self.columns.end);
            if start >= end {
                continue;
            }
            parts.push(match rows {
                None => Tensor::zeros([groups, end - start], device),
                Some(rows) if end - start == layer.len() => rows,
                Some(rows) => rows.slice([0..groups, start - range.start..end - range.start]),
            });
        }
        Ok(Rows {
            gradients: Tensor::cat(parts, 1),
            loss: loss.without_autodiff(),
        })
    }
}

/// How rows differ, if they do.
fn difference(found: Tensor<2>, expected: Tensor<2>) -> Result<Option<String>, PruneError> {
    let [_, columns] = expected.dims();
    let (found, expected) = (read(found)?, read(expected)?);
    for (row, (found, expected)) in found
        .chunks(columns)
        .zip(expected.chunks(columns))
        .enumerate()
    {
        let largest = expected
            .iter()
            .fold(0f32, |largest, x| largest.max(x.abs()));
        let distance = found.iter().zip(expected).map(|(x, y)| (x - y).abs());
        let worst = distance.fold(0f32, |worst, x| if x <= worst { worst } else { x });
        // Also true for NaN, which is then reported by whoever collects the rows.
        if worst > TOLERANCE * largest {
            return Ok(Some(format!(
                "row {row} differs by {worst:e} of {largest:e} from that of a plain backward pass: \
                 the model mixes examples, or its loss is not their mean"
            )));
        }
    }
    Ok(None)
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
