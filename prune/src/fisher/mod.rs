//! Empirical Fisher: the gradients of n Fisher samples as the rows of one matrix.
//!
//! Row i is the gradient of the mean loss over the m examples of Fisher sample i, with their true
//! labels, at the trained weights, in evaluation mode: dropout is off and BatchNorm uses its
//! running statistics, as the deployed model does. GᵀG/n `[p, p]` is never formed.

pub(crate) mod collection;
pub(crate) mod factors;
pub(crate) mod finder;
pub(crate) mod gradient_matrix;
pub(crate) mod kernel_rows;
pub(crate) mod per_example;
pub(crate) mod plain_rows;
pub(crate) mod taps;
pub(crate) mod uses;
pub(crate) mod view;

pub use gradient_matrix::GradientMatrix;

use std::path::{Path, PathBuf};

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use crate::fisher::collection::Collection;
use crate::model::checks::accept;
use crate::{Batch, PruneError, Selection};

/// How the gradient matrix is collected.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{FisherConfig, Selection};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
/// let selection = Selection::of(&model, None)?;
/// let x = Tensor::<2>::from_floats([[1., 2.], [3., 4.]], &device);
/// // The loss is the output itself, so the gradient of example i is x_i.
/// let fisher = FisherConfig::new(2).collect(&model, &selection, |model, x: &Tensor<2>| {
///     model.forward(x.clone()).mean()
/// }, [x])?;
/// assert_eq!(fisher.report.bytes, 2 * 2 * 4);
/// let row = fisher.gradients.row(1)?;
/// assert_eq!(row, [3., 4.]);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Config, Debug)]
pub struct FisherConfig {
    /// Fisher samples n: rows of the gradient matrix. At least 1.
    pub samples: usize,
    /// Fisher batch size m: examples that are averaged into one row. At least 1. Default 1.
    #[config(default = 1)]
    pub batch_size: usize,
    /// Storage of the gradients: F32, or F16/BF16 for half the memory. Default F32.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
    /// Bytes that the gradient matrix may use in memory; default 8 GiB. More is refused before any
    /// gradient is computed, or goes to [`on_disk`](Self::on_disk).
    #[config(default = "8 << 30")]
    pub memory_bound: usize,
    /// A folder for a matrix beyond the memory bound, on a disk (that for temporary files may lie in
    /// memory): a file there without a name, of [`bytes_needed`](Self::bytes_needed), from which the
    /// solver reads some columns at a time. It holds columns that it needs again while they take at
    /// most half of the bound. The file is gone with the matrix, or with the process. Default: none,
    /// such a matrix is refused.
    #[config(default = "None")]
    pub on_disk: Option<PathBuf>,
    /// How the rows are computed. Default: whichever way is mostly faster for this m.
    #[config(default = "GradientMethod::Automatic")]
    pub method: GradientMethod,
    /// Show a progress bar, where standard error is a terminal. Default: yes.
    #[config(default = true)]
    pub progress: bool,
}

/// How gradients of single examples (or of groups of m) are computed.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GradientMethod {
    /// Batched where m is below 8, plain from there on: a pass over m examples uses a processor
    /// well then, and the gradients of single examples would only be summed up again. By m alone, so
    /// that the same collection has the same rows to the bit each time, which a measurement would not
    /// give; where one way is known to be faster, name it. Of a network of two convolutions single rows
    /// were a sixth slower batched on ndarray, a fifth on a software GPU.
    Automatic,
    /// All rows of a loader's batch from one backward pass, where the model consists of operations
    /// for which that is known. Some rows of every pass, at random, are compared with plain passes;
    /// where one differs, all rows of the collection are taken by plain passes, for which the
    /// examples are kept until its end.
    Batched,
    /// One backward pass per row: works for every model.
    Plain,
}

/// The gradient matrix, and how it came about.
#[derive(Debug, Clone)]
pub struct Fisher {
    /// G `[n, p]`.
    pub gradients: GradientMatrix,
    /// What was noticed on the way.
    pub report: FisherReport,
}

/// How a gradient matrix came about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FisherReport {
    /// Fisher samples n.
    pub samples: usize,
    /// Examples m per Fisher sample.
    pub batch_size: usize,
    /// Bytes of the matrix.
    pub bytes: usize,
    /// Whether they are in a file.
    #[serde(default)]
    pub on_disk: bool,
    /// Mean loss over the examples.
    #[serde(with = "burn_lean_reparam::json::float")]
    pub loss: f64,
    /// Rows that came from a backward pass over many examples; the others had one each.
    pub batched_rows: usize,
    /// Why plain backward passes were used although batched ones were asked for: an operation that
    /// is not known, random numbers in the loss, or a row that differs from that of a plain pass.
    pub fallback: Option<String>,
    /// Parameters that the loss does not depend on: no backward pass reached them. Their columns
    /// are zero.
    pub unreached: Vec<String>,
    /// Per parameter with any: its path, and how many of its weights have a gradient of zero in
    /// every sample, not counting those that were pruned before. They are pruned first, at no cost
    /// to the objective's fit.
    pub zero_columns: Vec<(String, usize)>,
    /// Wall-clock time, in seconds.
    pub seconds: f64,
}

impl FisherReport {
    /// One warning of all parameters that the loss does not depend on, where there are any.
    pub(crate) fn warn_of_unreached(&self) {
        if !self.unreached.is_empty() {
            tracing::warn!(
                "the loss does not depend on {}, so that zeros there cost nothing: a parameter group leaves \
                 parameters out",
                self.unreached.join(", ")
            );
        }
    }
}

impl FisherConfig {
    /// Bytes that the gradient matrix of the selection needs.
    pub fn bytes_needed(&self, selection: &Selection) -> usize {
        self.bytes_of(selection.layout().len())
    }

    /// Bytes of a matrix with so many columns.
    pub(crate) fn bytes_of(&self, columns: usize) -> usize {
        GradientMatrix::bytes_needed(self.samples, columns, self.dtype)
    }

    /// The folder of a matrix with so many columns, where it goes to a file.
    pub(crate) fn folder(&self, columns: usize) -> Option<&Path> {
        let is_beyond = self.bytes_of(columns) > self.memory_bound;
        let folder = self.on_disk.as_deref();
        folder.filter(|_| is_beyond)
    }

    /// Collects n rows from `batches`, on the device of the model.
    ///
    /// `loss` gets the model in evaluation mode and some examples, and returns their *mean* loss.
    /// How many examples a batch holds does not matter to the result, but each Fisher sample of m
    /// examples is taken from one batch. No more batches are drawn than needed. The same batches
    /// give the same matrix, unless the loss draws random numbers.
    ///
    /// # Errors
    ///
    /// - [`PruneError::NoSamples`], [`PruneError::InvalidConfig`]: n or m is 0.
    /// - [`PruneError::MemoryBound`]: the matrix is too large, and has no folder
    ///   ([`on_disk`](Self::on_disk)).
    /// - [`PruneError::Io`]: with the folder, where a matrix on disk cannot be written or read, the
    ///   disk is full for example.
    /// - [`PruneError::LoaderEnded`]: fewer than n Fisher samples came.
    /// - [`PruneError::SmallBatch`]: a batch of the loader has fewer than m examples.
    /// - [`PruneError::NonFiniteWeight`]: a prunable weight is NaN or infinite.
    /// - [`PruneError::NonFiniteGradient`]: with the path of the parameter and the sample.
    /// - [`PruneError::Loss`]: the loss is no single number, or depends on no prunable parameter.
    pub fn collect<M: Module, B: Batch>(
        &self,
        model: &M,
        selection: &Selection,
        loss: impl Fn(&M, &B) -> Tensor<1>,
        batches: impl IntoIterator<Item = B>,
    ) -> Result<Fisher, PruneError> {
        let (fisher, _) = self.collect_free(model, selection, &loss, batches, None)?;
        fisher.report.warn_of_unreached();
        Ok(fisher)
    }

    /// The same with the gradients of frozen weights (0 in `free`) set to zero, and without a word on
    /// parameters that the loss does not depend on; also returns what is left of the last batch.
    pub(crate) fn collect_free<M: Module, B: Batch>(
        &self,
        model: &M,
        selection: &Selection,
        loss: &dyn Fn(&M, &B) -> Tensor<1>,
        batches: impl IntoIterator<Item = B>,
        free: Option<Tensor<1>>,
    ) -> Result<(Fisher, Option<B>), PruneError> {
        self.check(selection)?;
        let collection = Collection {
            config: self,
            model,
            selection,
            loss,
        };
        collection.run(batches, selection.device(), free)
    }

    /// Refuses no samples, and a matrix that exceeds the memory bound.
    pub(crate) fn check(&self, selection: &Selection) -> Result<(), PruneError> {
        if self.samples == 0 {
            return Err(PruneError::NoSamples);
        }
        accept(self.batch_size > 0, "batch_size", 0, "at least 1")?;
        let columns = selection.layout().len();
        // Of a file, a column at a time is the least that is read.
        let columns = self.folder(columns).map_or(columns, |_| 1);
        let needed = self.bytes_of(columns);
        match needed > self.memory_bound {
            false => Ok(()),
            true => Err(PruneError::MemoryBound {
                samples: self.samples,
                parameters: columns,
                dtype: self.dtype,
                needed,
                bound: self.memory_bound,
            }),
        }
    }
}

/// Fisher samples of a batch; one that has not enough for any would be passed over for ever.
fn whole_groups(examples: usize, batch_size: usize) -> Result<usize, PruneError> {
    match examples / batch_size {
        0 => Err(PruneError::SmallBatch {
            examples,
            batch_size,
        }),
        groups => Ok(groups),
    }
}
