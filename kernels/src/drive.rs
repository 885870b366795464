//! A product, tile by tile: which rows and panels a thread computes.

use std::ops::Range;

use rayon::prelude::*;

use crate::Epilogue;
use crate::layout::{WIDTH, panels};
use crate::rows::Left;
use crate::simd::{Simd, Task, dispatch};

/// Rows of a tile.
pub(crate) const HEIGHT: usize = 6;
/// Multiplications below which another thread costs more than it saves.
const WORK: usize = 1 << 20;
/// Lines of a panel that are multiplied by all rows before the next ones: they stay in the cache.
const DEPTH: usize = 512;
/// Rows whose numbers are gathered at once.
const GATHERED: usize = 8 * HEIGHT;
/// Bytes of rows that are gathered at once, where each panel reads them again.
const COPIED: usize = 1 << 18;

/// Where results go: columns from `column` on, of rows of `stride` numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) stride: usize,
    pub(crate) column: usize,
}

impl Place {
    /// Epilogue and output are of a product of so many rows and columns, whose sums are of codes or not.
    pub(crate) fn check(
        self,
        [rows, columns]: [usize; 2],
        epilogue: &Epilogue,
        are_codes: bool,
        output: &[f32],
    ) {
        epilogue.check([rows, columns], are_codes);
        let size = rows * self.stride;
        assert_eq!(output.len(), size, "the output has another size");
    }
}

/// Sums of a row and a panel.
pub(crate) trait Sums: Copy + Default {
    /// Whether they are sums of codes that no scale has been multiplied with.
    const ARE_CODES: bool;
    /// What is stored of them.
    fn finish(self, row: usize, panel: usize, epilogue: &Epilogue) -> [f32; WIDTH];
}

impl Sums for [f32; WIDTH] {
    const ARE_CODES: bool = false;

    #[inline(always)]
    fn finish(self, row: usize, panel: usize, epilogue: &Epilogue) -> [f32; WIDTH] {
        epilogue.of_rows(row, panel, self)
    }
}

impl Sums for [i32; WIDTH] {
    const ARE_CODES: bool = true;

    #[inline(always)]
    fn finish(self, row: usize, panel: usize, epilogue: &Epilogue) -> [f32; WIDTH] {
        epilogue.of_codes(row, panel, &self)
    }
}

/// A packed right side.
pub(crate) trait Right<T>: Sync {
    /// What is summed for a row and a panel.
    type Sums: Sums;
    /// Lines of a panel in a form that is faster to multiply by.
    type Decoded: Default;
    /// Numbers of a left row, with what fills it up.
    fn stride(&self) -> usize;
    fn columns(&self) -> usize;
    /// Lines of a panel.
    fn lines(&self) -> usize;
    /// Decodes lines of a panel, where that pays for so many rows.
    fn decode<S: Simd>(
        &self,
        simd: S,
        panel: usize,
        lines: Range<usize>,
        rows: usize,
        decoded: &mut Self::Decoded,
    );
    /// What is needed of a left row in each panel, as many numbers of each row: sums of its blocks.
    fn totals(&self, _row: &[T], _into: &mut Vec<f32>) {}
    /// Adds products of `R` rows and lines of a panel; `totals` begin with those of the first row.
    #[allow(clippy::too_many_arguments)]
    fn add<S: Simd, const R: usize>(
        &self,
        simd: S,
        rows: &[T],
        panel: usize,
        lines: Range<usize>,
        decoded: &Self::Decoded,
        totals: &[f32],
        sums: &mut [Self::Sums; R],
    );
}

/// Multiplies all rows by all panels.
pub(crate) fn multiply<T: Copy + Default + Send + Sync, R: Right<T>>(
    left: &dyn Left<T>,
    right: &R,
    epilogue: &Epilogue,
    output: &mut [f32],
    place: Place,
) {
    let (rows, columns) = (left.count(), right.columns());
    place.check([rows, columns], epilogue, R::Sums::ARE_CODES, output);
    if rows == 0 || columns == 0 {
        return;
    }
    let threads = rayon::current_num_threads();
    let work = rows * columns * right.stride();
    let parts = threads.min(work / WORK).max(1);
    let all = 0..panels(columns);
    if parts == 1 {
        return run(left, right, epilogue, 0..rows, all, output, place);
    }
    if rows >= parts * HEIGHT && rows * WIDTH >= columns {
        let share = rows.div_ceil(parts).next_multiple_of(HEIGHT);
        let chunks = output.par_chunks_mut(share * place.stride).enumerate();
        chunks.for_each(|(index, output)| {
            let first = index * share;
            let rows = first..first + output.len() / place.stride;
            run(left, right, epilogue, rows, all.clone(), output, place);
        });
        return;
    }
    let share = all.len().div_ceil(parts);
    let starts: Vec<usize> = all.step_by(share).collect();
    let stripes: Vec<(usize, Vec<f32>)> = starts
        .into_par_iter()
        .map(|first| {
            let panels = first..(first + share).min(panels(columns));
            let width = (panels.end * WIDTH).min(columns) - first * WIDTH;
            let mut stripe = vec![0.0; rows * width];
            let place = Place {
                stride: width,
                column: 0,
            };
            run(left, right, epilogue, 0..rows, panels, &mut stripe, place);
            (first * WIDTH, stripe)
        })
        .collect();
    for (start, stripe) in stripes {
        let width = stripe.len() / rows;
        let lines = output.chunks_exact_mut(place.stride);
        for (line, part) in lines.zip(stripe.chunks_exact(width)) {
            let at = place.column + start;
            line[at..at + width].copy_from_slice(part);
        }
    }
}

/// What one thread computes; the first of the panels is at `place.column`.
fn run<T: Copy + Default, R: Right<T>>(
    left: &dyn Left<T>,
    right: &R,
    epilogue: &Epilogue,
    rows: Range<usize>,
    panels: Range<usize>,
    output: &mut [f32],
    place: Place,
) {
    dispatch(Part {
        left,
        right,
        epilogue,
        rows,
        panels,
        output,
        place,
    });
}

struct Part<'a, T, R> {
    left: &'a dyn Left<T>,
    right: &'a R,
    epilogue: &'a Epilogue,
    rows: Range<usize>,
    panels: Range<usize>,
    output: &'a mut [f32],
    place: Place,
}

impl<T: Copy + Default, R: Right<T>> Task for Part<'_, T, R> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let stride = self.right.stride();
        let total = self.rows.len();
        // Of all threads: how codes are decoded must not depend on who gets which rows.
        let all = self.left.count();
        let mut scratch = Vec::new();
        // With many panels all rows at once, so that a panel is read once; with few ones a piece of the rows that stays
        // in the cache, as one does that has to be copied.
        let piece = match self.panels.len() > 8 {
            true if self.left.is_gathered() => {
                let rows = COPIED / (stride * size_of::<T>()).max(1);
                (rows / HEIGHT * HEIGHT).max(GATHERED)
            }
            true => total,
            false => GATHERED,
        };
        let mut sums = vec![R::Sums::default(); piece.min(total)];
        let mut decoded = R::Decoded::default();
        let mut totals = Vec::new();
        for done in (0..total).step_by(piece.max(1)) {
            let count = piece.min(total - done);
            let first = self.rows.start + done;
            let values = self.left.take(first, count, stride, &mut scratch);
            totals.clear();
            for row in values.chunks(stride.max(1)).take(count) {
                self.right.totals(row, &mut totals);
            }
            let of_row = totals.len() / count;
            for panel in self.panels.clone() {
                let lines = self.right.lines();
                for start in (0..lines.max(1)).step_by(DEPTH) {
                    let depth = start..(start + DEPTH).min(lines);
                    let right = self.right;
                    right.decode(simd, panel, depth.clone(), all, &mut decoded);
                    if start == 0 {
                        sums[..count].fill(R::Sums::default());
                    }
                    for (tile, sums) in sums[..count].chunks_mut(HEIGHT).enumerate() {
                        let row = tile * HEIGHT;
                        let end = ((row + sums.len()) * stride).min(values.len());
                        let rows = &values[row * stride..end];
                        let totals = &totals[row * of_row..];
                        macro_rules! add {
                            ($($height:literal)*) => {
                                match sums.len() {
                                    $($height => if let Some(sums) = sums.first_chunk_mut() {
                                        right.add::<S, $height>(
                                            simd, rows, panel, depth.clone(), &decoded, totals, sums,
                                        );
                                    })*
                                    _ => unreachable!("a tile has 1 to 6 rows"),
                                }
                            };
                        }
                        add!(1 2 3 4 5 6);
                    }
                }
                let column = self.place.column + (panel - self.panels.start) * WIDTH;
                let width = WIDTH.min(self.right.columns() - panel * WIDTH);
                for (row, sums) in sums[..count].iter().enumerate() {
                    let values = sums.finish(first + row, panel, self.epilogue);
                    let at = (done + row) * self.place.stride + column;
                    store(&values, width, &mut self.output[at..]);
                }
            }
        }
    }
}

#[inline(always)]
pub(crate) fn store(values: &[f32; WIDTH], width: usize, to: &mut [f32]) {
    match to.first_chunk_mut::<WIDTH>() {
        Some(to) if width == WIDTH => *to = *values,
        _ => to[..width].copy_from_slice(&values[..width]),
    }
}
