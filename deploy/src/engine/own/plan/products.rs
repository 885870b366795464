//! Products, with their weights packed.

use std::sync::Arc;

use burn_lean_kernels::{Blocks, Depthwise, FloatMatrix, IntegerMatrix, KernelError, SparseMatrix};

use super::tail::{Sums, Tail};
use super::{Planner, refused};
use crate::engine::own::Operation;
use crate::engine::own::attributes::{geometry, int};
use crate::engine::own::convolution::{Convolution, Kernel};
use crate::engine::own::linear::{Linear, Matrix, Undecided};
use crate::engine::report::{SparseLayer, SparseOutcome};
use crate::{DeployError, Initializer, OnnxNode};

/// Columns from which on a matrix may be packed for many rows.
const WIDE: usize = 128;

/// A matrix of codes of which each `block` rows of a column share a scale, all row-major.
struct InBlocks {
    codes: Vec<i8>,
    bits: u8,
    block: usize,
    scales: Vec<f32>,
    offsets: Option<Vec<f32>>,
}

impl<'a> Planner<'a> {
    pub(super) fn linear(
        &mut self,
        node: &'a OnnxNode,
        out: &'a str,
    ) -> Result<Option<(Operation, Tail<'a>)>, DeployError> {
        let Some(weight) = node.inputs.get(1).and_then(|name| self.constants.get(name)) else {
            return Ok(None);
        };
        let shape = match node.operator {
            "MatMulNBits" | "MatMulIntegerBlocks" => match (int(node, "K"), int(node, "N")) {
                (Some(rows), Some(columns)) => vec![rows as usize, columns as usize],
                _ => return Ok(None),
            },
            _ => weight.shape.clone(),
        };
        let [ones @ .., rows, columns] = &shape[..] else {
            return Ok(None);
        };
        let (rows, columns) = (*rows, *columns);
        let sums = match node.operator {
            "MatMulInteger" => Sums::Integers,
            "MatMulIntegerBlocks" => Sums::Steps,
            _ => Sums::Floats,
        };
        let axes = ones.len() + 2;
        if ones.iter().any(|one| *one != 1) || rows == 0 || columns == 0 {
            return Ok(None);
        }
        let Some(tail) = self.tail(out, columns, 0, sums) else {
            return Ok(None);
        };
        let packed = match node.operator {
            // With their scales and zero points.
            "MatMulNBits" | "MatMulIntegerBlocks" => node.inputs[1..].join(" "),
            _ => weight.name.clone(),
        };
        let key = format!("{} {packed}", node.operator);
        let matrix = match self.packed.get(&key) {
            Some(known) => known.clone(),
            None => {
                let Some(matrix) = self.pack(node, weight, [rows, columns], sums)? else {
                    return Ok(None);
                };
                self.resident_bytes += matrix.bytes();
                self.packed.insert(key, matrix.clone());
                matrix
            }
        };
        let ends = self.ends(&weight.name, &tail, 0, columns);
        let linear = Linear {
            weight: matrix,
            ends,
            rank: axes,
        };
        Ok(Some((Operation::Linear(linear), tail)))
    }

    /// A weight in the form in which it is multiplied; `None` for one that is left to rten.
    fn pack(
        &mut self,
        node: &OnnxNode,
        weight: &Initializer,
        [rows, columns]: [usize; 2],
        sums: Sums,
    ) -> Result<Option<Matrix>, DeployError> {
        match node.operator {
            "MatMulInteger" => {
                let Some(codes) = self.constants.bytes(&weight.name) else {
                    return Ok(None);
                };
                let matrix = self.integers(&codes, rows, columns);
                let matrix = matrix.map_err(refused(weight))?;
                Ok(Some(Matrix::Codes(Arc::new(matrix))))
            }
            "MatMulNBits" | "MatMulIntegerBlocks" => {
                let Some(found) = self.blocks(node, rows, columns) else {
                    return Ok(None);
                };
                let (codes, bits, size) = (&found.codes, found.bits, [rows, columns]);
                let mut blocks = Blocks::new(found.block, &found.scales);
                if let Some(offsets) = &found.offsets {
                    blocks = blocks.with_offsets(offsets);
                }
                if sums == Sums::Steps {
                    let matrix = IntegerMatrix::in_blocks(codes, size, bits, blocks);
                    let matrix = matrix.map_err(refused(weight))?;
                    return Ok(Some(Matrix::Codes(Arc::new(matrix))));
                }
                let matrix = FloatMatrix::of_codes(codes, size, bits, blocks);
                let matrix = matrix.map_err(refused(weight))?;
                Ok(Some(Matrix::Floats(Arc::new(matrix))))
            }
            _ => {
                let Some(values) = self.constants.floats(&weight.name) else {
                    return Ok(None);
                };
                let dense = FloatMatrix::new(&values, rows, columns, self.keep.floats);
                let dense = Arc::new(dense.map_err(refused(weight))?);
                let zeros = values.iter().filter(|value| **value == 0.0).count();
                if !self.keep.sparse || 2 * zeros < values.len() {
                    return Ok(Some(Matrix::Floats(dense)));
                }
                let sparse = SparseMatrix::new(&values, rows, columns);
                Ok(Some(Matrix::Undecided(Arc::new(Undecided {
                    name: weight.name.clone(),
                    path: weight.path.clone(),
                    sparse: Arc::new(sparse.map_err(refused(weight))?),
                    dense,
                }))))
            }
        }
    }

    fn integers(
        &mut self,
        codes: &[i8],
        rows: usize,
        columns: usize,
    ) -> Result<IntegerMatrix, KernelError> {
        let bits = width(codes);
        if self.keep.many_rows
            && bits == 8
            && columns >= WIDE
            && let Some(matrix) = IntegerMatrix::for_many_rows(codes, rows, columns)?
        {
            self.has_many_rows = true;
            return Ok(matrix);
        }
        IntegerMatrix::new(codes, rows, columns, bits)
    }

    /// Codes of 4 or 8 bits, column by column, in blocks.
    fn blocks(&self, node: &OnnxNode, rows: usize, columns: usize) -> Option<InBlocks> {
        let (bits, block) = (int(node, "bits")? as u8, int(node, "block_size")? as usize);
        let stored = self.constants.get(&node.inputs[1])?;
        let of_blocks = self.constants.floats(&node.inputs[2])?;
        let blocks = rows / block.max(1);
        // With a sign.
        let code = |bytes: &[u8], at: usize| match bits {
            4 => ((bytes[at / 2] >> (at % 2 * 4)) & 15) as i8 - 8,
            _ => bytes[at].wrapping_sub(128) as i8,
        };
        let mut codes = vec![0_i8; rows * columns];
        for column in 0..columns {
            for row in 0..rows {
                codes[row * columns + column] = code(&stored.bytes, column * rows + row);
            }
        }
        let mut scales = vec![0.0; blocks * columns];
        for (index, scale) in of_blocks.iter().enumerate() {
            scales[index % blocks * columns + index / blocks] = *scale;
        }
        let zeros = node.inputs.get(3).map(|name| self.constants.get(name));
        let offsets = match zeros {
            None => None,
            Some(zeros) => {
                let bytes = &zeros?.bytes;
                // A column begins with a byte of its own.
                let apart = match bits {
                    4 => blocks.next_multiple_of(2),
                    _ => blocks,
                };
                let offset = |at: usize| {
                    let zero = code(bytes, at % columns * apart + at / columns);
                    f32::from(zero) * scales[at]
                };
                Some((0..scales.len()).map(offset).collect())
            }
        };
        Some(InBlocks {
            codes,
            bits,
            block,
            scales,
            offsets,
        })
    }

    pub(super) fn convolution(
        &mut self,
        node: &'a OnnxNode,
        out: &'a str,
    ) -> Result<Option<(Operation, Tail<'a>)>, DeployError> {
        let of_codes = node.operator == "ConvInteger";
        let constants = &self.constants;
        let Some(weight) = node.inputs.get(1).and_then(|name| constants.get(name)) else {
            return Ok(None);
        };
        let (Some(groups), [to, per_group, taps @ ..]) = (int(node, "group"), &weight.shape[..])
        else {
            return Ok(None);
        };
        let (groups, to, per_group) = (groups as usize, *to, *per_group);
        let Some(geometry) = geometry(node, taps) else {
            return Ok(None);
        };
        let sums = if of_codes {
            Sums::Integers
        } else {
            Sums::Floats
        };
        let Some(mut tail) = self.tail(out, to, taps.len(), sums) else {
            return Ok(None);
        };
        if let (false, Some(name)) = (of_codes, node.inputs.get(2)) {
            // The operator's own, before what follows.
            let Some(bias) = constants.floats(name) else {
                return Ok(None);
            };
            tail.bias = Some(match tail.bias.take() {
                None => bias,
                Some(more) => bias.iter().zip(more).map(|(a, b)| a + b).collect(),
            });
        }
        let taps: usize = taps.iter().product();
        let depthwise = groups == to && per_group == 1;
        let (outputs, terms) = (to / groups.max(1), taps * per_group);
        let key = format!("{} {} {groups}", node.operator, weight.name);
        let known = self.kernels.get(&key).cloned();
        // From [outputs, channels, taps] to [taps · channels, outputs].
        let kernel = if let Some(known) = known {
            known
        } else if of_codes {
            let Some(codes) = constants.bytes(&weight.name) else {
                return Ok(None);
            };
            let made = match depthwise {
                true => {
                    let all = turned(&codes, [1, to, 1, taps]).remove(0);
                    Kernel::DepthwiseCodes(depthwise_of(weight, &all, taps, to)?)
                }
                false => {
                    let groups = turned(&codes, [groups, outputs, per_group, taps]);
                    let pack = |codes: &Vec<i8>| self.integers(codes, terms, outputs);
                    let packed = groups.iter().map(pack).collect::<Result<_, _>>();
                    Kernel::Codes(packed.map_err(refused(weight))?)
                }
            };
            self.kernel(key, made)
        } else {
            let Some(values) = constants.floats(&weight.name) else {
                return Ok(None);
            };
            let nonzeros = values.iter().filter(|value| **value != 0.0).count();
            if self.keep.sparse && 2 * nonzeros <= values.len() {
                self.dense_zeros.push(SparseLayer {
                    path: weight.path.clone(),
                    nonzeros,
                    weights: values.len(),
                    outcome: SparseOutcome::NoProduct {
                        reason: "there is no convolution without them",
                    },
                });
            }
            let made = match depthwise {
                true => {
                    let all = turned(&values, [1, to, 1, taps]).remove(0);
                    Kernel::DepthwiseFloats(depthwise_of(weight, &all, taps, to)?)
                }
                false => {
                    let keep = self.keep.floats;
                    let groups = turned(&values, [groups, outputs, per_group, taps]);
                    let pack = |values: &Vec<f32>| FloatMatrix::new(values, terms, outputs, keep);
                    let packed = groups.iter().map(pack).collect::<Result<_, _>>();
                    Kernel::Floats(packed.map_err(refused(weight))?)
                }
            };
            self.kernel(key, made)
        };
        let ends = match depthwise {
            true => vec![self.ends(&weight.name, &tail, 0, to)],
            false => (0..groups)
                .map(|group| self.ends(&weight.name, &tail, group * outputs, outputs))
                .collect(),
        };
        let convolution = Convolution {
            kernel,
            geometry,
            channels: [per_group * groups, to],
            ends,
        };
        Ok(Some((Operation::Convolution(convolution), tail)))
    }

    fn kernel(&mut self, key: String, kernel: Kernel) -> Arc<Kernel> {
        self.resident_bytes += kernel.bytes();
        let kernel = Arc::new(kernel);
        self.kernels.insert(key, kernel.clone());
        kernel
    }
}

fn depthwise_of<T: Copy + Default>(
    weight: &Initializer,
    values: &[T],
    taps: usize,
    channels: usize,
) -> Result<Depthwise<T>, DeployError> {
    Depthwise::new(values, taps, channels).map_err(refused(weight))
}

/// Bits that codes are packed in.
fn width(codes: &[i8]) -> u8 {
    match codes.iter().all(|code| (-8..8).contains(code)) {
        true => 4,
        false => 8,
    }
}

/// For each group, from `[outputs, channels, taps]` to `[taps, channels, outputs]`.
fn turned<T: Copy>(values: &[T], [groups, outputs, channels, taps]: [usize; 4]) -> Vec<Vec<T>> {
    let group = |group: usize| {
        let first = group * outputs * channels * taps;
        let mut all = Vec::with_capacity(outputs * channels * taps);
        for tap in 0..taps {
            for channel in 0..channels {
                for output in 0..outputs {
                    all.push(values[first + (output * channels + channel) * taps + tap]);
                }
            }
        }
        all
    };
    (0..groups).map(group).collect()
}
