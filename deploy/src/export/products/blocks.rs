//! Products with codes in blocks along the rows.

use super::activation::Reader;
use super::codes::pack;
use super::integer::fit_sums;
use super::{Execution, OrWhyNot, Product};
use crate::export::weights::{Codes, Spread};
use crate::export::{Limits, Writer};
use crate::onnx::{Attribute, ENGINE, MICROSOFT};
use crate::{ActivationQuantization, ElementType};

impl Writer<'_> {
    /// Times codes in blocks along the rows: floats; or codes, where `how` they are made is known and the engine
    /// multiplies such.
    pub(super) fn in_blocks(
        &mut self,
        product: &Product<'_>,
        codes: &Codes,
        how: Option<ActivationQuantization>,
    ) -> OrWhyNot {
        let why = match how {
            None => "its input is not quantized",
            Some(_) => {
                "its weight has a zero point, or other scales than one for each output channel"
            }
        };
        let &[rows, columns] = &codes.shape[..] else {
            return Ok(Err(why));
        };
        let Limits {
            narrow_blocks,
            no_zero_points,
            ..
        } = self.limits;
        let bits = if codes.bits <= 4 { 4 } else { 8 };
        // Those without a sign are stored as they are.
        let stored = |code: i16| match (codes.signed, bits) {
            (false, _) => code,
            (true, 4) => code + 8,
            (true, _) => code + 128,
        };
        let has_zero_points = !codes.signed || !codes.is_symmetric();
        if product.convolution.is_some()
            || narrow_blocks && bits > 4
            || no_zero_points && has_zero_points
        {
            return Ok(Err(why));
        }
        let largest = match &codes.scale {
            Spread::Tensor(_) | Spread::Axis(1, _) => rows,
            Spread::Axis(..) | Spread::Within(..) => 1,
            Spread::Blocks(block, _) => *block,
        };
        let block = match narrow_blocks {
            false => Some(largest).filter(|block| bits == 8 || block.is_multiple_of(2)),
            true => [128, 64, 32, 16]
                .into_iter()
                .find(|block| largest.is_multiple_of(*block)),
        };
        let Some(block) = block else {
            return Ok(Err("its rows are not in blocks of 16, 32, 64 or 128"));
        };
        let group = |row: usize, column: usize| codes.group(row * columns + column);
        let element = match bits {
            4 => ElementType::U4,
            _ => ElementType::U8,
        };
        let key = format!("blocks {}", product.weight.id);
        let path = codes.path.clone();
        let starts = || (0..rows).step_by(block);
        let operands = self.written_once(key, |writer| {
            let mut bytes = Vec::with_capacity(codes.codes.len() * bits / 8);
            let (mut scales, mut zeros) = (Vec::new(), Vec::new());
            for column in 0..columns {
                let of_column = (0..rows).map(|row| stored(codes.codes[row * columns + column]));
                bytes.extend(pack(&of_column.collect::<Vec<_>>(), element));
                scales.extend(starts().map(|row| codes.scale.scales()[group(row, column)]));
                let of_column = starts().map(|row| stored(codes.zero_point[group(row, column)]));
                zeros.extend(pack(&of_column.collect::<Vec<_>>(), element));
            }
            let shape = [columns, rows / block, block * bits / 8];
            let mut names = vec![
                writer.unshared(&format!("{path}.codes"), ElementType::U8, &shape, bytes),
                writer.floats(&format!("{path}.scale"), &[columns, rows / block], &scales),
            ];
            if has_zero_points {
                let (name, shape) = (format!("{path}.zero_point"), [zeros.len()]);
                names.push(writer.initializer(&name, ElementType::U8, &shape, zeros));
            }
            names.join("\n")
        });
        let operands = operands.split('\n').map(String::from);
        let x = self.operand(product.x)?;
        let mut attributes = vec![
            Attribute::Int("K", rows as i64),
            Attribute::Int("N", columns as i64),
            Attribute::Int("bits", bits as i64),
            Attribute::Int("block_size", block as i64),
        ];
        let in_pairs = block == rows || block.is_multiple_of(2);
        let fit = fit_sums(block, 1 << (bits - 1));
        let how = how.filter(|_| self.limits.engine_operators && in_pairs && fit);
        let (mut name, execution) = match how {
            None => {
                attributes.push(Attribute::Int("accuracy_level", 1));
                let inputs = [x].into_iter().chain(operands).collect();
                let operator = "MatMulNBits";
                let name = self.emit_in(MICROSOFT, operator, inputs, operator, attributes);
                (name, Execution::WeightsInteger)
            }
            Some(how) => {
                let quantized = self.quantize(x, how, Reader::Rows);
                let inputs = [quantized.codes].into_iter().chain(operands).collect();
                let operator = "MatMulIntegerBlocks";
                let sums = self.emit_in(ENGINE, operator, inputs, "sums", attributes);
                let step = match how {
                    ActivationQuantization::Static(grid) => grid.scale,
                    ActivationQuantization::Dynamic(_) => 1.0,
                };
                let path = format!("{path}.step");
                let mut steps = self.floats(&path, &[columns], &vec![step; columns]);
                if let ActivationQuantization::Dynamic(_) = how {
                    steps = self.emit("Mul", vec![quantized.scale, steps], "step", vec![]);
                }
                let name = self.emit("Mul", vec![sums, steps], "Mul", vec![]);
                (name, Execution::Integer)
            }
        };
        if let Some(bias) = product.bias {
            let bias = self.operand(bias)?;
            name = self.emit("Add", vec![name, bias], "Add", vec![]);
        }
        Ok(Ok((name, execution)))
    }
}
