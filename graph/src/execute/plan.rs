//! What an execution knows of each operation before it begins.

use burn::backend::ir::TensorId;
use burn::tensor::DType;
use rustc_hash::FxHashSet as HashSet;

use crate::{Assignment, Graph, Node, Rules};

/// Of all operations of a graph, under some rules.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) assignments: Vec<Assignment>,
    pub(super) steps: Vec<Step>,
}

impl Plan {
    pub(super) fn new(graph: &Graph, rules: &impl Rules) -> Self {
        let assignments = graph.assign(rules);
        // What was never in half where somebody asked for F32: the backward pass does not get it in half either.
        let mut wide: HashSet<TensorId> = HashSet::default();
        let mut steps = Vec::with_capacity(assignments.len());
        for (node, assignment) in graph.nodes().zip(&assignments) {
            let inputs = node.operation().inputs();
            let mut floats = inputs.filter(|one| one.dtype.is_float()).peekable();
            let comes_wide = floats.peek().is_some() && floats.all(|one| wide.contains(&one.id));
            let stays_wide = comes_wide || rules.asks_for_full(&node);
            let reads_half = assignment.operands == Some(rules.half());
            if stays_wide && !reads_half && assignment.results == Some(DType::F32) {
                wide.extend(node.operation().outputs().map(|made| made.id));
            }
            let mut step = Step::of(node);
            step.is_smooth &= !stays_wide;
            steps.push(step);
        }
        Self { assignments, steps }
    }
}

/// What an operation is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// The position of the hook that it stands for.
    pub(super) hook: Option<usize>,
    pub(super) moves: bool,
    /// The operand that it gives another shape.
    pub(super) reshaped: Option<TensorId>,
    pub(super) is_light: bool,
    pub(super) is_composed: bool,
    /// Its gradient does not show half a step of its operand. In a plan: nor did anybody ask for F32 there.
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
            is_smooth: node.is_smooth(),
            has_several: inputs.filter(|one| one.dtype.is_float()).nth(1).is_some(),
            stops: node.stops_gradients(),
        }
    }
}
