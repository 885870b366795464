//! The operations of a forward pass, with what is known about them.

pub(crate) mod composite;
pub(crate) mod describe;
mod kept;
mod loops;
mod node;
mod parameter;
pub(crate) mod rows;
mod site;
mod uploaded;
pub(crate) mod vectors;
pub(crate) mod views;

use burn::backend::ir::{BatchNormOpIr, ModuleOperationIr, OperationIr, TensorId};
use burn::tensor::{DType, FloatDType, TensorData};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use composite::Composites;
use kept::Kept;
pub use loops::{FewerSteps, LoopPart, Repeated, Rolled};
pub use node::{Node, scalars};
pub(crate) use parameter::ParamPlace;
pub use parameter::Parameter;
pub use site::{HookInfo, Role, Site};
pub(crate) use uploaded::Uploaded;

/// The operations of a forward pass, in order: what no result needs is left out.
#[derive(Debug, Clone)]
pub struct Graph {
    pub(crate) operations: Vec<OperationIr>,
    pub(crate) constants: HashMap<TensorId, TensorData>,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) inputs: Vec<TensorId>,
    pub(crate) outputs: Vec<TensorId>,
    /// Outputs of batch normalizations whose statistics are those of the batch itself.
    pub(crate) batch_norms: HashSet<TensorId>,
    /// For each operation, which parameters it reads, through views and casts.
    pub(crate) reads: Vec<Vec<usize>>,
    /// What is read after the last operation: outputs, and the next values of running states.
    pub(crate) results: HashSet<TensorId>,
    /// For each tensor, which operations read it.
    pub(crate) readers: HashMap<TensorId, Vec<usize>>,
    pub(crate) lifetimes: Vec<Lifetime>,
    /// Softmax and layer norm in parts.
    pub(crate) composites: Composites,
    /// Tensors of zeros and ones that are drawn.
    pub(crate) masks: HashSet<TensorId>,
    /// Tensors that a derivative as large as they are small is multiplied with.
    pub(crate) magnified: HashSet<TensorId>,
    /// The hooks of the recorded model.
    pub(crate) hooks: Vec<HookInfo>,
    /// The tensors that hooks make, with the positions of the hooks.
    pub(crate) hooked: HashMap<TensorId, usize>,
    /// Views of what a hook makes of a whole tensor, beside those of the tensor itself.
    pub(crate) hooked_views: HashSet<TensorId>,
    /// The tensors that stand for what a cast makes.
    pub(crate) noted_casts: HashMap<TensorId, FloatDType>,
    /// The first tensors before and after what the model runs in full precision.
    pub(crate) full: Vec<(TensorId, TensorId)>,
    /// The tensors that stand for others without their gradients.
    pub(crate) stopped: HashSet<TensorId>,
    /// The dtypes of the parameters and inputs that are stored in half and recorded as F32.
    pub(crate) stored: HashMap<TensorId, DType>,
    /// What an execution keeps for the next one.
    pub(crate) kept: Kept,
    /// The constants where it is executed again and again.
    pub(crate) uploaded: Uploaded,
}

/// What happens to tensors at one operation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lifetime {
    /// Operands that nothing reads afterwards, and that the operation reads once.
    pub(crate) moved: HashSet<TensorId>,
    /// Tensors that nothing reads afterwards.
    pub(crate) freed: Vec<TensorId>,
}

impl Graph {
    /// What was recorded, before any pass.
    pub(crate) fn new(
        operations: Vec<OperationIr>,
        constants: HashMap<TensorId, TensorData>,
        parameters: Vec<Parameter>,
        inputs: Vec<TensorId>,
        outputs: Vec<TensorId>,
    ) -> Self {
        Self {
            operations,
            constants,
            parameters,
            inputs,
            outputs,
            batch_norms: HashSet::default(),
            reads: Vec::new(),
            results: HashSet::default(),
            readers: HashMap::default(),
            lifetimes: Vec::new(),
            composites: Composites::default(),
            masks: HashSet::default(),
            magnified: HashSet::default(),
            hooks: Vec::new(),
            hooked: HashMap::default(),
            hooked_views: HashSet::default(),
            noted_casts: HashMap::default(),
            stopped: HashSet::default(),
            full: Vec::new(),
            stored: HashMap::default(),
            kept: Kept::default(),
            uploaded: Uploaded::default(),
        }
    }

    /// The smallest number above those that name tensors.
    pub(crate) fn unused_id(&self) -> u64 {
        let operations = self.operations.iter();
        let tensors = operations.flat_map(|one| one.inputs().chain(one.outputs()));
        let ids = tensors.map(|tensor| tensor.id);
        let ids = ids.chain(self.inputs.iter().copied());
        let ids = ids.chain(self.constants.keys().copied());
        let ids = ids.chain(self.parameters.iter().map(|parameter| parameter.tensor));
        ids.map(|id| id.value() + 1).max().unwrap_or(0)
    }

    /// The operations in order.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = Node<'_>> {
        (0..self.operations.len()).map(|index| self.node(index))
    }

    /// The operation at a place.
    ///
    /// # Panics
    ///
    /// Where there are not so many.
    pub fn node(&self, index: usize) -> Node<'_> {
        Node { graph: self, index }
    }

    /// The parameters and buffers that some operation reads, and running states that are updated.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The tensors that the recording was given besides parameters, in their order.
    pub fn inputs(&self) -> &[TensorId] {
        &self.inputs
    }

    /// The tensors of the result, in their order.
    pub fn outputs(&self) -> &[TensorId] {
        &self.outputs
    }

    /// Tensors that the forward pass made from numbers of its own, and plain tensors of modules.
    pub fn constants(&self) -> impl Iterator<Item = (TensorId, &TensorData)> {
        self.constants.iter().map(|(id, data)| (*id, data))
    }

    /// The hooks of the recorded model, in the order in which the model offers them.
    pub fn hooks(&self) -> &[HookInfo] {
        &self.hooks
    }

    /// The position of the hook that an operation stands for.
    pub(crate) fn hook_of(&self, operation: &OperationIr) -> Option<usize> {
        if self.hooked.is_empty() {
            return None;
        }
        let output = operation.outputs().next()?;
        self.hooked.get(&output.id).copied()
    }

    /// The dtype of the cast that an operation stands for.
    pub(crate) fn noted_cast(&self, operation: &OperationIr) -> Option<FloatDType> {
        if self.noted_casts.is_empty() {
            return None;
        }
        let output = operation.outputs().next()?;
        self.noted_casts.get(&output.id).copied()
    }

    /// Whether the model makes a tensor in full precision.
    pub(crate) fn is_full(&self, id: TensorId) -> bool {
        let mut spans = self.full.iter();
        spans.any(|(before, after)| (before.value()..after.value()).contains(&id.value()))
    }

    /// The batch normalization of a training pass at an operation, as one operation.
    pub(crate) fn batch_norm<'a>(&self, operation: &'a OperationIr) -> Option<&'a BatchNormOpIr> {
        match operation {
            OperationIr::Module(ModuleOperationIr::BatchNorm(norm))
                if self.batch_norms.contains(&norm.out.id) =>
            {
                Some(norm)
            }
            _ => None,
        }
    }
}
