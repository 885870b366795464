//! Codes times codes, summed exactly.

use std::ops::Range;

use crate::blocks::{Filled, Packed};
use crate::dots::Dots;
use crate::drive::{HEIGHT, Place, Right, multiply};
use crate::error::{expect, expect_bits};
use crate::layout::{Lines, WIDTH, apart, eighths, pairs};
use crate::rows::Left;
use crate::simd::Simd;
use crate::{Blocks, Epilogue, KernelError};

/// A matrix of signed codes `[k, n]`, of 4 or 8 bits, as it stays in memory.
///
/// Left sides are codes as distances from the code of zero, −255 to 255: those of any grid of 8 bits.
#[derive(Debug)]
pub struct IntegerMatrix {
    rows: usize,
    columns: usize,
    panels: Panels,
    blocks: Option<Packed>,
}

/// The largest sum of products: a quarter of 32 bits is left for what is added to it.
const LARGEST: i64 = 3 << 29;

#[derive(Debug)]
enum Panels {
    Bytes(Lines<i8, { 2 * WIDTH }>),
    Eighths(Lines<u32, WIDTH>),
    Dots(Dots),
}

impl IntegerMatrix {
    /// Packs row-major codes of `bits` bits.
    ///
    /// # Errors
    ///
    /// [`KernelError::Length`], [`KernelError::Bits`], [`KernelError::Code`], and
    /// [`KernelError::Overflow`] where the sums of inputs of 8 bits may leave 32, or leave no room for a
    /// bias of 2²⁹.
    pub fn new(codes: &[i8], rows: usize, columns: usize, bits: u8) -> Result<Self, KernelError> {
        check(codes, rows, columns)?;
        expect_bits(codes, bits)?;
        let panels = match bits {
            4 => Panels::Eighths(eighths(codes, rows, columns)),
            _ => Panels::Bytes(pairs(codes, rows, columns)),
        };
        Ok(Self {
            rows,
            columns,
            panels,
            blocks: None,
        })
    }

    /// Packs row-major codes of `bits` bits with scales of blocks. Sums of a block are exact; times their scales they
    /// are added up in F32.
    ///
    /// Codes of 4 bits are stored as bytes where there are several blocks and 8 does not divide their rows.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), of sums of a block; [`KernelError::Block`] unless blocks divide the rows,
    /// [`KernelError::OddBlock`] for several of an odd number of rows.
    pub fn in_blocks(
        codes: &[i8],
        [rows, columns]: [usize; 2],
        bits: u8,
        blocks: Blocks<'_>,
    ) -> Result<Self, KernelError> {
        let blocks = Packed::new(codes, [rows, columns], bits, blocks)?;
        let block = blocks.rows;
        if block != rows && !block.is_multiple_of(2) {
            return Err(KernelError::OddBlock { block });
        }
        for block in codes.chunks((block * columns).max(1)) {
            check_sums(block, columns)?;
        }
        let panels = match blocks.take_eighths(rows, bits) {
            true => Panels::Eighths(eighths(codes, rows, columns)),
            false => Panels::Bytes(pairs(codes, rows, columns)),
        };
        Ok(Self {
            rows,
            columns,
            panels,
            blocks: Some(blocks),
        })
    }

    /// Packs row-major codes of 8 bits for left sides of many rows: twice as fast from 8 rows on where the
    /// matrix has 128 columns or more, half as fast for one row. The sums are the same. `None` where the CPU
    /// has no exact sums of four products, and for a matrix without numbers.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn for_many_rows(
        codes: &[i8],
        rows: usize,
        columns: usize,
    ) -> Result<Option<Self>, KernelError> {
        check(codes, rows, columns)?;
        let dots = match codes.is_empty() {
            true => None,
            false => Dots::new(codes, rows, columns),
        };
        Ok(dots.map(|dots| Self {
            rows,
            columns,
            panels: Panels::Dots(dots),
            blocks: None,
        }))
    }

    /// Its rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        let of_blocks = self.blocks.as_ref().map_or(0, Packed::bytes);
        let codes = match &self.panels {
            Panels::Bytes(panels) => panels.bytes(),
            Panels::Eighths(panels) => panels.bytes(),
            Panels::Dots(dots) => dots.bytes(),
        };
        codes + of_blocks
    }

    /// Multiplies rows by it: `output` is `[rows, n]`.
    ///
    /// # Panics
    ///
    /// Where rows, epilogue or output have other sizes; packed [`in_blocks`](Self::in_blocks), for an epilogue with a
    /// bias of codes; packed [`for_many_rows`](Self::for_many_rows), where two codes of the left side are more than
    /// 255 apart.
    pub fn multiply(&self, left: &dyn Left<i16>, epilogue: &Epilogue, output: &mut [f32]) {
        self.multiply_into(left, epilogue, output, self.columns, 0);
    }

    /// As [`multiply`](Self::multiply), into columns from `column` on of rows of `stride` numbers.
    ///
    /// # Panics
    ///
    /// As [`multiply`](Self::multiply).
    pub fn multiply_into(
        &self,
        left: &dyn Left<i16>,
        epilogue: &Epilogue,
        output: &mut [f32],
        stride: usize,
        column: usize,
    ) {
        assert_eq!(left.terms(), self.rows, "rows have other sizes");
        assert!(column + self.columns <= stride, "the columns do not fit");
        let place = Place { stride, column };
        let of = (self.rows, self.columns);
        match &self.panels {
            Panels::Bytes(panels) => {
                let right = Paired { of, panels };
                self.paired(right, left, epilogue, output, place);
            }
            Panels::Eighths(panels) => {
                let right = Paired { of, panels };
                self.paired(right, left, epilogue, output, place);
            }
            Panels::Dots(dots) => dots.multiply(left, epilogue, output, place),
        }
    }

    fn paired<T: Copy + Default + Sync, const LINE: usize>(
        &self,
        right: Paired<'_, T, LINE>,
        left: &dyn Left<i16>,
        epilogue: &Epilogue,
        output: &mut [f32],
        place: Place,
    ) where
        [T; LINE]: Pairs,
    {
        match &self.blocks {
            None => multiply(left, &right, epilogue, output, place),
            Some(blocks) => {
                let pairs = match blocks.rows == self.rows {
                    true => right.lines().max(1),
                    false => blocks.rows / 2,
                };
                let right = InBlocks {
                    right,
                    blocks,
                    pairs,
                };
                multiply(left, &right, epilogue, output, place);
            }
        }
    }
}

/// Whether there are as many codes as the shape says, and no sum leaves its 32 bits.
fn check(codes: &[i8], rows: usize, columns: usize) -> Result<(), KernelError> {
    expect("codes", rows * columns, codes.len())?;
    check_sums(codes, columns)
}

fn check_sums(codes: &[i8], columns: usize) -> Result<(), KernelError> {
    // Row by row, as they lie in memory.
    let mut sums = vec![0_i64; columns];
    for row in codes.chunks_exact(columns.max(1)) {
        for (sum, code) in sums.iter_mut().zip(row) {
            *sum += i64::from(code.unsigned_abs());
        }
    }
    let mut largest = sums.into_iter().map(|sum| 255 * sum).enumerate();
    match largest.find(|(_, sum)| *sum > LARGEST) {
        Some((column, sum)) => Err(KernelError::Overflow { column, sum }),
        None => Ok(()),
    }
}

/// Panels of pairs of rows.
struct Paired<'a, T, const LINE: usize> {
    of: (usize, usize),
    panels: &'a Lines<T, LINE>,
}

/// Lines of a panel.
#[derive(Default)]
struct Decoded<T, const LINE: usize> {
    /// Of a narrow panel, filled up.
    filled: Vec<[T; LINE]>,
    /// As bytes, for many rows.
    bytes: Vec<[i8; 2 * WIDTH]>,
}

/// A pair of rows of a panel, or four, as they are stored.
trait Pairs: Sync + Sized {
    const PAIRS: usize;
    /// Its pairs as bytes, where they are not stored so.
    fn spread<S: Simd>(&self, simd: S, into: &mut Vec<[i8; 2 * WIDTH]>);
    fn add<S: Simd, const R: usize>(
        simd: S,
        rows: [&[[i16; 2]]; R],
        panel: &[Self],
        sums: &mut [[i32; WIDTH]; R],
    );
}

impl Pairs for [i8; 2 * WIDTH] {
    const PAIRS: usize = 1;

    #[inline(always)]
    fn spread<S: Simd>(&self, _: S, _: &mut Vec<[i8; 2 * WIDTH]>) {}

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        simd: S,
        rows: [&[[i16; 2]]; R],
        panel: &[Self],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        simd.add_pairs(rows, panel, sums);
    }
}

impl Pairs for [u32; WIDTH] {
    const PAIRS: usize = 4;

    #[inline(always)]
    fn spread<S: Simd>(&self, simd: S, into: &mut Vec<[i8; 2 * WIDTH]>) {
        into.extend_from_slice(&simd.pairs(self));
    }

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        simd: S,
        rows: [&[[i16; 2]]; R],
        panel: &[Self],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        simd.add_eighths(rows, panel, sums);
    }
}

impl<T: Copy + Default + Sync, const LINE: usize> Paired<'_, T, LINE>
where
    [T; LINE]: Pairs,
{
    /// Adds products of some of the lines that were decoded, from `first` on.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn add_some<S: Simd, const R: usize>(
        &self,
        simd: S,
        rows: &[i16],
        panel: usize,
        lines: Range<usize>,
        first: usize,
        decoded: &Decoded<T, LINE>,
        sums: &mut [[i32; WIDTH]; R],
    ) {
        let apart = self.stride() / 2;
        let all = rows.as_chunks::<2>().0;
        let mut rows: [&[[i16; 2]]; R] = [&[]; R];
        for (index, row) in rows.iter_mut().enumerate() {
            *row = &all[index * apart + lines.start..index * apart + lines.end];
        }
        let Decoded { filled, bytes } = decoded;
        if bytes.is_empty() {
            let of = stored::<[T; LINE]>(lines);
            let filled = match filled.is_empty() {
                true => &filled[..],
                false => {
                    let start = stored::<[T; LINE]>(first..first).start;
                    &filled[of.start - start..of.end - start]
                }
            };
            Pairs::add(simd, rows, self.panels.of(panel, of, filled), sums);
        } else {
            simd.add_pairs(rows, &bytes[lines.start - first..lines.end - first], sums);
        }
    }
}

/// The lines in which pairs are stored.
fn stored<P: Pairs>(pairs: Range<usize>) -> Range<usize> {
    pairs.start / P::PAIRS..pairs.end / P::PAIRS
}

impl<T: Copy + Default + Sync, const LINE: usize> Right<i16> for Paired<'_, T, LINE>
where
    [T; LINE]: Pairs,
{
    type Sums = [i32; WIDTH];
    type Decoded = Decoded<T, LINE>;

    fn stride(&self) -> usize {
        apart(2 * self.lines(), 2)
    }

    fn columns(&self) -> usize {
        self.of.1
    }

    fn lines(&self) -> usize {
        self.of.0.div_ceil(2).next_multiple_of(<[T; LINE]>::PAIRS)
    }

    #[inline(always)]
    fn decode<S: Simd>(
        &self,
        simd: S,
        panel: usize,
        lines: Range<usize>,
        rows: usize,
        decoded: &mut Decoded<T, LINE>,
    ) {
        let Decoded { filled, bytes } = decoded;
        let stored = stored::<[T; LINE]>(lines);
        self.panels.fill_up(panel, stored.clone(), filled);
        bytes.clear();
        if rows > HEIGHT {
            for line in self.panels.of(panel, stored, filled) {
                line.spread(simd, bytes);
            }
        }
    }

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        &self,
        simd: S,
        rows: &[i16],
        panel: usize,
        lines: Range<usize>,
        decoded: &Decoded<T, LINE>,
        _: &[f32],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        self.add_some(simd, rows, panel, lines.clone(), lines.start, decoded, sums);
    }
}

/// Panels of pairs of rows, and scales of blocks of rows.
struct InBlocks<'a, T, const LINE: usize> {
    right: Paired<'a, T, LINE>,
    blocks: &'a Packed,
    /// Of a block.
    pairs: usize,
}

/// Lines of a panel, and scales of blocks, of a narrow panel filled up.
#[derive(Default)]
struct DecodedBlocks<T, const LINE: usize> {
    lines: Decoded<T, LINE>,
    of_blocks: Filled,
}

impl<T, const LINE: usize> InBlocks<'_, T, LINE> {
    /// The blocks that lines lie in.
    fn touched(&self, lines: &Range<usize>) -> Range<usize> {
        lines.start / self.pairs..lines.end.div_ceil(self.pairs)
    }
}

impl<T: Copy + Default + Sync, const LINE: usize> Right<i16> for InBlocks<'_, T, LINE>
where
    [T; LINE]: Pairs,
{
    type Sums = [f32; WIDTH];
    type Decoded = DecodedBlocks<T, LINE>;

    fn stride(&self) -> usize {
        self.right.stride()
    }

    fn columns(&self) -> usize {
        self.right.columns()
    }

    fn lines(&self) -> usize {
        self.right.lines()
    }

    fn totals(&self, row: &[i16], into: &mut Vec<f32>) {
        let sum = |codes: &[i16]| codes.iter().map(|code| i32::from(*code)).sum::<i32>() as f32;
        self.blocks.totals(&row[..self.right.of.0], sum, into);
    }

    #[inline(always)]
    fn decode<S: Simd>(
        &self,
        simd: S,
        panel: usize,
        lines: Range<usize>,
        rows: usize,
        decoded: &mut DecodedBlocks<T, LINE>,
    ) {
        let blocks = self.touched(&lines);
        self.blocks.fill_up(panel, blocks, &mut decoded.of_blocks);
        self.right
            .decode(simd, panel, lines, rows, &mut decoded.lines);
    }

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        &self,
        simd: S,
        rows: &[i16],
        panel: usize,
        lines: Range<usize>,
        decoded: &DecodedBlocks<T, LINE>,
        totals: &[f32],
        sums: &mut [[f32; WIDTH]; R],
    ) {
        let blocks = self.touched(&lines);
        let scales = self.blocks.of(panel, blocks.clone(), &decoded.of_blocks);
        let of_row = self.right.of.0 / self.blocks.rows;
        for (block, (scale, offset)) in blocks.zip(scales) {
            let start = lines.start.max(block * self.pairs);
            let end = lines.end.min((block + 1) * self.pairs);
            let mut of_block = [[0; WIDTH]; R];
            self.right.add_some(
                simd,
                rows,
                panel,
                start..end,
                lines.start,
                &decoded.lines,
                &mut of_block,
            );
            let scale = simd.floats(scale);
            for (sums, of_block) in sums.iter_mut().zip(&of_block) {
                let of_block = simd.floats(&of_block.map(|sum| sum as f32));
                *sums = simd.store(simd.fuse(of_block, scale, simd.floats(sums)));
            }
            // What is subtracted of a block, at its end.
            if let Some(offset) = offset.filter(|_| end == (block + 1) * self.pairs) {
                let offset = simd.floats(offset);
                for (sums, totals) in sums.iter_mut().zip(totals.chunks(of_row)) {
                    let total = simd.multiply_add(-totals[block], offset, simd.floats(sums));
                    *sums = simd.store(total);
                }
            }
        }
    }
}
