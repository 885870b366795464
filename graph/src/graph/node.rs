//! One operation of a graph, and what is known about it.

use burn::backend::ir::{
    ActivationOperationIr, BaseOperationIr, FloatOperationIr, IrVisitorMut, ModuleOperationIr,
    NumericOperationIr, OperationIr, ScalarIr, TensorIr,
};
use burn::tensor::FloatDType;

use super::describe::operands;
use super::views::moved;
use super::{Graph, HookInfo, Parameter};
use crate::interpret::name;

/// One operation of a graph.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    pub(super) graph: &'a Graph,
    pub(super) index: usize,
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

    pub(crate) fn graph(&self) -> &'a Graph {
        self.graph
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

    /// Whether it came with a hook: it stands for one, or views what a hook makes of a sequence as the
    /// sequence is viewed. A recording without hooks has all other operations.
    pub fn came_with_hook(&self) -> bool {
        let mut made = self.operation().outputs();
        self.hook().is_some() || made.any(|tensor| self.graph.hooked_views.contains(&tensor.id))
    }

    /// The dtype of the cast that it stands for, in a recording that
    /// [notes casts](crate::hooks::noting_casts).
    pub fn noted_cast(&self) -> Option<FloatDType> {
        self.graph.noted_cast(self.operation())
    }

    /// Whether the model says that it runs in F32, by
    /// [`in_full_precision`](crate::hooks::in_full_precision).
    pub fn is_full(&self) -> bool {
        let mut made = self.operation().outputs();
        made.any(|tensor| self.graph.is_full(tensor.id))
    }

    /// The operand whose numbers it moves, leaves out or repeats without computing any; also one
    /// that it casts.
    pub fn moved(&self) -> Option<&'a TensorIr> {
        moved(self.operation())
    }

    /// Whether no gradient goes through it.
    pub(crate) fn stops_gradients(&self) -> bool {
        let mut made = self.operation().outputs();
        self.graph.composites.is_subtracted_maximum(self.index)
            || made.any(|tensor| self.graph.stopped.contains(&tensor.id))
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

    /// Whether it takes places of its operand by index, and may take one many times: its backward pass
    /// adds up what they give, in the dtype of the operand.
    pub fn looks_up(&self) -> bool {
        matches!(
            self.operation(),
            OperationIr::BaseFloat(
                BaseOperationIr::Select(_)
                    | BaseOperationIr::Gather(_)
                    | BaseOperationIr::GatherNd(_)
            ) | OperationIr::Module(ModuleOperationIr::Embedding(_))
        )
    }

    /// Whether it draws random numbers: others in each execution.
    pub fn is_random(&self) -> bool {
        matches!(
            self.operation(),
            OperationIr::Float(_, FloatOperationIr::Random(_))
                | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(_))
        )
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

    /// The name of the softmax or layer norm that it is a part of, which a training pass records in parts.
    pub fn part_of(&self) -> Option<&'static str> {
        let composites = &self.graph.composites;
        let ending = composites.ending_at(self.index());
        let composite = ending.or_else(|| composites.around(self.index()).map(|(_, one)| one));
        composite.map(|composite| composite.kind.name())
    }

    /// Whether Burn composes it of many operations, each as large as its operand.
    pub(crate) fn is_composed(&self) -> bool {
        matches!(
            self.operation(),
            OperationIr::Activation(
                ActivationOperationIr::Softmax(_)
                    | ActivationOperationIr::LogSoftmax(_)
                    | ActivationOperationIr::Softmin(_)
            )
        )
    }

    /// The operand and the mask, where it multiplies with zeros and ones that are drawn for it: a
    /// dropout. The mask may be broadcast, the operand is as large as the result.
    pub(crate) fn masked(&self) -> Option<(&'a TensorIr, &'a TensorIr)> {
        let OperationIr::NumericFloat(_, NumericOperationIr::Mul(product)) = self.operation()
        else {
            return None;
        };
        let is_mask = |tensor: &TensorIr| self.graph.masks.contains(&tensor.id);
        let (x, mask) = match (is_mask(&product.lhs), is_mask(&product.rhs)) {
            (false, true) => (&product.lhs, &product.rhs),
            (true, false) => (&product.rhs, &product.lhs),
            _ => return None,
        };
        (x.shape == product.out.shape).then_some((x, mask))
    }

    /// Whether its derivative, times its operand, changes little where the operand changes by a
    /// small fraction, and that is what counts: the backward pass can read the operand in half precision.
    pub(crate) fn is_smooth(&self) -> bool {
        let mut made = self.operation().outputs();
        let is_magnified = made.any(|tensor| self.graph.magnified.contains(&tensor.id));
        !is_magnified
            && matches!(
                self.operation(),
                OperationIr::Activation(
                    ActivationOperationIr::Gelu(_)
                        | ActivationOperationIr::Sigmoid(_)
                        | ActivationOperationIr::LogSigmoid(_)
                ) | OperationIr::Float(_, FloatOperationIr::Tanh(_) | FloatOperationIr::Erf(_))
            )
    }

    /// The operand that it gives another shape.
    pub(crate) fn reshaped(&self) -> Option<&'a TensorIr> {
        match self.operation() {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(view)) => Some(&view.input),
            _ => None,
        }
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
