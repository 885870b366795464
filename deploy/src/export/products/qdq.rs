//! Products between `QuantizeLinear` and `DequantizeLinear`.

use burn::backend::ir::TensorIr;

use super::Product;
use super::codes::{code_type, pack};
use crate::export::Writer;
use crate::export::data::HostTensor;
use crate::export::weights::{Codes, Spread};
use crate::onnx::Attribute;
use crate::{ActivationQuantization, DeployError, ElementType, Form};

impl Writer<'_> {
    /// With `QuantizeLinear` and `DequantizeLinear` at its operands.
    pub(super) fn with_qdq(
        &mut self,
        product: &Product<'_>,
        codes: Option<&Codes>,
        activation: Option<ActivationQuantization>,
        other: Option<ActivationQuantization>,
    ) -> Result<String, DeployError> {
        let mut x = self.operand(product.x)?;
        let mut scale = None;
        if let Some(how) = activation {
            scale = match how {
                // Of fewer bits a bias is too fine for the steps of the products.
                ActivationQuantization::Static(grid) if grid.quant_max - grid.quant_min >= 254 => {
                    Some(grid.scale)
                }
                _ => None,
            };
            x = self.round(x, how);
        }
        let mut weight = match codes {
            Some(codes) => match &codes.scale {
                Spread::Axis(axis, scales) if *axis != product.channel_axis() && codes.bits > 4 => {
                    self.scaled_weight(product.weight, codes, *axis, scales)
                }
                _ => self.dequantized_weight(product.weight, codes),
            },
            None => self.operand(product.weight)?,
        };
        if let (Some(how), None) = (other, codes) {
            weight = self.round(weight, how);
        }
        let bias = match product.bias {
            None => None,
            Some(bias) => {
                // Steps of 4 bits are coarse for a bias, and nobody multiplies such codes as integers.
                let fine = codes.filter(|codes| codes.bits > 4 && self.form == Form::Qdq);
                let scales = fine.and_then(|codes| codes.scales_along(product.channel_axis()));
                let grid: Option<Vec<f32>> = scales
                    .zip(scale)
                    .map(|(scales, x)| scales.iter().map(|scale| scale * x).collect());
                let written = grid.map(|grid| self.bias_codes(bias, &grid)).transpose()?;
                match written.flatten() {
                    Some(name) => Some(name),
                    None => Some(self.operand(bias)?),
                }
            }
        };
        Ok(self.multiply(product, x, weight, bias))
    }

    /// A bias in I32, in steps of the products; `None` where it does not fit, or is no constant.
    fn bias_codes(&mut self, bias: &TensorIr, grid: &[f32]) -> Result<Option<String>, DeployError> {
        let values = self.constant(bias).map(HostTensor::floats).transpose()?;
        let Some(values) = values.filter(|values| values.len() == grid.len()) else {
            return Ok(None);
        };
        let mut codes = Vec::with_capacity(values.len());
        for (value, step) in values.iter().zip(grid) {
            let code = f64::from(*value) / f64::from(*step);
            if !(code.abs() < f64::from(i32::MAX)) {
                return Ok(None);
            }
            codes.push(code.round_ties_even() as i32);
        }
        let name = self.constant_name(bias.id);
        let bytes = codes.iter().flat_map(|code| code.to_le_bytes()).collect();
        let of = [values.len()];
        let codes = self.initializer(&format!("{name}.codes"), ElementType::I32, &of, bytes);
        let scale = self.floats(&format!("{name}.scale"), &of, grid);
        let axis = vec![Attribute::Int("axis", 0)];
        let bias = self.emit("DequantizeLinear", vec![codes, scale], &name, axis);
        Ok(Some(bias))
    }

    /// Rows of a quantized table. Where they have a scale each, or all have one, codes are taken and
    /// then dequantized; else the table is dequantized.
    pub(super) fn quantized_rows(
        &mut self,
        table: &TensorIr,
        codes: &Codes,
        indices: String,
        out: &TensorIr,
    ) -> String {
        // `Gather` takes no codes of 4 bits.
        let is_whole = codes.bits > 4;
        match &codes.scale {
            Spread::Tensor(_) if is_whole => {
                let (mut inputs, attributes) = self.stored(table, codes);
                inputs[0] = self.rows(inputs[0].clone(), indices);
                self.emit("DequantizeLinear", inputs, &codes.path, attributes)
            }
            Spread::Axis(0, _) | Spread::Within(..) if is_whole => {
                // `Select` has a list of indices, `Embedding` a matrix.
                let is_list = out.shape.num_dims() == table.shape.num_dims();
                let indices = match is_list {
                    true => indices,
                    false => {
                        let list = self.ints(&[-1]);
                        self.emit("Reshape", vec![indices, list], "Reshape", vec![])
                    }
                };
                let (inputs, attributes) = self.stored(table, codes);
                let mut rows = Vec::with_capacity(inputs.len());
                for input in inputs {
                    rows.push(self.rows(input, indices.clone()));
                }
                let rows = self.emit("DequantizeLinear", rows, &codes.path, attributes);
                match is_list {
                    true => rows,
                    false => self.reshape(rows, out),
                }
            }
            _ => {
                let table = self.dequantized_weight(table, codes);
                self.rows(table, indices)
            }
        }
    }

    /// The codes of a weight, and the nodes that dequantize them.
    ///
    /// ONNX Runtime fuses a product with the node that dequantizes bytes for it, and takes scales of blocks for
    /// those of columns: such a matrix is stored by columns, and turned after it is dequantized. Of a stack of
    /// matrices with a scale for each column it fuses what it then refuses to run: it is stored as one matrix.
    fn dequantized_weight(&mut self, tensor: &TensorIr, codes: &Codes) -> String {
        let (inputs, attributes) = self.stored(tensor, codes);
        let name = self.emit("DequantizeLinear", inputs, &codes.path, attributes);
        match is_turned(codes) {
            false => self.stacked(name, codes),
            true => {
                let order = vec![Attribute::Ints("perm", vec![1, 0])];
                self.emit("Transpose", vec![name], "Transpose", order)
            }
        }
    }

    /// What was stored as one matrix, as the stack that it is.
    fn stacked(&mut self, name: String, codes: &Codes) -> String {
        if !is_flattened(codes) {
            return name;
        }
        let shape: Vec<i64> = codes.shape.iter().map(|size| *size as i64).collect();
        let shape = self.ints(&shape);
        self.emit("Reshape", vec![name, shape], "Reshape", vec![])
    }

    /// A weight of bytes with scales along another axis than that of the output channels.
    ///
    /// ONNX Runtime fuses a product with the node that dequantizes its weight, and takes the scales of rows for
    /// those of columns: here there is no such node.
    fn scaled_weight(
        &mut self,
        tensor: &TensorIr,
        codes: &Codes,
        axis: usize,
        scales: &[f32],
    ) -> String {
        self.written_once(format!("scaled {}", tensor.id), |writer| {
            let (stored, _) = writer.stored(tensor, codes);
            let shift = writer.shift(codes);
            let mut shape = vec![1; codes.shape.len()];
            shape[axis] = scales.len();
            let whole = writer.stacked(stored[0].clone(), codes);
            let mut steps = writer.cast_to(whole, ElementType::F32);
            if shift != 0 || !codes.is_symmetric() {
                let zeros: Vec<f32> = codes
                    .zero_point
                    .iter()
                    .map(|zero| (zero + shift) as f32)
                    .collect();
                let zeros = writer.floats(&format!("{}.zero_point", codes.path), &shape, &zeros);
                steps = writer.emit("Sub", vec![steps, zeros], "Sub", vec![]);
            }
            let scales = writer.floats(&format!("{}.scale", codes.path), &shape, scales);
            writer.emit("Mul", vec![steps, scales], &codes.path, vec![])
        })
    }

    /// What dequantizes a weight: its codes, scales and zero points that are not 0, and the attributes.
    fn stored(&mut self, tensor: &TensorIr, codes: &Codes) -> (Vec<String>, Vec<Attribute>) {
        let path = &codes.path;
        let (shape, attributes) = match &codes.scale {
            Spread::Tensor(_) => (vec![], vec![]),
            Spread::Axis(axis, scales) => {
                let axis = match is_flattened(codes) {
                    true => 1,
                    false => *axis as i64,
                };
                (vec![scales.len()], vec![Attribute::Int("axis", axis)])
            }
            Spread::Within(block, _) => {
                let last = codes.shape.len() - 1;
                let mut shape = codes.shape.clone();
                shape[last] /= block;
                let attributes = vec![
                    Attribute::Int("axis", last as i64),
                    Attribute::Int("block_size", *block as i64),
                ];
                (shape, attributes)
            }
            Spread::Blocks(block, _) => {
                let rank = codes.shape.len();
                let mut shape = codes.shape.clone();
                shape[rank - 2] /= block;
                let mut axis = rank as i64 - 2;
                if is_turned(codes) {
                    shape.reverse();
                    axis = 1;
                }
                let attributes = vec![
                    Attribute::Int("axis", axis),
                    Attribute::Int("block_size", *block as i64),
                ];
                (shape, attributes)
            }
        };
        let scales = codes.scale.scales();
        let turn = is_turned(codes);
        let columns = codes.shape.last().copied().unwrap_or(1);
        let mut of = codes.shape.clone();
        if turn {
            of.reverse();
        }
        if is_flattened(codes) {
            of = vec![codes.codes.len() / columns.max(1), columns];
        }
        let joined = self.written_once(format!("stored {}", tensor.id), |writer| {
            let shift = writer.shift(codes);
            let element = match shift {
                0 => code_type(codes),
                _ => ElementType::U8,
            };
            let shifted = |numbers: &[i16]| -> Vec<i16> {
                let numbers = by_columns(numbers, columns, turn).into_iter();
                numbers.map(|code| code + shift).collect()
            };
            let bytes = pack(&shifted(&codes.codes), element);
            let scales = by_columns(scales, columns, turn);
            let mut names = vec![
                writer.initializer(&format!("{path}.codes"), element, &of, bytes),
                writer.floats(&format!("{path}.scale"), &shape, &scales),
            ];
            if shift != 0 || !codes.is_symmetric() {
                let zeros = match codes.is_symmetric() {
                    true => vec![shift; scales.len()],
                    false => shifted(&codes.zero_point),
                };
                let zeros = pack(&zeros, element);
                let name = format!("{path}.zero_point");
                names.push(writer.initializer(&name, element, &shape, zeros));
            }
            names.join("\n")
        });
        (joined.split('\n').map(String::from).collect(), attributes)
    }

    /// What is added to codes that are stored: signed bytes with no more than a scale for each channel are without
    /// a sign, around 128.
    ///
    /// Without VNNI onnxruntime adds pairs of products with signed bytes in 16 bits, where they saturate. Blocks are
    /// not multiplied in integers.
    fn shift(&self, codes: &Codes) -> i16 {
        match (code_type(codes), &codes.scale) {
            (ElementType::I8, Spread::Tensor(_) | Spread::Axis(..)) if self.form == Form::Qdq => {
                128
            }
            _ => 0,
        }
    }
}

/// Whether a stack of matrices is stored as one of them below another: with a scale for each of their columns.
fn is_flattened(codes: &Codes) -> bool {
    let rank = codes.shape.len();
    matches!(codes.scale, Spread::Axis(axis, _) if rank > 2 && axis + 1 == rank)
}

/// Whether a matrix is stored by columns: one of bytes in blocks.
fn is_turned(codes: &Codes) -> bool {
    matches!(codes.scale, Spread::Blocks(..)) && codes.bits > 4 && codes.shape.len() == 2
}

/// The numbers of a matrix, column by column if `turn`.
fn by_columns<T: Copy>(numbers: &[T], columns: usize, turn: bool) -> Vec<T> {
    match turn {
        false => numbers.to_vec(),
        true => (0..columns)
            .flat_map(|column| numbers.iter().skip(column).step_by(columns).copied())
            .collect(),
    }
}
