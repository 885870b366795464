//! Products of codes.

use super::activation::{Reader, ZeroPoint};
use super::{Execution, OrWhyNot, Product};
use crate::export::Writer;
use crate::export::weights::Codes;
use crate::{ActivationQuantization, ElementType};

/// Codes of a weight as they are stored.
struct Part {
    stored: String,
    /// Of each code.
    of: fn(i16) -> i16,
}

/// Whether sums of products with codes of an activation, which are at most 255, stay in I32 with their zero points
/// and a bias of a quarter of it.
pub(super) fn fit_sums(terms: usize, largest: i64) -> bool {
    terms as i64 * 255 * largest.max(1) <= 3 << 29
}

impl Writer<'_> {
    /// In integers: the result and how, or why not.
    pub(super) fn integer(
        &mut self,
        product: &Product<'_>,
        codes: &Codes,
        activation: Option<ActivationQuantization>,
    ) -> OrWhyNot {
        if product.is_transposed {
            return Ok(Err("there are no transposed convolutions in integers"));
        }
        let Some(how) = activation else {
            return self.in_blocks(product, codes, None);
        };
        let scales = codes.scales_along(product.channel_axis());
        let Some(scales) = scales.filter(|_| codes.is_symmetric() && codes.fit_signed_bytes())
        else {
            return self.in_blocks(product, codes, activation);
        };
        let terms = codes.codes.len() / scales.len().max(1);
        if !fit_sums(terms, i64::from(codes.largest())) {
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
        let per_token = matches!(how, ActivationQuantization::Dynamic(grid) if grid.per_token);
        let reader = match product.convolution {
            Some(_) if per_token => {
                return Ok(Err(
                    "a convolution mixes rows of its input, which have a scale each",
                ));
            }
            Some(_) => Reader::Windows,
            None => Reader::Rows,
        };
        let x = self.operand(product.x)?;
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
        for Part { stored, of } in parts {
            let mut inputs = vec![quantized.codes.clone(), stored.clone()];
            if let ZeroPoint::Code(zero_point) = &quantized.zero_point {
                inputs.push(zero_point.clone());
            }
            let mut name = match &product.convolution {
                Some(attributes) => {
                    self.emit("ConvInteger", inputs, "accumulators", attributes.clone())
                }
                None => self.emit("MatMulInteger", inputs, "accumulators", vec![]),
            };
            if let ZeroPoint::OfRows(zero_point) = &quantized.zero_point {
                let zero_point = self.cast_to(zero_point.clone(), ElementType::I32);
                let key = format!("sums {stored}");
                let sums = self.written_once(key, |writer| writer.column_sums(codes, of));
                let too_much = vec![zero_point, sums];
                let too_much = self.emit("Mul", too_much, "accumulators", vec![]);
                name = self.emit("Sub", vec![name, too_much], "accumulators", vec![]);
            }
            sum = Some(match sum {
                None => name,
                Some(before) => self.emit("Add", vec![before, name], "accumulators", vec![]),
            });
        }
        debug_assert_eq!(channels, scales.len());
        let mut sum = self.cast_to(sum.expect("at least one part"), ElementType::F32);
        let path = &codes.path;
        let steps = match how {
            ActivationQuantization::Static(grid) => {
                let steps: Vec<f32> = scales.iter().map(|scale| scale * grid.scale).collect();
                self.floats(&format!("{path}.step"), &behind, &steps)
            }
            ActivationQuantization::Dynamic(_) => {
                let scales = self.floats(&format!("{path}.scale"), &behind, &scales);
                if per_token && !self.limits.engine_operators {
                    // One after the other: together they are as many as the sums.
                    sum = self.emit("Mul", vec![sum, quantized.scale], "Mul", vec![]);
                    scales
                } else {
                    self.emit("Mul", vec![quantized.scale, scales], "step", vec![])
                }
            }
        };
        let mut name = self.emit("Mul", vec![sum, steps], "Mul", vec![]);
        if let Some(bias) = product.bias {
            let bias = match (product.axes_behind(), self.constant(bias)) {
                (0, _) => self.operand(bias)?,
                // The axis of the channels is not the last one of the sums.
                (_, None) => {
                    let bias = self.operand(bias)?;
                    let along: Vec<i64> = behind.iter().map(|size| *size as i64).collect();
                    let along = self.ints(&along);
                    self.emit("Reshape", vec![bias, along], "Reshape", vec![])
                }
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

    /// The codes as bytes, and which part of each code they are. Where products of a pair of codes may not exceed
    /// 16 bits, codes of more than 7 bits are two addends of 7.
    fn integer_parts(
        &mut self,
        product: &Product<'_>,
        codes: &Codes,
        shape: &[usize],
    ) -> Vec<Part> {
        let path = &codes.path;
        let of_codes: &[fn(i16) -> i16] = match self.limits.narrow_products && codes.largest() > 64
        {
            false => &[|code| code],
            true => &[|code| code >> 1, |code| code - (code >> 1)],
        };
        let tensor = product.weight.id;
        let mut parts = Vec::new();
        for (number, of) in of_codes.iter().enumerate() {
            let key = format!("integer {tensor} {number}");
            let name = self.written_once(key, |writer| {
                let bytes = codes.codes.iter().map(|code| of(*code) as u8).collect();
                writer.unshared(&format!("{path}.codes"), ElementType::I8, shape, bytes)
            });
            parts.push(Part {
                stored: name,
                of: *of,
            });
        }
        parts
    }

    /// Sums of parts of the codes of a matrix.
    fn column_sums(&mut self, codes: &Codes, of: fn(i16) -> i16) -> String {
        let columns = codes.shape.last().copied().unwrap_or(1).max(1);
        let mut sums = vec![0_i32; columns];
        for row in codes.codes.chunks_exact(columns) {
            for (sum, code) in sums.iter_mut().zip(row) {
                *sum += i32::from(of(*code));
            }
        }
        let bytes = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        self.initializer(
            &format!("{}.sums", codes.path),
            ElementType::I32,
            &[columns],
            bytes,
        )
    }
}
