//! What can go wrong, with what to do about it.

mod sources;

use burn::tensor::{DType, FloatDType};
use burn_lean_graph::GraphError;
use burn_lean_layerwise::LayerwiseError;
use burn_lean_reparam::AttachError;

use crate::model::{SelectedParameter, largest};
use crate::sparse::RecordFault;

/// Every error of this crate.
///
/// Functions that consume a model return it inside a [`Rejected`](burn_lean_reparam::Rejected); `?` converts that into a
/// `PruneError` where the model is not needed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PruneError {
    /// There is nothing to prune.
    #[error(
        "there is no prunable parameter: the selection matches none, or the model has no weight \
         of a linear, convolution or embedding layer"
    )]
    NoPrunableParameter,
    /// Each parameter of the model is excluded.
    #[error("no parameter can be pruned: {}; a `ParamGroup` names weights of layers of your own \
             (`Pruner::group`)", largest(.parameters))]
    AllExcluded {
        /// All, with the reason for each.
        parameters: Vec<SelectedParameter>,
    },
    /// What could be pruned holds integers already.
    #[error(
        "`{path}` is quantized, and so is all that could be pruned: prune before the conversion; zeros \
         stay zeros in symmetric codes"
    )]
    Quantized {
        /// Path of the first such parameter.
        path: String,
    },
    /// There are no Fisher samples, or no batches to calibrate or to judge by.
    #[error(
        "no example was given: give a batch with at least one, and a gradient matrix at least one Fisher \
         sample"
    )]
    NoSamples,
    /// The sparsity is not a fraction in [0, 1).
    #[error(
        "sparsity is {sparsity}, but must be a fraction of zeros in [0, 1){}",
        if *.sparsity > 1.0 && *.sparsity <= 100.0 { "; percent are divided by 100" } else { "" }
    )]
    Sparsity {
        /// What was asked for.
        sparsity: f64,
    },
    /// The number of weights to keep leaves none, or all.
    #[error(
        "k = {k} of {parameters} weights would be kept{}, but pruning needs 0 < k < {parameters}",
        .path.as_ref().map(|path| format!(" in `{path}`")).unwrap_or_default()
    )]
    KeptCount {
        /// Weights to keep.
        k: usize,
        /// Weights there are.
        parameters: usize,
        /// The parameter, where the budget is one per layer.
        path: Option<String>,
    },
    /// A number of a config is out of its range.
    #[error("{field} is {value}, but must be {expected}")]
    InvalidConfig {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// A gradient is NaN or infinite.
    #[error(
        "the gradient of sample {sample} is {value} at element {index} of `{path}`: look at that \
         sample, or at the loss (a logarithm of 0, an overflow in half precision)"
    )]
    NonFiniteGradient {
        /// Row of the gradient matrix.
        sample: usize,
        /// Path of the parameter.
        path: String,
        /// Element of that parameter, in row-major order.
        index: usize,
        /// What was found.
        value: f32,
    },
    /// A dense weight is NaN or infinite.
    #[error(
        "element {index} of `{path}` is {value}: the model is already broken, prune an earlier record"
    )]
    NonFiniteWeight {
        /// Path of the parameter.
        path: String,
        /// Element of that parameter, in row-major order.
        index: usize,
        /// What was found.
        value: f32,
    },
    /// The gradients are finite, but too large to multiply.
    #[error(
        "the gradients of sample {sample} times the dense weights overflow F32: scale the loss down"
    )]
    Overflow {
        /// Row of the gradient matrix.
        sample: usize,
    },
    /// The values of the kept weights are NaN or infinite, though the problem is finite.
    #[error(
        "the values of {count} kept weights overflow: gradients or dense weights are too large; scale the \
         loss down, or raise the ridge"
    )]
    NonFiniteSolution {
        /// How many.
        count: usize,
    },
    /// Sizes that belong together differ.
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch {
        /// What was compared, for example `weights per gradient`.
        what: &'static str,
        /// The size that the rest has.
        expected: usize,
        /// The size that was given.
        found: usize,
    },
    /// The grid of a layer does not fit it.
    #[error("the grid of `{path}`: {reason}")]
    LayerGrid {
        /// Path of the parameter.
        path: String,
        /// What does not fit.
        reason: String,
    },
    /// Fewer rows were pushed than the gradient matrix was made for.
    #[error(
        "the gradient matrix has {found} of {expected} rows: the loader ended early. Give it more \
         batches or ask for fewer Fisher samples"
    )]
    IncompleteGradients {
        /// Rows it was made for.
        expected: usize,
        /// Rows it has.
        found: usize,
    },
    /// The gradient matrix would not fit.
    #[error(
        "the gradient matrix [{samples}, {parameters}] in {dtype:?} needs {needed} bytes, the bound \
         is {bound}: fewer Fisher samples, half storage, a file (`on_disk`), or a group of fewer \
         parameters"
    )]
    MemoryBound {
        /// Fisher samples n.
        samples: usize,
        /// Weights p.
        parameters: usize,
        /// Storage dtype.
        dtype: FloatDType,
        /// Bytes it needs.
        needed: usize,
        /// Bytes it may use.
        bound: usize,
    },
    /// The linear system of a search would not fit.
    #[error(
        "the linear system has {unknowns} unknowns, of which there are as many as samples or \
         weights, and needs {needed} bytes on the host, the bound is {bound}: fewer samples, or a \
         `block_size`, whose systems grow with neither"
    )]
    SystemSize {
        /// Its rows: samples that the search looks at, or kept weights.
        unknowns: usize,
        /// Bytes of the system and its factor.
        needed: usize,
        /// Bytes they may use.
        bound: usize,
    },
    /// Zeros in a base would not be zeros in the effective value.
    #[error(
        "`{path}` carries the reparameterization `{name}`, which makes nonzero weights of zeros: \
         fold it in with `Module::materialize` before pruning"
    )]
    Reparameterized {
        /// Path of the parameter.
        path: String,
        /// Name of the reparameterization.
        name: String,
    },
    /// The model is not the one that parameters were selected from.
    #[error(
        "the model has not all of the parameters that were selected: {}. Select again from it",
        .expected.join(", ")
    )]
    OtherModel {
        /// Paths of the selected parameters.
        expected: Vec<String>,
    },
    /// The loader ended before all Fisher samples were there.
    #[error(
        "the loader ended after {found} of {expected} Fisher samples of {batch_size} examples: \
         give it more batches, or ask for fewer samples"
    )]
    LoaderEnded {
        /// Fisher samples n that were asked for.
        expected: usize,
        /// Fisher samples that came.
        found: usize,
        /// Examples m per Fisher sample.
        batch_size: usize,
    },
    /// A batch of the loader holds less than one Fisher sample.
    #[error(
        "the loader yields a batch of {examples} examples, but a Fisher sample needs {batch_size}: \
         make its batches a multiple of that"
    )]
    SmallBatch {
        /// Examples in the batch.
        examples: usize,
        /// Examples m per Fisher sample.
        batch_size: usize,
    },
    /// The loss closure does not return the mean loss of the examples.
    #[error("the loss cannot be differentiated: {reason}")]
    Loss {
        /// What is wrong with it.
        reason: String,
    },
    /// A closure that only computes panics.
    #[error("the {closure} panics ({reason}): look at the shapes and indices that it is given")]
    Panics {
        /// `forward pass` or `loss`.
        closure: &'static str,
        /// What it said, and where.
        reason: String,
    },
    /// The operations of the loss cannot be known.
    #[error("the operations of the loss cannot be known: {reason}")]
    Trace {
        /// What stopped it.
        reason: String,
    },
    /// A folder of finished stages belongs to a run with another config, or of another model.
    #[error(
        "{path} holds the stages of another run (`{field}` differs): use the same config and model \
         to go on with it, or another folder"
    )]
    StagesOfAnotherRun {
        /// The folder.
        path: String,
        /// The first field of the config that differs, or `model` for other weights to prune, `rest` for others of
        /// its parameters: biases, statistics, ranges that weights carry.
        field: String,
    },
    /// A finished stage would not load into the model that the run began with.
    #[error(
        "the stage cannot be kept, since it would not load into the model that the run began with: \
         `{path}` carries {} now, and {} then. Fold in what the stages attach with \
         `Module::materialize`, or attach it before the run",
        reparameterization(.now), reparameterization(.then)
    )]
    StageReparameterized {
        /// Path of the parameter.
        path: String,
        /// Name of the reparameterization that it carried when the run began.
        then: Option<String>,
        /// Name of the one that it carries after the stage.
        now: Option<String>,
    },
    /// A file could not be read or written.
    #[error("{action} {path}: {reason}")]
    Io {
        /// What was tried, for example `cannot write`.
        action: &'static str,
        /// The file.
        path: String,
        /// The system's reason.
        reason: String,
    },
    /// There are no examples to judge ridges by.
    #[error(
        "the loader has no examples left to choose the ridge by: let it yield more than the Fisher \
         samples take, or fix the ridge (`RidgeChoice::Fixed`)"
    )]
    NoHeldOut,
    /// The user's training step failed.
    #[error("training between the stages failed: {reason}")]
    Training {
        /// What the training step said.
        reason: String,
    },
    /// The device cannot store gradients in the dtype.
    #[error("{device} cannot store gradients in {dtype:?}; use F32")]
    UnsupportedDtype {
        /// What was asked for.
        dtype: FloatDType,
        /// The device, as Burn prints it.
        device: String,
    },
    /// A sparsity pattern does not divide a layer.
    #[error(
        "the pattern {pattern} does not divide `{path}`: axis {axis} of {shape:?} is no multiple of \
         {multiple}. Leave the parameter out, or choose another pattern"
    )]
    PatternDoesNotDivide {
        /// The pattern, for example `2:4`.
        pattern: String,
        /// Path of the parameter.
        path: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The axis that does not divide.
        axis: usize,
        /// What it must be a multiple of.
        multiple: usize,
    },
    /// No support satisfies the budget.
    #[error("no support satisfies the budget: {reason}")]
    Infeasible {
        /// What stands in the way.
        reason: String,
    },
    /// The config names a parameter that is not there.
    #[error("budget, grid or `flops` name `{path}`, which is none of the parameters: {known}")]
    UnknownLayer {
        /// Path in the config.
        path: String,
        /// The parameters: of `flops` all, of the others those that are pruned.
        known: String,
    },
    /// A system of equations is singular to working precision.
    #[error(
        "the {size} x {size} system of the back-solve is not positive definite at pivot {pivot}: \
         the ridge {ridge} is too small for these gradients: raise it, or scale the loss down"
    )]
    NotPositiveDefinite {
        /// Its size.
        size: usize,
        /// Where the factorization broke down.
        pivot: usize,
        /// The ridge.
        ridge: f64,
    },
    /// Two masks are for one parameter.
    #[error("there are two masks for `{path}`")]
    DuplicateMask {
        /// Path of the parameter.
        path: String,
    },
    /// A support names a weight that is not there.
    #[error("the support names weight {index} of {parameters}")]
    SupportIndex {
        /// The index.
        index: usize,
        /// Weights there are.
        parameters: usize,
    },
    /// A mask does not fit the model.
    #[error(
        "the mask of `{path}` is for a weight of shape {mask:?}, but the model has {}: it is the \
         mask of another model",
        .model.as_ref().map_or("no such parameter".into(), |shape| format!("one of {shape:?}"))
    )]
    MaskOfAnotherModel {
        /// Path of the parameter.
        path: String,
        /// Shape that the mask was made for.
        mask: Vec<usize>,
        /// Shape of the model's parameter; `None` if it has none of that path.
        model: Option<Vec<usize>>,
    },
    /// A mask cannot be replaced where there is none.
    #[error("`{path}` carries no mask to replace; attach one with `Masks::attach`")]
    NotMasked {
        /// Path of the parameter.
        path: String,
    },
    /// A model came back from the training between stages without the masks that it was given with, or with others.
    #[error(
        "`{path}` came back from training after stage {stage} without its mask or with another, as a checkpoint \
         of other zeros has it: return the model that was given, trained, with what it carries"
    )]
    MasksLost {
        /// Path of the first such parameter.
        path: String,
        /// The stage, from 0.
        stage: usize,
    },
    /// A model to prune gradually carries something, but no masks.
    #[error(
        "`{path}` carries no mask, while `{carrying}` carries the reparameterization `{existing}`, \
         which would be folded in with the masks of each stage. Attach `Masks::keeping_all` with it, \
         first in a chain, so that stages replace the masks alone; or fold it in with \
         `Module::materialize` before"
    )]
    NeedsMasks {
        /// Path of a parameter to prune without a mask.
        path: String,
        /// Path of the first parameter that carries something.
        carrying: String,
        /// Name of what it carries.
        existing: String,
    },
    /// The model carries no masks.
    #[error("the model carries no masks; attach them with `Masks::attach`")]
    NoMasks,
    /// A record is of another version, damaged, or of something else.
    #[error("cannot load {what}: {reason}")]
    Record {
        /// What was being loaded.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A sparse record cannot be read.
    #[error("cannot load {what}: {fault}")]
    SparseRecord {
        /// The file, or what else was being loaded.
        what: String,
        /// What is wrong with it.
        #[source]
        fault: RecordFault,
    },
    /// A sparse record does not fit the model.
    #[error(
        "`{path}` {} in the record, but {} in the model: it is the record of another model, or \
         reparameterizations are not attached",
        shape_or_absent(.record), shape_or_absent(.model)
    )]
    RecordOfAnotherModel {
        /// Path of the parameter.
        path: String,
        /// Its shape in the record; `None` if it is not there.
        record: Option<Vec<usize>>,
        /// Its shape in the model; `None` if it is not there.
        model: Option<Vec<usize>>,
    },
    /// A parameter holds another kind of numbers than a sparse record has for it.
    #[error(
        "`{path}` is {dtype:?} in the record, but the model has {model} there: it is the record of \
         another model"
    )]
    RecordKind {
        /// Path of the parameter.
        path: String,
        /// Its dtype in the record.
        dtype: DType,
        /// What the model holds there, for example `integers`.
        model: String,
    },
    /// The device cannot hold a dtype of a record.
    #[error(
        "`{path}` is {dtype:?} in the record, which {device} cannot hold: load it on a device that can, \
         and cast the model there; codes, which lie as their device has them, go by `save_safetensors` of `quant`"
    )]
    RecordDtype {
        /// Path of the parameter.
        path: String,
        /// Its dtype in the record.
        dtype: DType,
        /// The device, as Burn prints it.
        device: String,
    },
    /// Layers cannot be made smaller.
    #[error("cannot make the layers smaller: {reason}")]
    CannotShrink {
        /// What stands in the way.
        reason: String,
    },
    /// A forward pass to prune by cannot be recorded, or not be executed from its recording.
    #[error(
        "pruning layer by layer needs a recorded forward pass: {source}. Without one, \
         `PrunerConfig` prunes from gradients of a loss (CHITA)"
    )]
    NotRecorded {
        /// What stands in the way.
        source: GraphError,
    },
    /// The forward pass of a model to make smaller cannot be recorded, or not be executed from its recording.
    #[error("making layers smaller needs a recorded forward pass: {source}")]
    ShrinkNotRecorded {
        /// What stands in the way.
        source: GraphError,
    },
    /// A recorded forward pass failed at what it was given.
    #[error(transparent)]
    Graph(GraphError),
    /// The system of a layer cannot be solved.
    #[error("`{path}`: {source}")]
    LayerSystem {
        /// Path of the weight.
        path: String,
        /// What is wrong.
        source: LayerwiseError,
    },
    /// A weight carries a reparameterization where weights are replaced as they are used.
    #[error(
        "`{path}` carries `{name}`: here weights are replaced as they are used, so fold it in first \
         (`materialize`) and attach it again afterwards"
    )]
    CarriesReparameterization {
        /// Path of the weight.
        path: String,
        /// What it carries.
        name: String,
    },
    /// A parameter is there twice, with the identity of one and the values of two: a clone that was given
    /// other values, or of which only the first copy was trained.
    #[error(
        "`{path}` has the identity of `{first}` and other values, which pruning would overwrite: give it \
         an identity of its own (`Param::from_tensor` of its value), or the values of `{first}`"
    )]
    CopiesDiffer {
        /// Path of the copy.
        path: String,
        /// Where the parameter was first.
        first: String,
    },
    /// What the dense network gives for the examples that judge holds NaN.
    #[error(
        "the dense network gives NaN for batch {batch} of the inputs, by which nothing can be judged: \
         look at that batch"
    )]
    NaNOutputs {
        /// Its number, from 0, without those that hold no example.
        batch: usize,
    },
    /// The losses that solutions are judged by are all NaN.
    #[error(
        "the loss on the examples that judge is NaN for all {candidates} solutions, and nothing can be chosen: \
         look for an example whose loss is NaN, or fix the ridge"
    )]
    NaNLosses {
        /// How many solutions were judged.
        candidates: usize,
    },
    /// New running statistics are not finite.
    #[error(
        "the new statistics of `{path}` are not finite: a batch holds NaN or infinities, or values \
         beyond the range of the device's numbers. Nothing was changed"
    )]
    NonFiniteStatistics {
        /// Path of the statistic.
        path: String,
    },
    /// A pattern or budget that pruning layer by layer does not know.
    #[error(
        "pruning layer by layer does not know {what}: `PrunerConfig` prunes to it from gradients of a \
         loss (CHITA)"
    )]
    NotLayerwise {
        /// What it does not know.
        what: String,
    },
    /// Attaching masks failed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The device failed while numbers were read back.
    #[error("reading from the device failed: {reason}")]
    Device {
        /// What Burn said.
        reason: String,
    },
}

/// What a parameter carries.
fn reparameterization(name: &Option<String>) -> String {
    name.as_ref()
        .map_or("nothing".into(), |name| format!("`{name}`"))
}

/// What a record, or a model, has in a place.
fn shape_or_absent(shape: &Option<Vec<usize>>) -> String {
    match shape {
        Some(shape) => format!("has the shape {shape:?}"),
        None => "does not exist".into(),
    }
}
