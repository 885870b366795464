//! Activations as codes, and back.

use burn::backend::ir::TensorIr;
use burn_lean_graph::Node;
use burn_lean_quant::integer::Grid;

use crate::export::data::check_scaled;
use crate::export::lower::Unwritten;
use crate::export::{Form, Writer};
use crate::{ActivationQuantization, DeployError, Edge, ElementType};

/// What reads the codes of an activation. Products of rows and of windows have codes of their own: an
/// engine may keep the channels last for windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    Floats,
    Rows,
    Windows,
}

impl Reader {
    /// What its codes are called.
    pub(super) fn codes(self) -> &'static str {
        match self {
            Self::Floats => "codes",
            Self::Rows => "codes_of_rows",
            Self::Windows => "codes_of_windows",
        }
    }
}

/// An activation in integers.
pub(super) struct Quantized {
    pub(super) codes: String,
    /// A number; or one for each row, which is an axis of one at the end.
    pub(super) scale: String,
    pub(super) zero_point: ZeroPoint,
}

/// The code of 0.
pub(super) enum ZeroPoint {
    /// One, of the type of the codes.
    Code(String),
    /// One for each row, in F32: no product of codes takes it.
    OfRows(String),
}

impl Writer<'_> {
    /// An operand that is not a weight, quantized and dequantized where the plan says so.
    pub(crate) fn activation_operand(
        &mut self,
        node: Node<'_>,
        operand: usize,
        tensor: &TensorIr,
    ) -> Result<String, Unwritten> {
        let edge = Edge {
            node: node.index(),
            operand,
        };
        let how = self.quantization.activation(edge, None);
        Ok(self.rounded(tensor, how, node.name())?)
    }

    /// A tensor, quantized and dequantized if that is `how` it is read by `reader`.
    pub(crate) fn rounded(
        &mut self,
        tensor: &TensorIr,
        how: Option<ActivationQuantization>,
        reader: &str,
    ) -> Result<String, DeployError> {
        let name = self.operand(tensor)?;
        match how {
            Some(how) if self.form != Form::Float => {
                check_scaled(tensor, reader)?;
                Ok(self.round(name, how))
            }
            _ => Ok(name),
        }
    }

    /// The values that the codes of an activation stand for.
    pub(super) fn round(&mut self, x: String, how: ActivationQuantization) -> String {
        match how {
            ActivationQuantization::Dynamic(grid) if !grid.is_of_onnx() => {
                self.round_on_the_fly(x, grid)
            }
            _ => {
                let Quantized {
                    codes,
                    scale,
                    zero_point: ZeroPoint::Code(zero_point),
                } = self.quantize(x, how, Reader::Floats)
                else {
                    unreachable!("rows have scales of their own in other grids")
                };
                let inputs = vec![codes, scale, zero_point];
                self.emit("DequantizeLinear", inputs, "dequantized", vec![])
            }
        }
    }

    /// The codes of an activation; as U8 for products of codes.
    pub(super) fn quantize(
        &mut self,
        x: String,
        how: ActivationQuantization,
        reader: Reader,
    ) -> Quantized {
        let unsigned = reader != Reader::Floats;
        let grid = match how {
            ActivationQuantization::Static(grid) => grid,
            ActivationQuantization::Dynamic(grid) if grid.is_of_onnx() => {
                let names = [reader.codes(), "scale", "zero_point"];
                let [codes, scale, zero_point] =
                    self.emit_all_in("", "DynamicQuantizeLinear", vec![x], names, vec![]);
                return Quantized {
                    codes,
                    scale,
                    zero_point: ZeroPoint::Code(zero_point),
                };
            }
            ActivationQuantization::Dynamic(grid) => return self.codes_on_the_fly(x, grid, reader),
        };
        let signed = grid.quant_min < 0 && !unsigned;
        let shift = if grid.quant_min < 0 && unsigned {
            128
        } else {
            0
        };
        let (element, range) = match signed {
            true => (ElementType::I8, (-128, 127)),
            false => (ElementType::U8, (-shift, 255 - shift)),
        };
        let scale = self.floats("scale", &[], &[grid.scale]);
        let zero = vec![(grid.zero_point + shift) as u8];
        let zero_point = self.initializer("zero_point", element, &[], zero);
        let x = match range == (grid.quant_min, grid.quant_max) {
            true => x,
            // Fewer codes than the type has: the values saturate before.
            false => self.clip_to(x, grid),
        };
        let inputs = vec![x, scale.clone(), zero_point.clone()];
        let codes = self.emit("QuantizeLinear", inputs, reader.codes(), vec![]);
        Quantized {
            codes,
            scale,
            zero_point: ZeroPoint::Code(zero_point),
        }
    }

    fn clip_to(&mut self, x: String, grid: Grid) -> String {
        let low = self.floats("number", &[], &[grid.dequantize(grid.quant_min)]);
        let high = self.floats("number", &[], &[grid.dequantize(grid.quant_max)]);
        self.emit("Clip", vec![x, low, high], "Clip", vec![])
    }
}
