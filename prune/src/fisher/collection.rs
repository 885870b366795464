//! One pass over the data that fills a gradient matrix.

use std::ops::Range;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_reparam::reductions;
use tracing::warn;

use crate::fisher::per_example::{GivenUp, PerExample};
use crate::fisher::plain_rows::PlainRows;
use crate::fisher::whole_groups;
use crate::host::{bar, read};
use crate::model::flatten::locate;
use crate::{
    Batch, Fisher, FisherConfig, GradientMatrix, PruneError, Selection,
    fisher::{FisherReport, GradientMethod},
};

/// Examples of one batched backward pass, whose activations are held.
const CHUNK_EXAMPLES: usize = 64;

/// Examples per row from which plain passes are the faster way, by measurement.
const PLAIN_FROM: usize = 8;

/// Takes a part `[rows, columns]` of some rows, with its first column. Rows count from the start of
/// the batch; what nobody puts stays zero.
pub(crate) type Put<'a> =
    &'a mut dyn FnMut(Range<usize>, usize, Tensor<2>) -> Result<(), PruneError>;

/// One pass over the data.
pub(crate) struct Collection<'a, M, B> {
    pub(crate) config: &'a FisherConfig,
    pub(crate) model: &'a M,
    pub(crate) selection: &'a Selection,
    pub(crate) loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
}

impl<M: Module, B: Batch> Collection<'_, M, B> {
    /// Collects n rows; also returns what is left of the last batch. Columns where `free` is zero
    /// get zeros.
    pub(crate) fn run(
        &self,
        batches: impl IntoIterator<Item = B>,
        store: &Device,
        free: Option<Tensor<1>>,
    ) -> Result<(Fisher, Option<B>), PruneError> {
        let start = Instant::now();
        // Gradients at a weight that is no number would put the blame on the data.
        self.selection.finite_weights(self.model)?;
        let (n, m) = (self.config.samples, self.config.batch_size);
        let width = self.selection.layout().len();
        let mut gradients = self.matrix(width, store)?;
        let mut source = Source::new(self);
        let free = free.map(|free| free.reshape([1, width]));
        let bar = bar("gradients", self.config.samples, self.config.progress);
        let most = self.most_rows(width);
        let mut rest = None;
        let mut losses = Vec::new();
        // Examples of the rows from batched passes, in case that a later one refutes them: where the loader has
        // them, not in the memory of a device.
        let mut batched: Vec<(usize, B)> = Vec::new();
        let share = |count: usize| count as f64 / n as f64;
        let mut batches = batches.into_iter();
        while gradients.filled() < n {
            let Some(batch) = batches.next() else {
                return Err(PruneError::LoaderEnded {
                    expected: n,
                    found: gradients.filled(),
                    batch_size: m,
                });
            };
            batch.check()?;
            let given = batch;
            let batch = given.clone().to_device(self.selection.device());
            let examples = batch.examples();
            let groups = whole_groups(examples, m)?.min(n - gradients.filled());
            let used = groups * m;
            rest = (used < examples).then(|| batch.slice(used..examples));
            for first in (0..groups).step_by(most) {
                let count = most.min(groups - first);
                let range = first * m..(first + count) * m;
                let examples = batch.slice(range.clone());
                let loss = self.fill(&mut gradients, count, free.as_ref(), &mut |put| {
                    source.rows(&examples, count, m, put)
                })?;
                losses.push(loss * share(count));
                batched.push((count, given.slice(range)));
                if std::mem::take(&mut source.refuted) {
                    gradients.restart()?;
                    losses.clear();
                    for (count, examples) in batched.drain(..) {
                        let examples = examples.to_device(self.selection.device());
                        let loss = self.fill(&mut gradients, count, free.as_ref(), &mut |put| {
                            source.plain.rows(&examples, m, put)
                        })?;
                        losses.push(loss * share(count));
                    }
                }
                if source.batched.is_none() {
                    batched.clear();
                }
                bar.inc(count as u64);
            }
        }
        bar.finish_and_clear();
        let zero_columns = self.zero_columns(&gradients, free)?;
        self.warn_of_nothing(&zero_columns);
        let report = FisherReport {
            samples: n,
            batch_size: m,
            bytes: gradients.bytes(),
            on_disk: gradients.is_on_disk(),
            loss: f64::from(read(Tensor::cat(losses, 0).sum())?[0]),
            unreached: source.plain.unreached(),
            batched_rows: source.batched_rows,
            fallback: source.fallback,
            zero_columns,
            seconds: start.elapsed().as_secs_f64(),
        };
        Ok((Fisher { gradients, report }, rest))
    }

    /// Without a row: on `store`, or in a file where that is where it goes.
    fn matrix(&self, width: usize, store: &Device) -> Result<GradientMatrix, PruneError> {
        let (n, dtype) = (self.config.samples, self.config.dtype);
        match self.config.folder(width) {
            Some(folder) => {
                let bound = self.config.memory_bound;
                GradientMatrix::in_file(n, width, dtype, store, folder, bound)
            }
            None => GradientMatrix::with_capacity(n, width, dtype, store),
        }
    }

    /// Rows of one pass; of a matrix in a file, those of all parameters in a part of the memory
    /// bound at most.
    fn most_rows(&self, width: usize) -> usize {
        let rows = (CHUNK_EXAMPLES / self.config.batch_size).max(1);
        match self.config.folder(width) {
            Some(_) => {
                let row = GradientMatrix::bytes_needed(1, width, FloatDType::F32);
                rows.min((self.config.memory_bound / 8 / row).max(1))
            }
            None => rows,
        }
    }

    /// Writes `count` rows that `rows` puts; returns what it does, the mean loss.
    fn fill(
        &self,
        gradients: &mut GradientMatrix,
        count: usize,
        free: Option<&Tensor<2>>,
        rows: &mut dyn FnMut(Put<'_>) -> Result<Tensor<1>, PruneError>,
    ) -> Result<Tensor<1>, PruneError> {
        let before = gradients.filled();
        let store = gradients.device();
        let mut sums = RowSums::default();
        let loss = rows(&mut |rows, first, part| {
            let [_, columns] = part.dims();
            let part = match free {
                Some(free) => part * free.clone().slice([0..1, first..first + columns]),
                None => part,
            };
            let part = part.to_device(&store);
            sums.add(rows.clone(), &part, self.config.dtype);
            gradients.write(before + rows.start..before + rows.end, first, part)
        })?;
        for row in sums.suspects()? {
            self.check_finite(before + row, &gradients.row(before + row)?)?;
        }
        gradients.advance(count);
        Ok(loss)
    }

    /// Refuses a row with something else than finite numbers.
    fn check_finite(&self, sample: usize, values: &[f32]) -> Result<(), PruneError> {
        let Some(column) = values.iter().position(|value| !value.is_finite()) else {
            return Ok(());
        };
        let (path, index) = locate(self.selection.layout(), column);
        Err(PruneError::NonFiniteGradient {
            sample,
            path,
            index,
            value: values[column],
        })
    }

    /// Warns where all gradients are zero: every support is as good as any to the objective.
    fn warn_of_nothing(&self, zero_columns: &[(String, usize)]) {
        let zeros: usize = zero_columns.iter().map(|(_, count)| count).sum();
        if zeros == self.selection.layout().len() {
            warn!(
                batch_size = self.config.batch_size,
                "no weight has a gradient in any sample, so that magnitude alone decides: a loss across examples, \
                 as contrastive ones are, needs several of them to a sample (`FisherConfig::with_batch_size`); a \
                 loss that is the same whatever the weights are, as cross entropy over one class, says nothing"
            );
        }
    }

    /// Weights without gradient, but for those that are frozen.
    fn zero_columns(
        &self,
        gradients: &GradientMatrix,
        free: Option<Tensor<2>>,
    ) -> Result<Vec<(String, usize)>, PruneError> {
        let free = free.map(read).transpose()?;
        let is_free = |column: &usize| free.as_ref().is_none_or(|free| free[*column] != 0.0);
        let mut counts: Vec<(String, usize)> = Vec::new();
        for column in gradients.dead_columns()?.into_iter().filter(is_free) {
            let (path, _) = locate(self.selection.layout(), column);
            match counts.last_mut() {
                Some((last, count)) if *last == path => *count += 1,
                _ => counts.push((path, 1)),
            }
        }
        Ok(counts)
    }
}

/// Sums over parts of rows: finite only if all terms are.
#[derive(Default)]
struct RowSums {
    rows: Vec<usize>,
    sums: Vec<Tensor<1>>,
}

impl RowSums {
    /// As it will be stored: half precision may overflow.
    fn add(&mut self, rows: Range<usize>, part: &Tensor<2>, dtype: FloatDType) {
        let stored = match dtype {
            FloatDType::F32 => part.clone(),
            dtype => part.clone().cast(dtype).cast(FloatDType::F32),
        };
        self.sums.push(reductions::row_sums(stored));
        self.rows.extend(rows);
    }

    /// Rows that may have something else than finite numbers, ascending; one read for all sums. Sums
    /// of finite numbers can overflow, too.
    fn suspects(self) -> Result<Vec<usize>, PruneError> {
        if self.sums.is_empty() {
            return Ok(Vec::new());
        }
        let sums = read(Tensor::cat(self.sums, 0))?;
        let rows = self.rows.into_iter().zip(sums);
        let mut suspects: Vec<usize> = rows
            .filter_map(|(row, sum)| (!sum.is_finite()).then_some(row))
            .collect();
        suspects.sort_unstable();
        suspects.dedup();
        Ok(suspects)
    }
}

/// Rows from batched backward passes as long as they work, then from plain ones.
struct Source<'a, M, B> {
    plain: PlainRows<'a, M, B>,
    batched: Option<PerExample<'a, M, B>>,
    batched_rows: usize,
    fallback: Option<String>,
    /// Rows of a batched pass were found to be wrong just now: those of the passes before may be.
    refuted: bool,
}

impl<'a, M: Module, B: Batch> Source<'a, M, B> {
    fn new(collection: &Collection<'a, M, B>) -> Self {
        let Collection {
            config,
            model,
            selection,
            loss,
        } = collection;
        Self {
            plain: PlainRows::new(*model, selection, *loss),
            batched: match config.method {
                GradientMethod::Automatic => config.batch_size < PLAIN_FROM,
                GradientMethod::Batched => true,
                GradientMethod::Plain => false,
            }
            .then(|| PerExample::new(*model, selection, *loss)),
            batched_rows: 0,
            fallback: None,
            refuted: false,
        }
    }

    /// Puts `count` rows; returns the mean loss, `[1]`.
    fn rows(
        &mut self,
        batch: &B,
        count: usize,
        batch_size: usize,
        put: Put<'_>,
    ) -> Result<Tensor<1>, PruneError> {
        if let Some(batched) = &mut self.batched {
            match batched.rows(batch, batch_size, &mut self.plain, put)? {
                Ok(loss) => {
                    self.batched_rows += count;
                    return Ok(loss);
                }
                Err(GivenUp { reason, refuted }) => {
                    tracing::info!(reason, "gradients by plain backward passes");
                    self.fallback = Some(reason);
                    self.batched = None;
                    self.refuted = refuted;
                    if refuted {
                        self.batched_rows = 0;
                    }
                }
            }
        }
        self.plain.rows(batch, batch_size, put)
    }
}
