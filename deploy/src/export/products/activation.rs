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

/// An activation in integers.
pub(super) struct Quantized {
    pub(super) codes: String,
    /// A number.
    pub(super) scale: String,
    pub(super) zero_point: String,
    /// The scale, where it is known.
    pub(super) known_scale: Option<f32>,
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
                let quantized = self.quantize(name, how, Reader::Floats);
                Ok(self.dequantize(quantized))
            }
            _ => Ok(name),
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
        let key = format!("quantized {x} {how:?} {reader:?}");
        let parts = |joined: &str| -> Vec<String> { joined.split('\n').map(Into::into).collect() };
        let grid = match how {
            ActivationQuantization::Static(grid) => grid,
            ActivationQuantization::Dynamic => {
                let joined = self.written_once(key, |writer| {
                    let names = ["codes", "scale", "zero_point"];
                    writer
                        .emit_all("DynamicQuantizeLinear", vec![x], names, vec![])
                        .join("\n")
                });
                let [codes, scale, zero_point] = &parts(&joined)[..] else {
                    unreachable!("three names are joined")
                };
                return Quantized {
                    codes: codes.clone(),
                    scale: scale.clone(),
                    zero_point: zero_point.clone(),
                    known_scale: None,
                };
            }
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
        let codes = self.written_once(key, |writer| {
            let x = match range == (grid.quant_min, grid.quant_max) {
                true => x,
                // Fewer codes than the type has: the values saturate before.
                false => writer.clip_to(x, grid),
            };
            let inputs = vec![x, scale.clone(), zero_point.clone()];
            writer.emit("QuantizeLinear", inputs, "codes", vec![])
        });
        Quantized {
            codes,
            scale,
            zero_point,
            known_scale: Some(grid.scale),
        }
    }

    fn clip_to(&mut self, x: String, grid: Grid) -> String {
        let low = self.floats("number", &[], &[grid.dequantize(grid.quant_min)]);
        let high = self.floats("number", &[], &[grid.dequantize(grid.quant_max)]);
        self.emit("Clip", vec![x, low, high], "Clip", vec![])
    }

    pub(super) fn dequantize(&mut self, x: Quantized) -> String {
        let key = format!("dequantized {}", x.codes);
        let inputs = vec![x.codes, x.scale, x.zero_point];
        self.written_once(key, |writer| {
            writer.emit("DequantizeLinear", inputs, "dequantized", vec![])
        })
    }
}
