//! Matrix products and convolutions, with what is quantized of them.

use burn::backend::ir::TensorIr;
use burn_lean_graph::Node;
use burn_lean_quant::Grid;

use super::lower::{Unwritten, Written};
use super::weights::{Codes, Spread};
use super::{Form, Writer};
use crate::onnx::{Attribute, MICROSOFT};
use crate::{ActivationQuantization, DeployError, Edge, ElementType};

/// How a layer is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Execution {
    /// Codes times codes, summed in I32.
    Integer,
    /// Floats times weights that are kept as codes and dequantized inside of the product.
    WeightsInteger,
    /// Floats times floats that were computed from codes once.
    DequantizedOnce,
    /// `DequantizeLinear` before the product: a runtime that has integer kernels fuses it, another
    /// one dequantizes at every use.
    Qdq,
    /// Floats times floats; nothing of it is quantized.
    Float,
}

impl std::fmt::Display for Execution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Integer => "integer",
            Self::WeightsInteger => "integer weights",
            Self::DequantizedOnce => "dequantized once",
            Self::Qdq => "quantize, dequantize",
            Self::Float => "float",
        })
    }
}

/// What became of a matrix product or convolution.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerReport {
    /// Position of its operation in the graph.
    pub node: usize,
    /// Path of its weight; `?` where both sides are activations.
    pub path: String,
    /// The operation: `linear`, `conv2d`…
    pub operation: &'static str,
    /// How it is computed.
    pub execution: Execution,
    /// Why it is not computed in integers, where something of it is quantized.
    pub reason: Option<String>,
    /// Bytes of its weight as the file has it.
    pub weight_bytes: usize,
}

/// An activation in integers.
struct Quantized {
    codes: String,
    /// A number.
    scale: String,
    zero_point: String,
    /// The scale, where it is known.
    known_scale: Option<f32>,
}

/// A product that is to be written.
pub(crate) struct Product<'a> {
    pub(crate) node: Node<'a>,
    pub(crate) x: &'a TensorIr,
    pub(crate) weight: &'a TensorIr,
    pub(crate) bias: Option<&'a TensorIr>,
    pub(crate) out: &'a TensorIr,
    /// `None` for a matrix product.
    pub(crate) convolution: Option<Vec<Attribute>>,
}

impl Product<'_> {
    /// The axis of the weight along which its output channels are.
    fn channel_axis(&self) -> usize {
        match self.convolution {
            Some(_) => 0,
            None => self.weight.shape.num_dims() - 1,
        }
    }

    /// Sizes of axes that come after that of the channels in the result.
    fn axes_behind(&self) -> usize {
        match self.convolution {
            Some(_) => self.out.shape.num_dims() - 2,
            None => 0,
        }
    }
}

impl<'a> Writer<'a> {
    /// `x · weight + bias`.
    pub(crate) fn linear(
        &mut self,
        node: Node<'a>,
        x: &'a TensorIr,
        weight: &'a TensorIr,
        bias: Option<&'a TensorIr>,
        out: &'a TensorIr,
    ) -> Written {
        let product = Product {
            node,
            x,
            weight,
            bias,
            out,
            convolution: None,
        };
        self.product(&product)
    }

    pub(crate) fn product(&mut self, product: &Product<'a>) -> Written {
        let node = product.node;
        let codes = self.weights.get(product.weight.id);
        let path = codes.map(|codes| codes.path.clone()).or_else(|| {
            let mut parameters = node.parameters();
            let of_weight = |id| self.constant(product.weight).is_some() && id;
            parameters
                .next()
                .filter(|_| of_weight(true))
                .map(|p| p.path.clone())
        });
        let edge = |operand| Edge {
            node: node.index(),
            operand,
        };
        let activation = self.quantization.activation(edge(0), path.as_deref());
        let other = self.quantization.activation(edge(1), None);
        let form = (self.form)(node.index());
        let (written, execution, reason) = match (form, codes) {
            (_, None) if activation.is_none() && other.is_none() => {
                (self.plain(product)?, Execution::Float, None)
            }
            (Form::Float, Some(_)) => (self.plain(product)?, Execution::DequantizedOnce, None),
            (Form::Float, None) => (self.plain(product)?, Execution::Float, None),
            (Form::Qdq, _) => {
                let name = self.with_qdq(product, codes, activation, other)?;
                (name, Execution::Qdq, None)
            }
            (Form::Integer, None) => {
                let reason = "its weight is not quantized".to_string();
                (self.plain(product)?, Execution::Float, Some(reason))
            }
            (Form::Integer, Some(codes)) => match self.integer(product, codes, activation)? {
                Ok((name, execution)) => (name, execution, None),
                Err(reason) => (
                    self.plain(product)?,
                    Execution::DequantizedOnce,
                    Some(reason.into()),
                ),
            },
        };
        self.set(product.out, written);
        let elements = product.weight.shape.num_elements();
        let weight_bytes = match (execution, codes) {
            (Execution::Integer | Execution::WeightsInteger | Execution::Qdq, Some(codes)) => {
                let bits = if codes.bits <= 4 && execution != Execution::Integer {
                    4
                } else {
                    8
                };
                elements * bits / 8
            }
            _ => elements * product.weight.dtype.size(),
        };
        self.layers.push(LayerReport {
            node: node.index(),
            path: path.unwrap_or_else(|| "?".into()),
            operation: node.name(),
            execution,
            reason,
            weight_bytes,
        });
        Ok(())
    }

    /// In floats, whatever was quantized.
    fn plain(&mut self, product: &Product<'_>) -> Result<String, DeployError> {
        let x = self.operand(product.x)?;
        let weight = self.weight(product.weight)?;
        let bias = product.bias.map(|bias| self.operand(bias)).transpose()?;
        Ok(self.multiply(product, x, weight, bias))
    }

    /// The float values of a weight; of a quantized one, those that its codes stand for.
    pub(crate) fn weight(&mut self, tensor: &TensorIr) -> Result<String, DeployError> {
        let Some(codes) = self.weights.get(tensor.id) else {
            return self.operand(tensor);
        };
        let key = format!("dequantized {}", tensor.id);
        Ok(self.written_once(key, |writer| {
            let values = dequantized(codes);
            writer.floats(&codes.path, &codes.shape, &values)
        }))
    }

    fn multiply(
        &mut self,
        product: &Product<'_>,
        x: String,
        weight: String,
        bias: Option<String>,
    ) -> String {
        match &product.convolution {
            Some(attributes) => {
                let inputs = [x, weight].into_iter().chain(bias).collect();
                self.emit("Conv", inputs, "Conv", attributes.clone())
            }
            None => {
                let name = self.emit("MatMul", vec![x, weight], "MatMul", vec![]);
                match bias {
                    Some(bias) => self.emit("Add", vec![name, bias], "Add", vec![]),
                    None => name,
                }
            }
        }
    }

    /// With `QuantizeLinear` and `DequantizeLinear` at its operands.
    fn with_qdq(
        &mut self,
        product: &Product<'_>,
        codes: Option<&Codes>,
        activation: Option<ActivationQuantization>,
        other: Option<ActivationQuantization>,
    ) -> Result<String, DeployError> {
        let mut x = self.operand(product.x)?;
        let mut scale = None;
        if let Some(how) = activation {
            let quantized = self.quantize(x, how, false);
            scale = quantized.known_scale;
            x = self.dequantize(quantized);
        }
        let mut weight = match codes {
            Some(codes) => self.dequantized_weight(product.weight, codes),
            None => self.operand(product.weight)?,
        };
        if let (Some(how), None) = (other, codes) {
            let quantized = self.quantize(weight, how, false);
            weight = self.dequantize(quantized);
        }
        let bias = match product.bias {
            None => None,
            Some(bias) => {
                let scales = codes.and_then(|codes| codes.scales_along(product.channel_axis()));
                let grid: Option<Vec<f32>> = scales
                    .zip(scale)
                    .map(|(scales, x)| scales.iter().map(|scale| scale * x).collect());
                match grid.and_then(|grid| self.bias_codes(bias, &grid)) {
                    Some(name) => Some(name),
                    None => Some(self.operand(bias)?),
                }
            }
        };
        Ok(self.multiply(product, x, weight, bias))
    }

    /// A bias in I32, in steps of the products; `None` where it does not fit, or is no constant.
    fn bias_codes(&mut self, bias: &TensorIr, grid: &[f32]) -> Option<String> {
        let values = self.constant(bias)?.floats();
        if values.len() != grid.len() {
            return None;
        }
        let mut codes = Vec::with_capacity(values.len());
        for (value, step) in values.iter().zip(grid) {
            let code = f64::from(*value) / f64::from(*step);
            if !(code.abs() < f64::from(i32::MAX)) {
                return None;
            }
            codes.push(code.round_ties_even() as i32);
        }
        let name = self.constant_name(bias.id);
        let bytes = codes.iter().flat_map(|code| code.to_le_bytes()).collect();
        let of = [values.len()];
        let codes = self.initializer(&format!("{name}.codes"), ElementType::I32, &of, bytes);
        let scale = self.floats(&format!("{name}.scale"), &of, grid);
        let axis = vec![Attribute::Int("axis", 0)];
        Some(self.emit("DequantizeLinear", vec![codes, scale], &name, axis))
    }

    /// The codes of a weight, and the node that dequantizes them.
    fn dequantized_weight(&mut self, tensor: &TensorIr, codes: &Codes) -> String {
        let key = format!("qdq {}", tensor.id);
        self.written_once(key, |writer| {
            let path = &codes.path;
            let element = code_type(codes);
            let bytes = pack(&codes.codes, element);
            let name = format!("{path}.codes");
            let stored = writer.initializer(&name, element, &codes.shape, bytes);
            let (shape, attributes) = match &codes.scale {
                Spread::Tensor(_) => (vec![], vec![]),
                Spread::Axis(axis, scales) => (
                    vec![scales.len()],
                    vec![Attribute::Int("axis", *axis as i64)],
                ),
                Spread::Blocks(block, _) => {
                    let rank = codes.shape.len();
                    let mut shape = codes.shape.clone();
                    shape[rank - 2] /= block;
                    let attributes = vec![
                        Attribute::Int("axis", rank as i64 - 2),
                        Attribute::Int("block_size", *block as i64),
                    ];
                    (shape, attributes)
                }
            };
            let scales = match &codes.scale {
                Spread::Tensor(scale) => vec![*scale],
                Spread::Axis(_, scales) | Spread::Blocks(_, scales) => scales.clone(),
            };
            let mut inputs = vec![
                stored,
                writer.floats(&format!("{path}.scale"), &shape, &scales),
            ];
            if !codes.is_symmetric() {
                let zeros = pack(&codes.zero_point, element);
                let name = format!("{path}.zero_point");
                inputs.push(writer.initializer(&name, element, &shape, zeros));
            }
            writer.emit("DequantizeLinear", inputs, path, attributes)
        })
    }

    /// In integers: the result and how, or why not.
    #[allow(clippy::type_complexity)]
    fn integer(
        &mut self,
        product: &Product<'_>,
        codes: &Codes,
        activation: Option<ActivationQuantization>,
    ) -> Result<Result<(String, Execution), &'static str>, DeployError> {
        let Some(how) = activation else {
            return self.weight_only(product, codes);
        };
        let Some(scales) = codes.scales_along(product.channel_axis()) else {
            return Ok(Err(
                "its weight has other scales than one for each output channel",
            ));
        };
        if !codes.is_symmetric() || codes.largest() > 127 && codes.signed {
            return Ok(Err("its weight has a zero point"));
        }
        if codes.largest() > 127 {
            return Ok(Err("its weight has unsigned codes of 8 bits"));
        }
        // Codes of an activation are at most 255, and the sums stay in I32 with their zero points.
        let terms = codes.codes.len() / scales.len().max(1);
        if terms as i64 * 255 * i64::from(codes.largest().max(1)) > i64::from(i32::MAX) {
            return Ok(Err("its sums may leave 32 bits"));
        }
        let ones = codes.shape.len().saturating_sub(2);
        let is_matrix = codes.shape[..ones].iter().all(|size| *size == 1);
        if product.convolution.is_none() && !is_matrix {
            return Ok(Err("its weight is a stack of matrices"));
        }
        if product.convolution.is_some() && self.limits.no_convolutions {
            return Ok(Err("the engine's integer convolutions are not exact"));
        }
        let x = self.operand(product.x)?;
        let quantized = self.quantize(x, how, true);
        let shape = match product.convolution {
            Some(_) => codes.shape.clone(),
            None => codes.shape[ones..].to_vec(),
        };
        let channels = product.out.shape[product.out.shape.num_dims() - 1 - product.axes_behind()];
        let mut behind = vec![scales.len()];
        behind.extend(vec![1; product.axes_behind()]);
        let parts = self.integer_parts(product, codes, &shape);
        let mut sum = None;
        for part in parts {
            let inputs = vec![quantized.codes.clone(), part, quantized.zero_point.clone()];
            let name = match &product.convolution {
                Some(attributes) => {
                    self.emit("ConvInteger", inputs, "accumulators", attributes.clone())
                }
                None => self.emit("MatMulInteger", inputs, "accumulators", vec![]),
            };
            sum = Some(match sum {
                None => name,
                Some(before) => self.emit("Add", vec![before, name], "accumulators", vec![]),
            });
        }
        debug_assert_eq!(channels, scales.len());
        let sum = self.cast_to(sum.expect("at least one part"), ElementType::F32);
        let path = &codes.path;
        let steps = match quantized.known_scale {
            Some(x) => {
                let steps: Vec<f32> = scales.iter().map(|scale| scale * x).collect();
                self.floats(&format!("{path}.step"), &behind, &steps)
            }
            None => {
                let scales = self.floats(&format!("{path}.scale"), &behind, &scales);
                self.emit("Mul", vec![quantized.scale, scales], "step", vec![])
            }
        };
        let mut name = self.emit("Mul", vec![sum, steps], "Mul", vec![]);
        if let Some(bias) = product.bias {
            let bias = match (product.axes_behind(), self.constant(bias)) {
                (0, _) | (_, None) => self.operand(bias)?,
                (_, Some(values)) => {
                    let values = values.floats();
                    let of = self.constant_name(bias.id);
                    self.floats(&of, &behind, &values)
                }
            };
            name = self.emit("Add", vec![name, bias], "Add", vec![]);
        }
        Ok(Ok((name, Execution::Integer)))
    }

    /// The codes as bytes. Where products of a pair of codes may not exceed 16 bits, codes of more
    /// than 7 bits are two addends of 7.
    fn integer_parts(
        &mut self,
        product: &Product<'_>,
        codes: &Codes,
        shape: &[usize],
    ) -> Vec<String> {
        let path = &codes.path;
        let parts: Vec<Vec<i32>> = match self.limits.narrow_products && codes.largest() > 64 {
            false => vec![codes.codes.clone()],
            true => {
                let half = codes.codes.iter().map(|code| code >> 1);
                let rest = codes.codes.iter().map(|code| code - (code >> 1));
                vec![half.collect(), rest.collect()]
            }
        };
        let tensor = product.weight.id;
        let mut names = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let key = format!("integer {tensor} {number}");
            let name = self.written_once(key, |writer| {
                let bytes = pack(part, ElementType::I8);
                writer.initializer(&format!("{path}.codes"), ElementType::I8, shape, bytes)
            });
            names.push(name);
        }
        names
    }

    /// Floats times codes of 4 bits, in blocks along the rows.
    #[allow(clippy::type_complexity)]
    fn weight_only(
        &mut self,
        product: &Product<'_>,
        codes: &Codes,
    ) -> Result<Result<(String, Execution), &'static str>, DeployError> {
        let [rows, columns] = codes.shape[..] else {
            return Ok(Err("its input is not quantized"));
        };
        if product.convolution.is_some() || codes.bits > 4 || !codes.is_symmetric() || !codes.signed
        {
            return Ok(Err(
                "its input is not quantized, and only matrices of signed codes of 4 bits are \
                 multiplied by floats",
            ));
        }
        let largest = match &codes.scale {
            Spread::Tensor(_) | Spread::Axis(1, _) => rows,
            Spread::Axis(..) => 1,
            Spread::Blocks(block, _) => *block,
        };
        let blocks = [128, 64, 32, 16];
        let fits = |block: &&usize| largest.is_multiple_of(**block);
        let Some(block) = blocks.iter().find(fits).copied() else {
            return Ok(Err("its rows are not in blocks of 16, 32, 64 or 128"));
        };
        let scale = |row: usize, column: usize| match &codes.scale {
            Spread::Tensor(scale) => *scale,
            Spread::Axis(_, scales) => scales[column],
            Spread::Blocks(of, scales) => scales[row / of * columns + column],
        };
        let key = format!("blocks {}", product.weight.id);
        let path = codes.path.clone();
        let stored = self.written_once(key, |writer| {
            let mut bytes = Vec::with_capacity(codes.codes.len() / 2);
            for column in 0..columns {
                for row in (0..rows).step_by(2) {
                    let nibble = |row: usize| (codes.codes[row * columns + column] + 8) as u8;
                    bytes.push(nibble(row) | nibble(row + 1) << 4);
                }
            }
            let shape = [columns, rows / block, block / 2];
            writer.initializer(&format!("{path}.codes"), ElementType::U8, &shape, bytes)
        });
        let starts = || (0..rows).step_by(block);
        let scales: Vec<f32> = (0..columns)
            .flat_map(|column| starts().map(move |row| (row, column)))
            .map(|(row, column)| scale(row, column))
            .collect();
        let shape = [columns, rows / block];
        let scales = self.floats(&format!("{path}.scale"), &shape, &scales);
        let x = self.operand(product.x)?;
        let attributes = vec![
            Attribute::Int("K", rows as i64),
            Attribute::Int("N", columns as i64),
            Attribute::Int("bits", 4),
            Attribute::Int("block_size", block as i64),
            Attribute::Int("accuracy_level", 1),
        ];
        let inputs = vec![x, stored, scales];
        let mut name = self.emit_in(MICROSOFT, "MatMulNBits", inputs, "MatMulNBits", attributes);
        if let Some(bias) = product.bias {
            let bias = self.operand(bias)?;
            name = self.emit("Add", vec![name, bias], "Add", vec![]);
        }
        Ok(Ok((name, Execution::WeightsInteger)))
    }

    /// An operand that is not a weight, quantized and dequantized where the plan says so.
    pub(crate) fn activation_operand(
        &mut self,
        node: Node<'_>,
        operand: usize,
        tensor: &TensorIr,
    ) -> Result<String, Unwritten> {
        let name = self.operand(tensor)?;
        let edge = Edge {
            node: node.index(),
            operand,
        };
        match self.quantization.activation(edge, None) {
            Some(how) if (self.form)(node.index()) != Form::Float => {
                let quantized = self.quantize(name, how, false);
                Ok(self.dequantize(quantized))
            }
            _ => Ok(name),
        }
    }

    /// The codes of an activation; as U8 if `unsigned`.
    fn quantize(&mut self, x: String, how: ActivationQuantization, unsigned: bool) -> Quantized {
        let key = format!("quantized {x} {how:?} {unsigned}");
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
        let zero = pack(&[grid.zero_point + shift], element);
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

    fn dequantize(&mut self, x: Quantized) -> String {
        let key = format!("dequantized {}", x.codes);
        let inputs = vec![x.codes, x.scale, x.zero_point];
        self.written_once(key, |writer| {
            writer.emit("DequantizeLinear", inputs, "dequantized", vec![])
        })
    }
}

/// The values that codes stand for.
fn dequantized(codes: &Codes) -> Vec<f32> {
    let shape = &codes.shape;
    let columns = shape.last().copied().unwrap_or(1);
    let value = |(index, code): (usize, &i32)| {
        let group = match &codes.scale {
            Spread::Tensor(_) => 0,
            Spread::Axis(axis, _) => {
                index / shape[axis + 1..].iter().product::<usize>() % shape[*axis]
            }
            Spread::Blocks(block, _) => index / columns / block * columns + index % columns,
        };
        let scale = match &codes.scale {
            Spread::Tensor(scale) => *scale,
            Spread::Axis(_, scales) | Spread::Blocks(_, scales) => scales[group],
        };
        (code - codes.zero_point[group]) as f32 * scale
    };
    codes.codes.iter().enumerate().map(value).collect()
}

fn code_type(codes: &Codes) -> ElementType {
    match (codes.bits <= 4, codes.signed) {
        (true, true) => ElementType::I4,
        (true, false) => ElementType::U4,
        (false, true) => ElementType::I8,
        (false, false) => ElementType::U8,
    }
}

/// Codes as bytes, those of 4 bits two in a byte, low half first.
fn pack(codes: &[i32], element: ElementType) -> Vec<u8> {
    match element {
        ElementType::I4 | ElementType::U4 => codes
            .chunks(2)
            .map(|pair| {
                (pair[0] & 15) as u8 | ((pair.get(1).copied().unwrap_or(0) & 15) << 4) as u8
            })
            .collect(),
        _ => codes.iter().map(|code| *code as u8).collect(),
    }
}
