//! One pass over the data that fills a gradient matrix.

use std::ops::Range;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::evaluation::gradient_model;
use crate::gradient_matrix::read;
use crate::per_example::PerExample;
use crate::plain_rows::PlainRows;
use crate::{
    Batch, Fisher, FisherConfig, FisherReport, GradientMatrix, GradientMethod, PruneError,
    Selection,
};

/// Bytes of gradients that are held beside the matrix while they are checked. Allocators keep
/// blocks of this size, and give larger ones back to the system each time.
const CHUNK_BYTES: usize = 16 << 20;
/// Examples of one batched backward pass, whose activations are held.
const CHUNK_EXAMPLES: usize = 256;

/// Some rows of G, on the device of the model.
pub(crate) struct Rows {
    /// Parts `[r, columns]` of them, each with its first column; the others are zero.
    pub(crate) parts: Vec<(usize, Tensor<2>)>,
    /// Mean loss of the examples, `[1]`.
    pub(crate) loss: Tensor<1>,
}

/// One pass over the data.
pub(crate) struct Collection<'a, M, B> {
    pub(crate) config: &'a FisherConfig,
    pub(crate) model: &'a M,
    pub(crate) selection: &'a Selection,
    pub(crate) loss: &'a dyn Fn(&M, &B) -> Tensor<1>,
    pub(crate) columns: Range<usize>,
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
        let (n, m) = (self.config.samples, self.config.batch_size);
        let width = self.columns.len();
        let mut gradients = GradientMatrix::with_capacity(n, width, self.config.dtype, store)?;
        let mut source = Source::new(self);
        let free = free.map(|free| free.slice([self.columns.clone()]).reshape([1, width]));
        let bar = self.bar();
        let most = (CHUNK_BYTES / (4 * width))
            .min(CHUNK_EXAMPLES / m)
            .clamp(1, n);
        let mut skipped = 0;
        let mut rest = None;
        let mut losses: Option<Tensor<1>> = None;
        let mut batches = batches.into_iter();
        while gradients.filled() < n {
            let Some(batch) = batches.next() else {
                return Err(PruneError::LoaderEnded {
                    expected: n,
                    found: gradients.filled(),
                    batch_size: m,
                });
            };
            let batch = batch.to_device(self.selection.device());
            let examples = batch.examples();
            if examples < m {
                return Err(PruneError::SmallBatch {
                    examples,
                    batch_size: m,
                });
            }
            let groups = (examples / m).min(n - gradients.filled());
            let used = groups * m;
            rest = (used < examples).then(|| batch.slice(used..examples));
            skipped += if groups == examples / m {
                examples - used
            } else {
                0
            };
            for first in (0..groups).step_by(most) {
                let count = most.min(groups - first);
                let rows = source.rows(&batch.slice(first * m..(first + count) * m), count, m)?;
                let parts = match &free {
                    Some(free) => mask(rows.parts, free),
                    None => rows.parts,
                };
                self.check_finite(&parts, gradients.filled())?;
                let parts = parts.into_iter();
                gradients.push_parts(
                    count,
                    parts
                        .map(|(first, part)| (first, part.to_device(store)))
                        .collect(),
                )?;
                let loss = rows.loss * (count as f64 / n as f64);
                losses = Some(match losses {
                    Some(sum) => sum + loss,
                    None => loss,
                });
                bar.inc(count as u64);
            }
        }
        bar.finish_and_clear();
        let report = FisherReport {
            samples: n,
            batch_size: m,
            bytes: gradients.bytes(),
            loss: match losses {
                Some(sum) => f64::from(read(sum)?[0]),
                None => 0.0,
            },
            unreached: source.plain.unreached(),
            batched_rows: source.batched_rows,
            fallback: source.fallback,
            zero_columns: self.zero_columns(&gradients, free)?,
            skipped_examples: skipped,
            seconds: start.elapsed().as_secs_f64(),
        };
        Ok((Fisher { gradients, report }, rest))
    }

    fn bar(&self) -> ProgressBar {
        let target = match self.config.progress {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let style = ProgressStyle::with_template("{prefix:>22} {wide_bar} {pos}/{len} {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::with_draw_target(Some(self.config.samples as u64), target)
            .with_style(style)
            .with_prefix("gradients")
    }

    /// One read per chunk of rows; also catches what half storage cannot hold.
    fn check_finite(&self, parts: &[(usize, Tensor<2>)], before: usize) -> Result<(), PruneError> {
        let stored = |part: &Tensor<2>| match self.config.dtype {
            FloatDType::F32 => part.clone(),
            dtype => part.clone().cast(dtype).cast(FloatDType::F32),
        };
        // A sum is finite only if its terms are. It may also overflow: the row is looked at then.
        let flags = parts.iter().map(|(_, part)| stored(part).sum_dim(1));
        let Some(flags) = flags.reduce(|sum, flags| sum + flags) else {
            return Ok(());
        };
        let flags = read(flags)?;
        for (row, _) in flags.iter().enumerate().filter(|(_, x)| !x.is_finite()) {
            for (first, part) in parts {
                let values = read(stored(part).slice([row..row + 1]))?;
                if let Some(column) = values.iter().position(|value| !value.is_finite()) {
                    let (path, index) = self.locate(first + column);
                    return Err(PruneError::NonFiniteGradient {
                        sample: before + row,
                        path,
                        index,
                        value: values[column],
                    });
                }
            }
        }
        Ok(())
    }

    /// Path of the parameter that holds a column, and the element of it.
    fn locate(&self, column: usize) -> (String, usize) {
        let index = self.columns.start + column;
        match self.selection.layout().layer_at(index) {
            Some(layer) => (layer.path.clone(), index - layer.offset),
            None => (String::new(), index),
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
            let (path, _) = self.locate(column);
            match counts.last_mut() {
                Some((last, count)) if *last == path => *count += 1,
                _ => counts.push((path, 1)),
            }
        }
        Ok(counts)
    }
}

/// Zeros in the columns where `free` `[1, columns]` has them.
fn mask(parts: Vec<(usize, Tensor<2>)>, free: &Tensor<2>) -> Vec<(usize, Tensor<2>)> {
    let masked = parts.into_iter().map(|(first, part)| {
        let width = part.dims()[1];
        (
            first,
            part * free.clone().slice([0..1, first..first + width]),
        )
    });
    masked.collect()
}

/// Rows from batched backward passes as long as they work, then from plain ones.
struct Source<'a, M, B> {
    plain: PlainRows<'a, M, B>,
    batched: Option<PerExample<'a, M, B>>,
    batched_rows: usize,
    fallback: Option<String>,
}

impl<'a, M: Module, B: Batch> Source<'a, M, B> {
    fn new(collection: &Collection<'a, M, B>) -> Self {
        let Collection {
            config,
            model,
            selection,
            loss,
            columns,
        } = collection;
        let model_with_gradients = gradient_model(*model, selection, columns);
        Self {
            plain: PlainRows::new(model_with_gradients, selection, columns.clone(), *loss),
            batched: match config.method {
                GradientMethod::Batched => {
                    Some(PerExample::new(*model, selection, columns.clone(), *loss))
                }
                GradientMethod::Plain => None,
            },
            batched_rows: 0,
            fallback: None,
        }
    }

    fn rows(&mut self, batch: &B, count: usize, batch_size: usize) -> Result<Rows, PruneError> {
        if let Some(batched) = &mut self.batched {
            match batched.rows(batch, batch_size, &mut self.plain)? {
                Ok(rows) => {
                    self.batched_rows += count;
                    return Ok(rows);
                }
                Err(reason) => {
                    tracing::info!(reason, "gradients by plain backward passes");
                    self.fallback = Some(reason);
                    self.batched = None;
                }
            }
        }
        self.plain.rows(batch, batch_size)
    }
}
