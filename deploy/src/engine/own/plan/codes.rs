//! Which values are codes, and of which grid.

use burn_lean_kernels::CodeGrid;

use super::Planner;
use crate::engine::own::ranging::Ranging;
use crate::onnx::Attribute;
use crate::{DynamicGrid, ElementType, OnnxNode};

/// Whether a node multiplies codes by codes.
pub(super) fn is_product_of_codes(node: &OnnxNode) -> bool {
    matches!(
        node.operator,
        "MatMulInteger" | "MatMulIntegerBlocks" | "ConvInteger"
    )
}

/// The grid of a node that makes one of the values at hand.
pub(super) fn on_the_fly(node: &OnnxNode) -> Option<DynamicGrid> {
    match node.operator {
        "DynamicQuantizeLinear" => Some(DynamicGrid::uint8()),
        _ => node
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                Attribute::Grid(grid) => Some(*grid),
                _ => None,
            }),
    }
}

impl<'a> Planner<'a> {
    /// Where the grid of a node that makes codes is from.
    pub(super) fn ranging(&self, node: &OnnxNode) -> Option<Ranging> {
        let out = node.outputs.first()?;
        let readers = self.readers.get(out.as_str())?;
        let products = |at: &usize| {
            let node = &self.model.nodes[*at];
            is_product_of_codes(node) && node.inputs[0] == *out
        };
        let of_windows = |at: &&usize| self.model.nodes[**at].operator == "ConvInteger";
        let windows = readers.iter().filter(of_windows).count();
        if !readers.iter().all(products) || ![0, readers.len()].contains(&windows) {
            return None;
        }
        match node.operator {
            "DynamicQuantizeLinear" | "QuantizeActivation" => {
                on_the_fly(node).map(Ranging::OnTheFly)
            }
            "QuantizeLinear" => self.known_grid(node).map(Ranging::Known),
            _ => None,
        }
    }

    /// The grid of a scale and a zero point that are constants.
    fn known_grid(&self, node: &OnnxNode) -> Option<CodeGrid> {
        let scale = self.constants.number(node.inputs.get(1)?)?;
        let stored = self.constants.get(node.inputs.get(2)?)?;
        let [byte] = stored.bytes[..] else {
            return None;
        };
        let (zero_point, low, high) = match stored.element {
            ElementType::I8 => (i16::from(byte as i8), -128_i16, 127_i16),
            _ => (i16::from(byte), 0, 255),
        };
        Some(CodeGrid {
            scale,
            low: low - zero_point,
            high: high - zero_point,
        })
    }

    /// Of a node whose codes one other node alone reads, which makes floats of them again: where the grid is from,
    /// that node, and its result.
    pub(super) fn rounding(&self, node: &'a OnnxNode) -> Option<(Ranging, usize, &'a str)> {
        let [x, grid @ ..] = &node.inputs[..] else {
            return None;
        };
        let [codes, found @ ..] = &node.outputs[..] else {
            return None;
        };
        let (at, back) = self.sole(codes)?;
        let [of, by @ ..] = &back.inputs[..] else {
            return None;
        };
        if self.constants.get(x).is_some() || back.operator != "DequantizeLinear" || of != codes {
            return None;
        }
        let ranging = match node.operator {
            "QuantizeLinear" if by == grid => Ranging::Known(self.known_grid(node)?),
            "DynamicQuantizeLinear" if by == found => {
                let alone = |name: &String| self.sole(name).is_some_and(|(one, _)| one == at);
                let grid = on_the_fly(node).filter(|_| found.iter().all(alone));
                Ranging::OnTheFly(grid?)
            }
            _ => return None,
        };
        let rounded = back.outputs.first()?.as_str();
        Some((ranging, at, rounded))
    }

    /// Whether a node multiplies the scale of values at hand by those of a weight.
    pub(super) fn is_step(&self, node: &OnnxNode) -> bool {
        let dynamic = |name: &String| {
            let maker = self.makers.get(name.as_str());
            maker.is_some_and(|at| {
                let before = &self.model.nodes[*at];
                on_the_fly(before).is_some() && before.outputs.get(1) == Some(name)
            })
        };
        node.inputs.iter().any(dynamic)
    }
}
