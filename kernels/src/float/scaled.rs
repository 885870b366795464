//! Floats times codes, with a scale for each block of rows.

use std::ops::Range;

use super::{Decoded, part, sum};
use crate::Epilogue;
use crate::drive::{HEIGHT, Right};
use crate::layout::{Lines, WIDTH, apart};
use crate::simd::Simd;

/// Panels of codes, and scales of blocks of rows, `[panel, block]`.
pub(super) struct Scaled<'a, T> {
    pub(super) of: (usize, usize),
    pub(super) panels: &'a Lines<T, WIDTH>,
    pub(super) scales: &'a Lines<f32, WIDTH>,
    pub(super) block: usize,
}

/// One or two rows of a panel of codes, as they are stored.
pub(super) trait CodeLine: Sync + Sized {
    /// Rows in a line.
    const ROWS: usize;
    /// The rows; the same twice where a line has one.
    fn widen<S: Simd>(&self, simd: S) -> [S::Floats; 2];
}

impl CodeLine for [i8; WIDTH] {
    const ROWS: usize = 1;

    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S) -> [S::Floats; 2] {
        let codes = simd.codes(self);
        [codes, codes]
    }
}

impl CodeLine for [u8; WIDTH] {
    const ROWS: usize = 2;

    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S) -> [S::Floats; 2] {
        simd.nibbles(self)
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
        [of(<[T; WIDTH]>::ROWS), of(self.block)]
    }

    /// The blocks that rows lie in, with the lines of each and its scales.
    #[inline(always)]
    fn blocks<'a>(
        &'a self,
        panel: usize,
        rows: Range<usize>,
        filled: &'a [[T; WIDTH]],
        scales: &'a [[f32; WIDTH]],
    ) -> impl Iterator<Item = (Range<usize>, &'a [[T; WIDTH]], &'a [f32; WIDTH])> {
        let [lines, touched] = self.touched(&rows);
        let first = lines.start;
        let all = self.panels.of(panel, lines, filled);
        let scales = self.scales.of(panel, touched.clone(), scales);
        touched.zip(scales).map(move |(block, scales)| {
            let start = rows.start.max(block * self.block);
            let end = rows.end.min((block + 1) * self.block);
            let per_line = <[T; WIDTH]>::ROWS;
            let lines = start / per_line - first..end.div_ceil(per_line) - first;
            (start..end, &all[lines], scales)
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
            scales,
        } = decoded;
        let [of_codes, blocks] = self.touched(&lines);
        self.panels.fill_up(panel, of_codes, filled);
        self.scales.fill_up(panel, blocks, scales);
        if rows <= HEIGHT {
            return;
        }
        floats.clear();
        let zero = simd.floats(&[0.0; WIDTH]);
        for (_, lines, scale) in self.blocks(panel, lines.clone(), filled, scales) {
            let scale = simd.floats(scale);
            for line in lines {
                let both = line.widen(simd);
                for values in &both[..<[T; WIDTH]>::ROWS] {
                    floats.push(simd.store(simd.fuse(*values, scale, zero)));
                }
            }
        }
        // An odd number of rows has half a line too many.
        floats.truncate(lines.len());
    }

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        &self,
        simd: S,
        rows: &[f32],
        panel: usize,
        lines: Range<usize>,
        decoded: &Decoded<T>,
        sums: &mut [[f32; WIDTH]; R],
    ) {
        let Decoded {
            floats,
            filled,
            scales,
        } = decoded;
        if !floats.is_empty() {
            let rows = part(rows, self.stride(), lines);
            return sum::<S, R, _, false>(simd, rows, floats, sums);
        }
        for (terms, lines, scale) in self.blocks(panel, lines, filled, scales) {
            let rows: [&[f32]; R] = part(rows, self.stride(), terms);
            let of_block = sum_codes(simd, rows, lines);
            let scale = simd.floats(scale);
            for (sums, of_block) in sums.iter_mut().zip(of_block) {
                let before = simd.floats(sums);
                *sums = simd.store(simd.fuse(of_block, scale, before));
            }
        }
    }

    #[inline(always)]
    fn finish(&self, panel: usize, sums: &[f32; WIDTH], epilogue: &Epilogue) -> [f32; WIDTH] {
        let mut values = *sums;
        epilogue.of_floats(panel, &mut values);
        values
    }
}

/// Products of rows and lines of codes; two sums each, so that few of them do not wait.
#[inline(always)]
fn sum_codes<S: Simd, const R: usize, P: CodeLine>(
    simd: S,
    rows: [&[f32]; R],
    lines: &[P],
) -> [S::Floats; R] {
    let zero = simd.floats(&[0.0; WIDTH]);
    let one = simd.floats(&[1.0; WIDTH]);
    let mut sums = [[zero; 2]; R];
    let whole = rows.first().map_or(0, |row| row.len() / 2);
    let mut pairs: [&[[f32; 2]]; R] = [&[]; R];
    for (pairs, row) in pairs.iter_mut().zip(rows) {
        *pairs = &row.as_chunks::<2>().0[..whole];
    }
    for (k, lines) in lines.chunks_exact(2 / P::ROWS).take(whole).enumerate() {
        let first = lines[0].widen(simd);
        let [low, high] = match P::ROWS {
            1 => [first[0], lines[1].widen(simd)[0]],
            _ => first,
        };
        for (sums, pairs) in sums.iter_mut().zip(pairs) {
            let [a, b] = pairs[k];
            sums[0] = simd.multiply_add(a, low, sums[0]);
            sums[1] = simd.multiply_add(b, high, sums[1]);
        }
    }
    if let Some(line) = lines.get(whole * 2 / P::ROWS) {
        let [low, _] = line.widen(simd);
        for (sums, row) in sums.iter_mut().zip(rows) {
            if let Some(last) = row.get(2 * whole) {
                sums[0] = simd.multiply_add(*last, low, sums[0]);
            }
        }
    }
    let mut all = [zero; R];
    for (all, [a, b]) in all.iter_mut().zip(sums) {
        *all = simd.fuse(b, one, a);
    }
    all
}
