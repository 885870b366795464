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

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{DType, Tensor};
use burn_lean_graph::hooks::keeping_stops;
use burn_lean_graph::{AsRecorded, GraphError};
use burn_lean_reparam::each_float;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::fisher::collection::Put;
use crate::fisher::factors::Factors;
use crate::fisher::finder::uses;
use crate::fisher::plain_rows::PlainRows;
use crate::fisher::taps::Taps;
use crate::host::{in_host_memory, read_all};
use crate::model::checks::check_number;
use crate::model::recorded::record_loss;
use crate::{Batch, PruneError, Selection};

/// Rows of the first pass that are compared with plain backward passes, at most.
const FIRST_CHECKED: usize = 8;
/// Rows of each later pass that are.
const CHECKED: usize = 2;
/// Largest distance of a layer's part of a checked row from the plain one, as a fraction of its length.
const TOLERANCE: f64 = 1e-3;
/// The same as a fraction of the root mean square of the lengths of that part over all checked rows:
/// where the model is certain of an example, its gradient is little more than the rounding of a
/// probability near 1.
const ROUNDING: f64 = 1e-4;
/// The same for whole rows: where large gradients cancel each other, their rounding is what is left.
const CANCELLATION: f64 = 1e-4;
/// Bytes of the part of some rows that is made at once on a GPU.
const DEVICE_PART_BYTES: usize = 64 << 20;
/// The same in the host's memory: it should stay in a processor's cache until it is written.
const HOST_PART_BYTES: usize = 1 << 20;

/// Batched backward passes.
pub(crate) struct PerExample<'a, M, B> {
    /// In evaluation mode, without autodiff.
    model: M,
    selection: &'a Selection,
    loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
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
        loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    ) -> Self {
        Self {
            lengths: Lengths::new(model, selection),
            model: model.valid(),
            selection,
            loss,
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
        let pass = match self.pass(batch, batch_size) {
            Ok(pass) => pass,
            Err(reason) => return Ok(Err(reason.into())),
        };
        for row in self.rows_to_check(pass.groups) {
            let examples = batch.slice(row * batch_size..(row + 1) * batch_size);
            let expected = self.row(|put| {
                plain.rows(&examples, batch_size, put)?;
                Ok(())
            })?;
            let found = self.row(|put| self.put(&pass, row..row + 1, put))?;
            if let Some(reason) = self.lengths.difference(row, &found, &expected) {
                return Ok(Err(GivenUp {
                    reason,
                    refuted: true,
                }));
            }
        }
        self.put(&pass, 0..pass.groups, put)?;
        Ok(Ok(pass.loss))
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
    fn pass(&self, batch: &B, batch_size: usize) -> Result<Pass, String> {
        let of_graph = |error: GraphError| error.to_string();
        let recording = keeping_stops(|| record_loss(&self.model, self.loss, batch));
        let recording = recording.map_err(of_graph)?;
        if recording.graph().nodes().any(|node| node.is_random()) {
            return Err("the loss draws random numbers, others in each pass".into());
        }
        let uses = uses(recording.graph(), self.selection, batch.examples())?;
        let mut taps = Taps::of(uses);
        let loss = recording.execute_observed(&self.model, &(), &AsRecorded, &mut taps);
        let loss = loss.map_err(of_graph)?;
        check_number(&loss).map_err(|error| error.to_string())?;
        let groups = batch.examples() / batch_size;
        // Whether a loss may depend on no weight is decided by the plain rows that these are
        // compared with.
        let factors = match loss.is_tracked() {
            true => taps.factors(loss.clone().mul_scalar(groups as f64), groups),
            false => Vec::new(),
        };
        let mut layers: Vec<Vec<Factors>> = Vec::new();
        layers.resize_with(self.selection.ids().len(), Vec::new);
        for factors in factors {
            layers[factors.layer].push(factors);
        }
        Ok(Pass {
            layers: layers.into_iter().map(Factors::joined).collect(),
            groups,
            loss: loss.without_autodiff(),
        })
    }

    /// Puts some rows, a few at a time.
    fn put(&self, pass: &Pass, rows: Range<usize>, put: Put<'_>) -> Result<(), PruneError> {
        let layers = self.selection.layout().layers();
        let bytes = match in_host_memory(self.selection.device()) {
            true => HOST_PART_BYTES,
            false => DEVICE_PART_BYTES,
        };
        for (layer, factors) in layers.iter().zip(&pass.layers) {
            let step = (bytes / (4 * layer.len().max(1))).max(1);
            for first in rows.clone().step_by(step) {
                let part = first..rows.end.min(first + step);
                let sums = factors.iter().map(|one| one.rows(part.clone()));
                let Some(sum) = sums.reduce(|sum, other| sum + other) else {
                    break;
                };
                put(part, layer.offset, sum)?;
            }
        }
        Ok(())
    }

    /// The one row that `fill` puts, `[p]`; one read for all of its parts.
    fn row(
        &self,
        fill: impl FnOnce(Put<'_>) -> Result<(), PruneError>,
    ) -> Result<Vec<f32>, PruneError> {
        let (mut firsts, mut parts) = (Vec::new(), Vec::new());
        fill(&mut |_, first, part| {
            firsts.push(first);
            parts.push(part.without_autodiff());
            Ok(())
        })?;
        let mut row = vec![0.0; self.selection.layout().len()];
        for (first, part) in firsts.into_iter().zip(read_all(parts)?) {
            row[first..first + part.len()].copy_from_slice(&part);
        }
        Ok(row)
    }
}

/// Lengths of the plain rows that others were compared with, layer by layer.
struct Lengths {
    parts: Vec<Part>,
    rows: usize,
}

/// The part of rows that belongs to one layer.
struct Part {
    path: String,
    columns: Range<usize>,
    /// What a plain gradient may be off by because its dtype is narrower than F32, as a fraction.
    rounding: f64,
    /// Sum over the rows.
    squares: f64,
}

impl Lengths {
    fn new<M: Module>(model: &M, selection: &Selection) -> Self {
        let layers = selection.layout().layers();
        let positions = selection.positions();
        // What gradients of single parameters may be off by, as a fraction: some roundings.
        let mut roundings = vec![0.0; layers.len()];
        each_float(model, |_, float| {
            if let Some(position) = positions.get(&float.id()) {
                roundings[*position] = match float.dtype() {
                    DType::F16 => 2.0 / 2048.0,
                    DType::BF16 => 2.0 / 256.0,
                    _ => 0.0,
                };
            }
        });
        let parts = layers.iter().zip(roundings);
        let parts = parts.map(|(layer, rounding)| Part {
            path: layer.path.clone(),
            columns: layer.range(),
            rounding,
            squares: 0.0,
        });
        Self {
            parts: parts.collect(),
            rows: 0,
        }
    }

    /// How the row that was `found` differs from the `expected` one, if it does.
    fn difference(&mut self, row: usize, found: &[f32], expected: &[f32]) -> Option<String> {
        self.rows += 1;
        let mut compared = Vec::new();
        for (index, part) in self.parts.iter_mut().enumerate() {
            let found = &found[part.columns.clone()];
            let expected = &expected[part.columns.clone()];
            let squares = |values: &mut dyn Iterator<Item = f32>| {
                values.map(|x| f64::from(x).powi(2)).sum::<f64>()
            };
            let is_finite = |row: &[f32]| row.iter().all(|x| x.is_finite());
            match (is_finite(found), is_finite(expected)) {
                (true, true) => {}
                // Whoever collects the rows reports it.
                (false, false) => continue,
                _ => {
                    return Some(format!(
                        "row {row} of a batch and that of a plain backward pass are not both finite in \
                         `{}`: the model mixes examples, or its loss is not their mean",
                        part.path
                    ));
                }
            }
            let distance = squares(&mut found.iter().zip(expected).map(|(x, y)| x - y)).sqrt();
            let square = squares(&mut expected.iter().copied());
            part.squares += square;
            compared.push((index, distance, square.sqrt()));
        }
        let rows = self.rows as f64;
        let whole = self.parts.iter().map(|part| part.squares).sum::<f64>();
        let whole = (whole / rows).sqrt();
        compared.into_iter().find_map(|(index, distance, length)| {
            let part = &self.parts[index];
            let typical = (part.squares / rows).sqrt();
            let most = (TOLERANCE + part.rounding) * length
                + ROUNDING * typical
                + (CANCELLATION + part.rounding) * whole;
            (distance > most).then(|| {
                format!(
                    "row {row} of a batch is {distance:e} from that of a plain backward pass in `{}`, of \
                     length {length:e}: the model mixes examples, or its loss is not their mean",
                    part.path
                )
            })
        })
    }
}

/// What the rows of one pass are made from.
struct Pass {
    /// Per parameter of the layout.
    layers: Vec<Vec<Factors>>,
    /// Rows.
    groups: usize,
    /// Mean loss, `[1]`.
    loss: Tensor<1>,
}
