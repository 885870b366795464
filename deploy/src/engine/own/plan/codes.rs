//! Which values are codes, and of which grid.

use burn_lean_kernels::CodeGrid;

use super::Planner;
use crate::OnnxNode;
use crate::engine::own::attributes::int;
use crate::onnx::Attribute;

impl<'a> Planner<'a> {
    /// The grid of a node that makes codes: `None` inside for that of the values at hand.
    pub(super) fn grid(&self, node: &OnnxNode) -> Option<Option<CodeGrid>> {
        let out = node.outputs.first()?;
        let readers = self.readers.get(out.as_str())?;
        let products = |at: &usize| {
            let node = &self.model.nodes[*at];
            matches!(node.operator, "MatMulInteger" | "ConvInteger") && node.inputs[0] == *out
        };
        let one_kind = |operator: &str| {
            let mut all = readers.iter().map(|at| self.model.nodes[*at].operator);
            all.all(|other| other == operator)
        };
        if !readers.iter().all(products) || !(one_kind("ConvInteger") || one_kind("MatMulInteger"))
        {
            return None;
        }
        match node.operator {
            "DynamicQuantizeLinear" => Some(None),
            "QuantizeLinear" => {
                let scale = self.constants.number(&node.inputs[1])?;
                let zero_point = self.constants.get(&node.inputs[2])?;
                let [zero_point] = zero_point.bytes[..] else {
                    return None;
                };
                let zero_point = i16::from(zero_point);
                Some(Some(CodeGrid {
                    scale,
                    low: -zero_point,
                    high: 255 - zero_point,
                }))
            }
            _ => None,
        }
    }

    /// Whether a node multiplies the scale of values at hand by those of a weight.
    pub(super) fn is_step(&self, node: &OnnxNode) -> bool {
        let dynamic = |name: &String| {
            let maker = self.makers.get(name.as_str());
            maker.is_some_and(|at| {
                let before = &self.model.nodes[*at];
                before.operator == "DynamicQuantizeLinear" && before.outputs.get(1) == Some(name)
            })
        };
        node.inputs.iter().any(dynamic)
    }

    /// Whether a value is known not to be of floats: it is left to rten.
    pub(super) fn is_integer(&self, name: &str) -> bool {
        use crate::ElementType::F32;
        if let Some(constant) = self.constants.get(name) {
            return constant.element != F32;
        }
        if let Some(info) = self.model.inputs.iter().find(|info| info.name == name) {
            return info.element != F32;
        }
        let Some(node) = self.makers.get(name).map(|at| &self.model.nodes[*at]) else {
            return false;
        };
        match node.operator {
            "Shape" | "ArgMax" | "ArgMin" | "Equal" | "Greater" | "GreaterOrEqual" | "Less"
            | "LessOrEqual" | "And" | "Or" | "Xor" | "Not" | "IsNaN" | "IsInf" => true,
            "Cast" => int(node, "to") != Some(F32 as i64),
            "TopK" => node.outputs.get(1).is_some_and(|indices| indices == name),
            "ConstantOfShape" => node
                .attributes
                .iter()
                .any(|attribute| matches!(attribute, Attribute::Element(_, of, _) if *of != F32)),
            "Where" => node.inputs.get(1).is_some_and(|x| self.is_integer(x)),
            _ => node.inputs.first().is_some_and(|x| self.is_integer(x)),
        }
    }
}
