//! A weight as a matrix of packed codes.

use burn_lean_kernels::{Blocks, Epilogue, FloatMatrix, IntegerMatrix, KernelError};

use crate::codes::product::Factors;
use crate::format::groups::Groups;
use crate::{NumberFormat, QuantizedTensor};

/// A matrix `[inputs, outputs]`, packed.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(super) shape: [usize; 2],
    pub(super) matrix: Matrix,
    /// Of each column, where the matrix does not have them.
    scale: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(super) enum Matrix {
    /// Multiplied by floats.
    Floats(FloatMatrix),
    /// Multiplied by integers.
    Integers(IntegerMatrix),
}

/// Codes with a sign, and what turns them into values: `code · scale − offset`.
pub(super) struct Signed {
    pub(super) codes: Vec<i8>,
    pub(super) bits: u8,
    /// Rows that share a scale.
    pub(super) rows: usize,
    /// `[blocks, outputs]`
    pub(super) scales: Vec<f32>,
    /// As many; `None` where they are all 0.
    pub(super) offsets: Option<Vec<f32>>,
}

/// Codes with a sign, in the order of a quantized tensor; scales and offsets are of its groups.
pub(super) struct Codes {
    pub(super) codes: Vec<i8>,
    pub(super) bits: u8,
    pub(super) offsets: Option<Vec<f32>>,
}

impl Codes {
    /// # Errors
    ///
    /// Why there are no such codes.
    pub(super) fn of(quantized: &QuantizedTensor) -> Result<Self, String> {
        let format = &quantized.scheme().format;
        let NumberFormat::Int { bits, signed, .. } = *format else {
            return Err(format!("kernels multiply integers, not {format}"));
        };
        let middle = match signed {
            true => 0,
            false => 1_i16 << (bits - 1),
        };
        let codes = quantized.codes().iter().map(|code| (code - middle) as i8);
        let pairs = quantized.zero_point().iter().zip(quantized.scale());
        let distances = pairs.map(|(zero, scale)| (zero - f32::from(middle), *scale));
        let offsets: Vec<f32> = distances
            .map(|(distance, scale)| distance * scale)
            .collect();
        let is_offset = offsets.iter().any(|offset| *offset != 0.0);
        Ok(Self {
            codes: codes.collect(),
            bits: if bits <= 4 { 4 } else { 8 },
            offsets: is_offset.then_some(offsets),
        })
    }
}

impl Signed {
    /// Of a matrix `[inputs, outputs]`.
    ///
    /// # Errors
    ///
    /// Why there are no such codes.
    fn of(quantized: &QuantizedTensor, [inputs, outputs]: [usize; 2]) -> Result<Self, String> {
        let Codes {
            codes,
            bits,
            offsets,
        } = Codes::of(quantized)?;
        let scheme = quantized.scheme();
        let shape = quantized.shape();
        let groups = Groups::new(&scheme.granularity, shape).map_err(|error| error.to_string())?;
        let counts = scheme
            .group_shape(shape)
            .map_err(|error| error.to_string())?;
        let [blocks, across] = counts[..] else {
            return Err("kernels multiply matrices".into());
        };
        if groups.are_ragged() || inputs == 0 || outputs == 0 {
            return Err("its groups are of several sizes".into());
        }
        let wide = outputs / across;
        let of_blocks = |of_groups: &[f32]| -> Vec<f32> {
            let block = |block: usize| {
                (0..outputs).map(move |column| of_groups[block * across + column / wide])
            };
            (0..blocks).flat_map(block).collect()
        };
        Ok(Self {
            codes,
            bits,
            rows: inputs / blocks,
            scales: of_blocks(quantized.scale()),
            offsets: offsets.as_deref().map(of_blocks),
        })
    }

    fn blocks(&self) -> Blocks<'_> {
        let blocks = Blocks::new(self.rows, &self.scales);
        match &self.offsets {
            Some(offsets) => blocks.with_offsets(offsets),
            None => blocks,
        }
    }
}

impl Packed {
    /// Of the weight `[inputs, outputs]` of a linear layer.
    ///
    /// # Errors
    ///
    /// Why it cannot be.
    pub(crate) fn new(quantized: &QuantizedTensor, factors: Factors) -> Result<Self, String> {
        let [inputs, outputs] = quantized.shape()[..] else {
            return Err("kernels multiply matrices".into());
        };
        let shape = [inputs, outputs];
        let signed = Signed::of(quantized, shape)?;
        Self::of(signed, shape, factors).map_err(|error| error.to_string())
    }

    pub(super) fn of(
        signed: Signed,
        shape: [usize; 2],
        factors: Factors,
    ) -> Result<Self, KernelError> {
        let [inputs, outputs] = shape;
        let (codes, bits) = (&signed.codes, signed.bits);
        let is_plain = signed.rows == inputs && signed.offsets.is_none();
        let (matrix, scale) = match factors {
            Factors::Floats => {
                let matrix = FloatMatrix::of_codes(codes, shape, bits, signed.blocks())?;
                (Matrix::Floats(matrix), None)
            }
            Factors::Integers | Factors::IntegersOfRows if is_plain => {
                let matrix = IntegerMatrix::new(codes, inputs, outputs, bits)?;
                (Matrix::Integers(matrix), Some(signed.scales))
            }
            Factors::Integers | Factors::IntegersOfRows => {
                let matrix = IntegerMatrix::in_blocks(codes, shape, bits, signed.blocks())?;
                (Matrix::Integers(matrix), None)
            }
        };
        Ok(Self {
            shape,
            matrix,
            scale,
        })
    }

    /// Bytes that it takes in memory.
    pub(crate) fn bytes(&self) -> usize {
        let matrix = match &self.matrix {
            Matrix::Floats(matrix) => matrix.bytes(),
            Matrix::Integers(matrix) => matrix.bytes(),
        };
        matrix + 4 * self.scale.as_ref().map_or(0, Vec::len)
    }

    /// Of all its columns; row scales of integers are still missing.
    pub(super) fn epilogue(&self, bias: Option<&[f32]>) -> Epilogue {
        let mut epilogue = Epilogue::new(self.shape[1]);
        if let Some(scale) = &self.scale {
            epilogue = epilogue.with_scale(scale);
        }
        match bias {
            Some(bias) => epilogue.with_bias(bias),
            None => epilogue,
        }
    }
}
