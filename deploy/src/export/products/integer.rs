//! Products of codes.

use super::activation::Reader;
use super::{Execution, Product};
use crate::export::Writer;
use crate::export::weights::{Codes, Spread};
use crate::onnx::{Attribute, MICROSOFT};
use crate::{ActivationQuantization, DeployError, ElementType};

impl Writer<'_> {
    /// In integers: the result and how, or why not.
    #[allow(clippy::type_complexity)]
    pub(super) fn integer(
        &mut self,
        product: &Product<'_>,
        codes: &Codes,
        activation: Option<ActivationQuantization>,
    ) -> Result<Result<(String, Execution), &'static str>, DeployError> {
        if product.is_transposed {
            return Ok(Err("there are no transposed convolutions in integers"));
        }
        let Some(how) = activation else {
            return self.weight_only(product, codes);
        };
        let Some(scales) = codes.scales_along(product.channel_axis()) else {
            return Ok(Err(
                "its weight has other scales than one for each output channel",
            ));
        };
        if !codes.is_symmetric() {
            return Ok(Err("its weight has a zero point"));
        }
        if !codes.fit_signed_bytes() {
            return Ok(Err("its weight has unsigned codes of 8 bits"));
        }
        // Codes of an activation are at most 255, and the sums stay in I32 with their zero points and a
        // bias of a quarter of it.
        let terms = codes.codes.len() / scales.len().max(1);
        if terms as i64 * 255 * i64::from(codes.largest().max(1)) > 3 << 29 {
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
        if product.axes_behind() > 2 && self.limits.no_volumes {
            return Ok(Err(
                "the engine's integer convolutions are along one or two axes",
            ));
        }
        let x = self.operand(product.x)?;
        let reader = match product.convolution {
            Some(_) => Reader::Windows,
            None => Reader::Rows,
        };
        let quantized = self.quantize(x, how, reader);
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
                    let values = values.floats()?;
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
        let whole = |code: i16| code;
        let half = |code: i16| code >> 1;
        let rest = |code: i16| code - (code >> 1);
        let parts: &[&dyn Fn(i16) -> i16] =
            match self.limits.narrow_products && codes.largest() > 64 {
                false => &[&whole],
                true => &[&half, &rest],
            };
        let tensor = product.weight.id;
        let mut names = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let key = format!("integer {tensor} {number}");
            let name = self.written_once(key, |writer| {
                let bytes = codes.codes.iter().map(|code| part(*code) as u8).collect();
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
        let narrow = self.limits.narrow_blocks;
        let bits = if codes.bits <= 4 { 4 } else { 8 };
        let wide = narrow && bits > 4 || !codes.fit_signed_bytes();
        if product.convolution.is_some() || wide || !codes.is_symmetric() || !codes.signed {
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
        let block = match narrow {
            false => Some(largest).filter(|block| bits == 8 || block.is_multiple_of(2)),
            true => [128, 64, 32, 16]
                .into_iter()
                .find(|block| largest.is_multiple_of(*block)),
        };
        let Some(block) = block else {
            return Ok(Err("its rows are not in blocks of 16, 32, 64 or 128"));
        };
        let scale = |row: usize, column: usize| match &codes.scale {
            Spread::Tensor(scale) => *scale,
            Spread::Axis(0, scales) => scales[row],
            Spread::Axis(_, scales) => scales[column],
            Spread::Blocks(of, scales) => scales[row / of * columns + column],
        };
        let key = format!("blocks {}", product.weight.id);
        let path = codes.path.clone();
        let stored = self.written_once(key, |writer| {
            let mut bytes = Vec::with_capacity(codes.codes.len() * bits / 8);
            for column in 0..columns {
                let code = |row: usize| codes.codes[row * columns + column];
                match bits {
                    8 => bytes.extend((0..rows).map(|row| (code(row) + 128) as u8)),
                    _ => bytes.extend(
                        (0..rows)
                            .step_by(2)
                            .map(|row| (code(row) + 8) as u8 | ((code(row + 1) + 8) as u8) << 4),
                    ),
                }
            }
            let shape = [columns, rows / block, block * bits / 8];
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
            Attribute::Int("bits", bits as i64),
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
}
