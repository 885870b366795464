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
//! is checked in every pass, on some rows at random, against plain backward passes: a mean over the
//! tokens of a batch, say, is one over its examples only where all of them are equally long.

use std::collections::HashMap;
use std::ops::Range;

use burn::backend::ir::{OperationIr, TensorId};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_lean_reparam::{FloatVisitor, visit_plain_floats};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::fisher::collection::Put;
use crate::fisher::executor::{Observer, Tensors, execute};
use crate::fisher::gradient_matrix::{in_host_memory, read};
use crate::fisher::plain_rows::{PlainRows, check_number};
use crate::fisher::product::{Product, Products};
use crate::fisher::trace::Trace;
use crate::{Batch, PruneError, Selection};

/// Rows of the first pass that are compared with plain backward passes, at most.
const FIRST_CHECKED: usize = 8;
/// Rows of each later pass that are.
const CHECKED: usize = 2;
/// Largest distance of a checked row from the plain one, as a fraction of its length.
const TOLERANCE: f64 = 1e-3;
/// The same as a fraction of the root mean square of the lengths of all checked rows: where the model
/// is certain of an example, its gradient is little more than the rounding of a probability near 1.
const ROUNDING: f64 = 1e-4;
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
    lengths: Lengths,
    /// Whether rows of a pass with several of them were compared.
    compared_together: bool,
    /// Chooses the rows to compare.
    random: StdRng,
}

/// Why there are no rows.
pub(crate) struct GivenUp {
    pub(crate) reason: String,
    /// Rows differ from plain ones: those of the passes before may, too.
    pub(crate) refuted: bool,
}

impl From<String> for GivenUp {
    fn from(reason: String) -> Self {
        Self {
            reason,
            refuted: false,
        }
    }
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
            lengths: Lengths::default(),
            compared_together: false,
            random: StdRng::seed_from_u64(0),
        }
    }

    /// Puts the rows of a batch and returns its mean loss, or the reason why it cannot; some of them
    /// are compared with those of `plain`.
    pub(crate) fn rows(
        &mut self,
        batch: &B,
        batch_size: usize,
        plain: &mut PlainRows<'a, M, B>,
        put: Put<'_>,
    ) -> Result<Result<Tensor<1>, GivenUp>, PruneError> {
        let uses = match self.uses(batch, batch_size) {
            Ok(uses) => uses,
            Err(reason) => return Ok(Err(reason.into())),
        };
        for row in self.rows_to_check(uses.groups) {
            let examples = batch.slice(row * batch_size..(row + 1) * batch_size);
            let expected = self.row(|put| {
                plain.rows(&examples, batch_size, put)?;
                Ok(())
            })?;
            let found = self.row(|put| self.put(&uses, row..row + 1, put))?;
            if let Some(reason) = self.lengths.difference(row, &found, &expected) {
                return Ok(Err(GivenUp {
                    reason,
                    refuted: true,
                }));
            }
        }
        self.put(&uses, 0..uses.groups, put)?;
        Ok(Ok(uses.loss))
    }

    /// Some of the rows of a pass. One that is alone has none to mix with: it is compared once, and
    /// says nothing about two of them.
    fn rows_to_check(&mut self, rows: usize) -> Vec<usize> {
        let most = match (rows, self.compared_together) {
            (1, _) if self.lengths.rows > 0 => 0,
            (_, true) => CHECKED,
            (_, false) => FIRST_CHECKED,
        };
        self.compared_together |= rows > 1;
        let chosen = rand::seq::index::sample(&mut self.random, rows, most.min(rows));
        chosen.into_vec()
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

    /// The one row that `fill` puts, `[columns]`.
    fn row(
        &self,
        fill: impl FnOnce(Put<'_>) -> Result<(), PruneError>,
    ) -> Result<Vec<f32>, PruneError> {
        let mut row = vec![0.0; self.columns.len()];
        fill(&mut |_, first, part| {
            let [_, width] = part.dims();
            row[first..first + width].copy_from_slice(&read(part)?);
            Ok(())
        })?;
        Ok(row)
    }
}

/// Lengths of the plain rows that others were compared with.
#[derive(Default)]
struct Lengths {
    rows: usize,
    squares: f64,
}

impl Lengths {
    /// How the row that was `found` differs from the `expected` one, if it does.
    fn difference(&mut self, row: usize, found: &[f32], expected: &[f32]) -> Option<String> {
        // A NaN is no difference: whoever collects the rows reports it.
        let squares = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|x| f64::from(x).powi(2)).sum::<f64>()
        };
        let distance = squares(&mut found.iter().zip(expected).map(|(x, y)| x - y)).sqrt();
        let square = squares(&mut expected.iter().copied());
        self.rows += 1;
        self.squares += square;
        let typical = (self.squares / self.rows as f64).sqrt();
        let length = square.sqrt();
        (distance > TOLERANCE * length + ROUNDING * typical).then(|| {
            format!(
                "row {row} of a batch is {distance:e} from that of a plain backward pass, of \
                 length {length:e}: the model mixes examples, or its loss is not their mean"
            )
        })
    }
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
