//! Scales of codes.

use std::ops::Range;

use crate::KernelError;
use crate::error::{expect, expect_bits};
use crate::layout::{Lines, WIDTH, lines};

/// Scales of codes, of which each `rows` rows of a column share one. A code stands for `code · scale − offset`.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// Rows of a block, which divide those of the matrix.
    rows: usize,
    /// `[blocks, columns]`
    scales: &'a [f32],
    /// As many; the code of zero times the scale. `None`: that code is 0.
    offsets: Option<&'a [f32]>,
}

impl<'a> Blocks<'a> {
    /// Codes of which 0 stands for zero.
    pub fn new(rows: usize, scales: &'a [f32]) -> Self {
        Self {
            rows,
            scales,
            offsets: None,
        }
    }

    /// With what is subtracted from codes times scales.
    pub fn with_offsets(self, offsets: &'a [f32]) -> Self {
        Self {
            offsets: Some(offsets),
            ..self
        }
    }
}

/// The same in panels, `[panel, block]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Packed {
    scales: Lines<f32, WIDTH>,
    offsets: Option<Lines<f32, WIDTH>>,
    /// Rows of a block.
    pub(crate) rows: usize,
}

/// Scales and offsets of a narrow panel, filled up.
#[derive(Default)]
pub(crate) struct Filled {
    scales: Vec<[f32; WIDTH]>,
    offsets: Vec<[f32; WIDTH]>,
}

impl Packed {
    /// Of row-major codes of `bits` bits.
    pub(crate) fn new(
        codes: &[i8],
        [rows, columns]: [usize; 2],
        bits: u8,
        blocks: Blocks<'_>,
    ) -> Result<Self, KernelError> {
        expect("codes", rows * columns, codes.len())?;
        expect_bits(codes, bits)?;
        let block = blocks.rows;
        if block == 0 || !rows.is_multiple_of(block) {
            return Err(KernelError::Block { block, rows });
        }
        let count = rows / block;
        expect("scales", count * columns, blocks.scales.len())?;
        if let Some(offsets) = blocks.offsets {
            expect("offsets", count * columns, offsets.len())?;
        }
        let pack = |values: &[f32]| lines(values, count, columns, |value| value);
        Ok(Self {
            scales: pack(blocks.scales),
            offsets: blocks.offsets.map(pack),
            rows: block,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.scales.bytes() + self.offsets.as_ref().map_or(0, Lines::bytes)
    }

    /// Whether codes of a matrix of so many rows can be in eighths of words: eight rows are of one block.
    pub(crate) fn take_eighths(&self, rows: usize, bits: u8) -> bool {
        bits == 4 && (self.rows == rows || self.rows.is_multiple_of(8))
    }

    /// The sums of the blocks of a left row, where offsets are multiplied by them.
    pub(crate) fn totals<T>(&self, row: &[T], sum: impl Fn(&[T]) -> f32, into: &mut Vec<f32>) {
        if self.offsets.is_some() {
            into.extend(row.chunks(self.rows).map(sum));
        }
    }

    /// Fills up those of a narrow panel.
    #[inline(always)]
    pub(crate) fn fill_up(&self, panel: usize, blocks: Range<usize>, into: &mut Filled) {
        self.scales.fill_up(panel, blocks.clone(), &mut into.scales);
        if let Some(offsets) = &self.offsets {
            offsets.fill_up(panel, blocks, &mut into.offsets);
        }
    }

    /// Scale and offset of each block.
    #[inline(always)]
    pub(crate) fn of<'a>(
        &'a self,
        panel: usize,
        blocks: Range<usize>,
        filled: &'a Filled,
    ) -> impl Iterator<Item = (&'a [f32; WIDTH], Option<&'a [f32; WIDTH]>)> {
        let scales = self.scales.of(panel, blocks.clone(), &filled.scales);
        let offsets = match &self.offsets {
            Some(offsets) => offsets.of(panel, blocks, &filled.offsets),
            None => &[],
        };
        let offsets = offsets.iter().map(Some).chain(std::iter::repeat(None));
        scales.iter().zip(offsets)
    }
}
