//! The operations of a forward pass, with what is known about them.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, BatchNormOpIr, FloatOperationIr, IrVisitorMut,
    ModuleOperationIr, OperationIr, ScalarIr, TensorId, TensorIr,
};
use burn::tensor::{FloatDType, TensorData};

use crate::Parameter;
use crate::interpret::name;
use crate::passes::operands;
use crate::sites::{HookInfo, moved};

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
    /// For each tensor, which operations read it.
    pub(crate) readers: HashMap<TensorId, Vec<usize>>,
    pub(crate) lifetimes: Vec<Lifetime>,
    /// The hooks of the recorded model.
    pub(crate) hooks: Vec<HookInfo>,
    /// The tensors that hooks make, with the positions of the hooks.
    pub(crate) hooked: HashMap<TensorId, usize>,
    /// The tensors that stand for what a cast makes.
    pub(crate) noted_casts: HashMap<TensorId, FloatDType>,
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
            batch_norms: HashSet::new(),
            reads: Vec::new(),
            readers: HashMap::new(),
            lifetimes: Vec::new(),
            hooks: Vec::new(),
            hooked: HashMap::new(),
            noted_casts: HashMap::new(),
        }
    }

    /// The operations in order.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = Node<'_>> {
        (0..self.operations.len()).map(|index| self.node(index))
    }

    pub(crate) fn node(&self, index: usize) -> Node<'_> {
        Node { graph: self, index }
    }

    /// The parameters and buffers that some operation reads.
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

/// One operation of a graph.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    graph: &'a Graph,
    index: usize,
}

impl std::fmt::Debug for Node<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {}", self.name(), self.module())
    }
}

impl<'a> Node<'a> {
    /// Its position.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The operation in Burn's intermediate representation.
    pub fn operation(&self) -> &'a OperationIr {
        &self.graph.operations[self.index]
    }

    /// What it computes: `matmul`, `conv2d`, `softmax`…
    pub fn name(&self) -> &'static str {
        let operation = self.operation();
        match (self.hook(), self.graph.batch_norm(operation)) {
            (Some(hook), _) => hook.name,
            (None, Some(_)) => "batch_norm_train",
            (None, None) => name(operation),
        }
    }

    /// The hook of the model that computes it, if it stands for one.
    pub fn hook(&self) -> Option<&'a HookInfo> {
        let position = self.graph.hook_of(self.operation())?;
        self.graph.hooks.get(position)
    }

    /// The dtype of the cast that it stands for, in a recording that
    /// [notes casts](crate::hooks::noting_casts).
    pub fn noted_cast(&self) -> Option<FloatDType> {
        self.graph.noted_cast(self.operation())
    }

    /// Whether it is a batch normalization that normalizes by statistics of its own input, as in
    /// training.
    pub fn is_batch_norm_in_training(&self) -> bool {
        self.graph.batch_norm(self.operation()).is_some()
    }

    /// The operand whose numbers it moves, leaves out or repeats without computing any; also one
    /// that it casts.
    pub fn moved(&self) -> Option<&'a TensorIr> {
        moved(self.operation())
    }

    /// The tensors that it reads.
    pub fn operands(&self) -> impl Iterator<Item = &'a TensorIr> + use<'a> {
        let operation = self.operation();
        let reads = operands(self.graph, operation);
        operation
            .inputs()
            .filter(move |tensor| reads.contains(&tensor.id))
    }

    /// The parameters that it reads, through views and casts.
    pub fn parameters(&self) -> impl Iterator<Item = &'a Parameter> {
        let graph = self.graph;
        graph.reads[self.index]
            .iter()
            .map(|index| &graph.parameters[*index])
    }

    /// The module that it belongs to, as far as its parameters tell: the path without the name of
    /// the parameter, empty for a module that is the whole model, `?` where it reads none.
    pub fn module(&self) -> &'a str {
        match self.parameters().next() {
            None => "?",
            Some(parameter) => match parameter.path.rsplit_once('.') {
                None => "",
                Some((module, _)) => module,
            },
        }
    }

    /// The operations that read a result of it.
    pub fn readers(&self) -> impl Iterator<Item = Node<'a>> {
        let graph = self.graph;
        self.operation()
            .outputs()
            .filter_map(|tensor| graph.readers.get(&tensor.id))
            .flatten()
            .map(|index| graph.node(*index))
    }

    /// The numbers in it: the addend of an `add_scalar`, the value of a `mask_fill`.
    pub fn scalars(&self) -> Vec<f64> {
        scalars(self.operation())
    }

    /// Whether the numbers of its float results are those of its float operands, or zero: views,
    /// choices by place or by order, and what is cut off at zero.
    ///
    /// Rounding its operands is rounding its results.
    pub fn moves(&self) -> bool {
        self.is_view()
            || match self.operation() {
                OperationIr::BaseFloat(base) => matches!(
                    base,
                    BaseOperationIr::Select(_)
                        | BaseOperationIr::Gather(_)
                        | BaseOperationIr::GatherNd(_)
                        | BaseOperationIr::MaskWhere(_)
                        | BaseOperationIr::RepeatDim(_)
                        | BaseOperationIr::Cat(_)
                ),
                OperationIr::Activation(ActivationOperationIr::Relu(_)) => true,
                OperationIr::Module(module) => matches!(
                    module,
                    ModuleOperationIr::MaxPool1d(_)
                        | ModuleOperationIr::MaxPool1dWithIndices(_)
                        | ModuleOperationIr::MaxPool2d(_)
                        | ModuleOperationIr::MaxPool2dWithIndices(_)
                ),
                _ => false,
            }
    }

    /// Whether its result is as large as its operand, and costs no more to compute than to read.
    pub(crate) fn is_light(&self) -> bool {
        matches!(
            self.operation(),
            OperationIr::Activation(ActivationOperationIr::Relu(_))
                | OperationIr::BaseFloat(
                    BaseOperationIr::Reshape(_)
                        | BaseOperationIr::SwapDims(_)
                        | BaseOperationIr::Permute(_)
                )
        )
    }

    /// Whether Burn composes it of many operations, each as large as its operand.
    pub(crate) fn is_composed(&self) -> bool {
        matches!(
            self.operation(),
            OperationIr::Module(ModuleOperationIr::LayerNorm(_))
                | OperationIr::Activation(
                    ActivationOperationIr::Softmax(_)
                        | ActivationOperationIr::LogSoftmax(_)
                        | ActivationOperationIr::Softmin(_)
                )
        )
    }

    /// Whether its derivative, times its operand, changes little where the operand changes by a
    /// small fraction: the backward pass can read the operand in half precision.
    pub(crate) fn is_smooth(&self) -> bool {
        matches!(
            self.operation(),
            OperationIr::Activation(
                ActivationOperationIr::Gelu(_)
                    | ActivationOperationIr::Sigmoid(_)
                    | ActivationOperationIr::LogSigmoid(_)
            ) | OperationIr::Float(_, FloatOperationIr::Tanh(_) | FloatOperationIr::Erf(_))
        )
    }

    /// Whether it only looks at its operand in another way: its result has the same numbers.
    pub fn is_view(&self) -> bool {
        match self.operation() {
            OperationIr::BaseFloat(base)
            | OperationIr::BaseInt(base)
            | OperationIr::BaseBool(base) => {
                matches!(
                    base,
                    BaseOperationIr::Reshape(_)
                        | BaseOperationIr::SwapDims(_)
                        | BaseOperationIr::Permute(_)
                        | BaseOperationIr::Flip(_)
                        | BaseOperationIr::Expand(_)
                        | BaseOperationIr::Unfold(_)
                        | BaseOperationIr::Slice(_)
                )
            }
            _ => false,
        }
    }
}

/// The numbers in an operation: the addend of an `add_scalar`, the value of a `mask_fill`.
pub fn scalars(operation: &OperationIr) -> Vec<f64> {
    struct Scalars(Vec<f64>);
    impl IrVisitorMut for Scalars {
        fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
            self.0.push(scalar.elem());
        }
    }
    let mut scalars = Scalars(Vec::new());
    operation.clone().visit_mut(&mut scalars);
    scalars.0
}
