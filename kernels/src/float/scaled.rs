//! Floats times codes, with a scale for each block of rows.

use std::ops::Range;

use super::{Decoded, part, sum};
use crate::blocks::{Filled, Packed};
use crate::drive::{HEIGHT, Right};
use crate::elementwise;
use crate::layout::{Lines, WIDTH, apart};
use crate::simd::Simd;

/// Panels of codes, and scales of blocks of rows.
pub(super) struct Scaled<'a, T> {
    pub(super) of: (usize, usize),
    pub(super) panels: &'a Lines<T, WIDTH>,
    pub(super) blocks: &'a Packed,
}

/// One or eight rows of a panel of codes, as they are stored.
pub(super) trait CodeLine: Sync + Sized {
    /// Rows in a line.
    const ROWS: usize;
    /// What the numbers of a line are to be multiplied by.
    fn unit<S: Simd>() -> f32;
    /// The rows, one after the other.
    fn widen<S: Simd>(&self, simd: S, each: impl FnMut(usize, S::Floats));
}

impl CodeLine for [i8; WIDTH] {
    const ROWS: usize = 1;

    #[inline(always)]
    fn unit<S: Simd>() -> f32 {
        1.0
    }

    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S, mut each: impl FnMut(usize, S::Floats)) {
        each(0, simd.codes(self));
    }
}

impl CodeLine for [u32; WIDTH] {
    const ROWS: usize = 8;

    #[inline(always)]
    fn unit<S: Simd>() -> f32 {
        S::EIGHTH
    }

    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S, each: impl FnMut(usize, S::Floats)) {
        simd.eighths(self, each);
    }
}

impl<T: Copy + Default + Sync> Scaled<'_, T>
where
    [T; WIDTH]: CodeLine,
{
    /// Which lines rows are in, and which blocks.
    #[inline(always)]
    fn touched(&self, rows: &Range<usize>) -> [Range<usize>; 2] {
        let of = |size: usize| rows.start / size..rows.end.div_ceil(size);
        [of(<[T; WIDTH]>::ROWS), of(self.blocks.rows)]
    }

    /// The blocks that rows lie in, with the lines of each, its scales and offsets.
    #[inline(always)]
    fn blocks<'a>(
        &'a self,
        panel: usize,
        rows: Range<usize>,
        filled: &'a [[T; WIDTH]],
        of_blocks: &'a Filled,
    ) -> impl Iterator<Item = Block<'a, [T; WIDTH]>> {
        let [lines, touched] = self.touched(&rows);
        let first = lines.start;
        let all = self.panels.of(panel, lines, filled);
        let scales = self.blocks.of(panel, touched.clone(), of_blocks);
        touched.zip(scales).map(move |(block, (scale, offset))| {
            let start = rows.start.max(block * self.blocks.rows);
            let end = rows.end.min((block + 1) * self.blocks.rows);
            let per_line = <[T; WIDTH]>::ROWS;
            let lines = start / per_line - first..end.div_ceil(per_line) - first;
            Block {
                index: block,
                terms: start..end,
                lines: &all[lines],
                scale,
                offset,
                is_end: end == (block + 1) * self.blocks.rows,
            }
        })
    }
}

impl<T: Copy + Default + Sync> Right<f32> for Scaled<'_, T>
where
    [T; WIDTH]: CodeLine,
{
    type Sums = [f32; WIDTH];
    type Decoded = Decoded<T>;

    fn stride(&self) -> usize {
        apart(self.of.0, 4)
    }

    fn columns(&self) -> usize {
        self.of.1
    }

    fn lines(&self) -> usize {
        self.of.0
    }

    fn totals(&self, row: &[f32], into: &mut Vec<f32>) {
        self.blocks
            .totals(&row[..self.of.0], elementwise::sum, into);
    }

    #[inline(always)]
    fn decode<S: Simd>(
        &self,
        simd: S,
        panel: usize,
        lines: Range<usize>,
        rows: usize,
        decoded: &mut Decoded<T>,
    ) {
        let Decoded {
            floats,
            filled,
            of_blocks,
        } = decoded;
        let [of_codes, blocks] = self.touched(&lines);
        self.panels.fill_up(panel, of_codes, filled);
        self.blocks.fill_up(panel, blocks, of_blocks);
        if rows <= HEIGHT {
            return;
        }
        floats.clear();
        let zero = simd.floats(&[0.0; WIDTH]);
        let unit = simd.floats(&[<[T; WIDTH]>::unit::<S>(); WIDTH]);
        for block in self.blocks(panel, lines, filled, of_blocks) {
            let scale = simd.floats(block.scale);
            let addend = match block.offset {
                Some(offset) => simd.multiply_add(-1.0, simd.floats(offset), zero),
                None => zero,
            };
            let end = floats.len() + block.terms.len();
            for line in block.lines {
                line.widen(simd, |_, codes| {
                    let codes = simd.fuse(codes, unit, zero);
                    floats.push(simd.store(simd.fuse(codes, scale, addend)));
                });
            }
            // A last line has rows that fill it up.
            floats.truncate(end);
        }
    }

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        &self,
        simd: S,
        rows: &[f32],
        panel: usize,
        lines: Range<usize>,
        decoded: &Decoded<T>,
        totals: &[f32],
        sums: &mut [[f32; WIDTH]; R],
    ) {
        let rows = part(rows, self.stride(), lines.clone());
        if !decoded.floats.is_empty() {
            return sum::<S, R, _, false>(simd, rows, &decoded.floats, sums);
        }
        let unit = <[T; WIDTH]>::unit::<S>();
        let first = lines.start;
        let totals = (totals, self.of.0 / self.blocks.rows);
        let blocks = || self.blocks(panel, lines.clone(), &decoded.filled, &decoded.of_blocks);
        let mut added = add_blocks(simd, rows, first, blocks(), totals, sums, false);
        // What overflowed may have done so by the unit alone.
        if unit != 1.0 && !added.iter().flatten().all(|sum| sum.is_finite()) {
            added = add_blocks(simd, rows, first, blocks(), totals, sums, true);
        }
        *sums = added;
    }
}

/// Rows that share a scale.
struct Block<'a, P> {
    index: usize,
    terms: Range<usize>,
    lines: &'a [P],
    scale: &'a [f32; WIDTH],
    offset: Option<&'a [f32; WIDTH]>,
    /// Whether the last of its rows is among them.
    is_end: bool,
}

/// Sums of `rows`, which begin at row `first`, with the products of each block: multiplied by the unit of the
/// lines when they are added up, or each of them, `early`. `totals`: of the blocks of each row, and how many.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn add_blocks<'a, S: Simd, const R: usize, P: CodeLine + 'a>(
    simd: S,
    rows: [&[f32]; R],
    first: usize,
    blocks: impl Iterator<Item = Block<'a, P>>,
    totals: (&[f32], usize),
    sums: &[[f32; WIDTH]; R],
    early: bool,
) -> [[f32; WIDTH]; R] {
    let (totals, of_row) = totals;
    let zero = simd.floats(&[0.0; WIDTH]);
    let unit = simd.floats(&[P::unit::<S>(); WIDTH]);
    let mut all = [zero; R];
    for (all, sums) in all.iter_mut().zip(sums) {
        *all = simd.floats(sums);
    }
    for block in blocks {
        let mut of_terms: [&[f32]; R] = [&[]; R];
        for (of_terms, row) in of_terms.iter_mut().zip(rows) {
            *of_terms = &row[block.terms.start - first..block.terms.end - first];
        }
        let scale = simd.floats(block.scale);
        let of_block = sum_codes(simd, of_terms, block.lines, early.then_some(unit));
        for (all, mut of_block) in all.iter_mut().zip(of_block) {
            if !early {
                of_block = simd.fuse(of_block, unit, zero);
            }
            *all = simd.fuse(of_block, scale, *all);
        }
        // Of a whole block, at its end.
        if let Some(offset) = block.offset.filter(|_| block.is_end) {
            let offset = simd.floats(offset);
            for (all, totals) in all.iter_mut().zip(totals.chunks(of_row)) {
                *all = simd.multiply_add(-totals[block.index], offset, *all);
            }
        }
    }
    let mut added = *sums;
    for (added, all) in added.iter_mut().zip(all) {
        *added = simd.store(all);
    }
    added
}

/// Sums of products of rows and lines of codes; with a `unit` each product is multiplied by it.
#[inline(always)]
fn sum_codes<S: Simd, const R: usize, P: CodeLine>(
    simd: S,
    rows: [&[f32]; R],
    lines: &[P],
    unit: Option<S::Floats>,
) -> [S::Floats; R] {
    // Few sums wait for each other: several of each, which are added in the end.
    let several = match R {
        1 => 4,
        2 | 3 => 2,
        _ => 1,
    };
    let zero = simd.floats(&[0.0; WIDTH]);
    let mut sums = [[zero; 4]; R];
    let mut eights: [&[[f32; 8]]; R] = [&[]; R];
    let mut last = [[0.0; 8]; R];
    let whole = rows.first().map_or(0, |row| row.len() / 8);
    for ((eights, last), row) in eights.iter_mut().zip(&mut last).zip(rows) {
        let (all, rest) = row.as_chunks::<8>();
        *eights = &all[..whole];
        if !rest.is_empty() {
            last[..rest.len()].copy_from_slice(rest);
        }
    }
    for (k, lines) in lines.chunks(8 / P::ROWS).enumerate() {
        let mut terms = [&[0.0; 8]; R];
        for ((terms, eights), last) in terms.iter_mut().zip(eights).zip(&last) {
            *terms = if k < whole { &eights[k] } else { last };
        }
        for (index, line) in lines.iter().enumerate() {
            line.widen(simd, |row, codes| {
                let row = index * P::ROWS + row;
                let codes = match unit {
                    Some(unit) => simd.fuse(codes, unit, zero),
                    None => codes,
                };
                for (sums, terms) in sums.iter_mut().zip(terms) {
                    let sum = &mut sums[row % several];
                    *sum = simd.multiply_add(terms[row], codes, *sum);
                }
            });
        }
    }
    let one = simd.floats(&[1.0; WIDTH]);
    let mut all = [one; R];
    for (all, [a, b, c, d]) in all.iter_mut().zip(sums) {
        *all = simd.fuse(simd.fuse(b, one, a), one, simd.fuse(d, one, c));
    }
    all
}
