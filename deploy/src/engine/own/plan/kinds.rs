//! What is known of a model's values before any is computed.

use std::collections::HashSet;

use crate::engine::own::attributes::{Constants, int};
use crate::onnx::Attribute;
use crate::{ElementType, OnnxModel, OnnxNode};

/// Names of values. They are found node by node: following a chain of nodes back from each of them would take the
/// square of its length, and a stack as deep as the chain is long.
#[derive(Default)]
pub(super) struct Kinds<'a> {
    integers: HashSet<&'a str>,
    fixed: HashSet<&'a str>,
    step_numbers: HashSet<&'a str>,
}

impl<'a> Kinds<'a> {
    /// Of a model, whose nodes are in an order in which they can be computed.
    pub(super) fn of(model: &'a OnnxModel, constants: &Constants<'a>) -> Self {
        let mut kinds = Self::default();
        for constant in &model.initializers {
            kinds.fixed.insert(&constant.name);
            if constant.element != ElementType::F32 {
                kinds.integers.insert(&constant.name);
            }
        }
        for info in &model.inputs {
            if info.element != ElementType::F32 {
                kinds.integers.insert(&info.name);
            }
        }
        if let Some(info) = model.inputs.first()
            && info.element == ElementType::I64
            && info.shape.is_empty()
        {
            kinds.step_numbers.insert(&info.name);
        }
        for node in &model.nodes {
            let outputs = || node.outputs.iter().map(String::as_str);
            let mut reads = node.reads().into_iter();
            if reads.all(|name| name.is_empty() || kinds.is_fixed(name)) {
                kinds.fixed.extend(outputs());
            }
            if kinds.makes_step_number(node, constants) {
                kinds.step_numbers.extend(outputs());
            }
            for name in outputs() {
                if kinds.makes_integers(node, name) {
                    kinds.integers.insert(name);
                }
            }
        }
        kinds
    }

    /// Whether a value is known not to be of floats: it is left to rten.
    pub(super) fn is_integer(&self, name: &str) -> bool {
        self.integers.contains(name)
    }

    /// Whether a value is a constant, or follows from constants alone.
    pub(super) fn is_fixed(&self, name: &str) -> bool {
        self.fixed.contains(name)
    }

    /// Whether a value is the number of a loop's step, or one that follows from it and constants.
    pub(super) fn is_step_number(&self, name: &str) -> bool {
        self.step_numbers.contains(name)
    }

    fn makes_step_number(&self, node: &OnnxNode, constants: &Constants<'_>) -> bool {
        let [x, other] = &node.inputs[..] else {
            return false;
        };
        matches!(node.operator, "Reshape" | "Mul" | "Add")
            && self.is_step_number(x)
            && constants.list_of_one(other).is_some()
    }

    fn makes_integers(&self, node: &OnnxNode, name: &str) -> bool {
        use ElementType::F32;
        if let Some(body) = node.body() {
            // The first of the body says whether there is another step.
            let place = node.outputs.iter().position(|one| one == name);
            let info = place.and_then(|place| body.outputs.get(1 + place));
            return info.is_some_and(|info| info.element != F32);
        }
        let reads_integers = |at: usize| node.inputs.get(at).is_some_and(|x| self.is_integer(x));
        match node.operator {
            "Shape" | "ArgMax" | "ArgMin" | "Equal" | "Greater" | "GreaterOrEqual" | "Less"
            | "LessOrEqual" | "And" | "Or" | "Xor" | "Not" | "IsNaN" | "IsInf" => true,
            "Cast" => int(node, "to") != Some(F32 as i64),
            // Its places are integers, whatever it orders.
            "TopK" => reads_integers(0) || node.outputs.get(1).is_some_and(|places| places == name),
            "ConstantOfShape" => node
                .attributes
                .iter()
                .any(|attribute| matches!(attribute, Attribute::Element(_, of, _) if *of != F32)),
            "Where" => reads_integers(1),
            _ => reads_integers(0),
        }
    }
}
