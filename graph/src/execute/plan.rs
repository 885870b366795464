//! What an execution knows of each operation before it begins.

use burn::backend::ir::TensorId;

use crate::{Assignment, Graph, Node, Rules};

/// Of all operations of a graph, under some rules.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) assignments: Vec<Assignment>,
    pub(super) steps: Vec<Step>,
}

impl Plan {
    pub(super) fn new(graph: &Graph, rules: &impl Rules) -> Self {
        Self {
            assignments: graph.assign(rules),
            steps: graph.nodes().map(Step::of).collect(),
        }
    }
}

/// What an operation is, whatever the rules say.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// The position of the hook that it stands for.
    pub(super) hook: Option<usize>,
    pub(super) moves: bool,
    /// The operand that it gives another shape.
    pub(super) reshaped: Option<TensorId>,
    pub(super) is_light: bool,
    pub(super) is_composed: bool,
    /// Its gradient does not show half a step of its operand.
    pub(super) is_smooth: bool,
    /// It has several float operands.
    pub(super) has_several: bool,
    /// No gradient goes to its operand.
    pub(super) stops: bool,
}

impl Step {
    pub(super) fn of(node: Node<'_>) -> Self {
        let inputs = node.operation().inputs();
        Self {
            hook: node.graph().hook_of(node.operation()),
            moves: node.moves(),
            reshaped: node.reshaped().map(|tensor| tensor.id),
            is_light: node.is_light(),
            is_composed: node.is_composed(),
            is_smooth: node.is_smooth() && !node.is_full(),
            has_several: inputs.filter(|one| one.dtype.is_float()).nth(1).is_some(),
            stops: node.stops_gradients(),
        }
    }
}
