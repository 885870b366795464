//! How weights lie in memory: panels of [`WIDTH`] columns, rows of a panel one after the other.

use std::ops::Range;

/// Columns of a panel.
pub(crate) const WIDTH: usize = 16;

pub(crate) fn panels(columns: usize) -> usize {
    columns.div_ceil(WIDTH)
}

/// Numbers from a row to the next: lines of the cache apart, so that the rows of a tile do not take
/// each other's place in it.
pub(crate) fn apart(terms: usize, bytes: usize) -> usize {
    match (terms * bytes).is_multiple_of(1024) {
        true => terms + 64 / bytes,
        false => terms,
    }
}

/// Lines of panels of `LINE` numbers each; those of a last panel of fewer columns without what would fill
/// them up.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Lines<T, const LINE: usize> {
    /// Of a panel.
    count: usize,
    whole: Vec<[T; LINE]>,
    narrow: Vec<T>,
    /// Numbers of a narrow line; 0 where there is none.
    width: usize,
}

impl<T: Copy + Default, const LINE: usize> Lines<T, LINE> {
    /// `all`: of the panels of so many columns, filled up.
    pub(crate) fn new(all: Vec<[T; LINE]>, columns: usize) -> Self {
        let count = all.len() / panels(columns).max(1);
        let width = columns % WIDTH * (LINE / WIDTH);
        let (whole, last) = match width {
            0 => (all, Vec::new()),
            _ => {
                let (whole, last) = all.split_at(all.len() - count);
                (whole.to_vec(), last.to_vec())
            }
        };
        let narrow = last.iter().flat_map(|line| &line[..width]).copied();
        Self {
            count,
            narrow: narrow.collect(),
            whole,
            width,
        }
    }

    /// Bytes that they take in memory.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<T>() * (self.whole.len() * LINE + self.narrow.len())
    }

    #[inline(always)]
    fn is_narrow(&self, panel: usize) -> bool {
        self.width > 0 && panel * self.count == self.whole.len()
    }

    /// Fills up the lines of a narrow panel; leaves none of a whole one.
    #[inline(always)]
    pub(crate) fn fill_up(&self, panel: usize, lines: Range<usize>, into: &mut Vec<[T; LINE]>) {
        into.clear();
        if !self.is_narrow(panel) {
            return;
        }
        for line in lines {
            let from = &self.narrow[line * self.width..];
            let mut filled = [T::default(); LINE];
            match from.first_chunk::<LINE>() {
                // A copy of a known size, and what belongs to the next line taken back.
                Some(window) => {
                    for (index, (to, from)) in filled.iter_mut().zip(window).enumerate() {
                        *to = if index < self.width {
                            *from
                        } else {
                            T::default()
                        };
                    }
                }
                None => filled[..self.width].copy_from_slice(&from[..self.width]),
            }
            into.push(filled);
        }
    }

    /// Lines of a panel: of a narrow one, those that were [filled up](Self::fill_up).
    #[inline(always)]
    pub(crate) fn of<'a>(
        &'a self,
        panel: usize,
        lines: Range<usize>,
        filled: &'a [[T; LINE]],
    ) -> &'a [[T; LINE]] {
        let first = panel * self.count;
        match self.is_narrow(panel) {
            true => filled,
            false => &self.whole[first + lines.start..first + lines.end],
        }
    }
}

/// [`in_panels`], without what fills up the last one.
pub(crate) fn lines<T: Copy + Default, U: Copy + Default>(
    values: &[T],
    rows: usize,
    columns: usize,
    convert: impl Fn(T) -> U,
) -> Lines<U, WIDTH> {
    Lines::new(in_panels(values, rows, columns, convert), columns)
}

/// The panels of a row-major matrix; columns that fill up the last one are zero.
pub(crate) fn in_panels<T: Copy + Default, U: Copy + Default>(
    values: &[T],
    rows: usize,
    columns: usize,
    convert: impl Fn(T) -> U,
) -> Vec<[U; WIDTH]> {
    let mut packed = Vec::with_capacity(panels(columns) * rows);
    for start in (0..columns).step_by(WIDTH) {
        let width = WIDTH.min(columns - start);
        for row in 0..rows {
            let at = row * columns + start;
            let mut line = [U::default(); WIDTH];
            for (to, from) in line.iter_mut().zip(&values[at..at + width]) {
                *to = convert(*from);
            }
            packed.push(line);
        }
    }
    packed
}

/// Two rows of a panel beside each other: the pairs that one instruction multiplies and adds.
pub(crate) fn pairs(codes: &[i8], rows: usize, columns: usize) -> Lines<i8, { 2 * WIDTH }> {
    let lines = in_panels(codes, rows, columns, |code| code);
    let pair = |pair: &[[i8; WIDTH]]| {
        let mut both = [0; 2 * WIDTH];
        for column in 0..WIDTH {
            both[2 * column] = pair[0][column];
            // A row that fills up a pair is zero.
            both[2 * column + 1] = pair.get(1).map_or(0, |second| second[column]);
        }
        both
    };
    let panels = lines.chunks_exact(rows.max(1));
    let packed = panels.flat_map(|panel| panel.chunks(2).map(pair));
    Lines::new(packed.collect(), columns)
}

/// Eight rows of 4-bit codes in the eighths of a word, those of even numbers in its lower half and those of
/// odd ones in its upper half, from the lowest bits on: a pair of rows is at one place of both halves. Rows
/// that fill up the last word are zero.
pub(crate) fn eighths(codes: &[i8], rows: usize, columns: usize) -> Lines<u32, WIDTH> {
    let lines = in_panels(codes, rows, columns, |code| u32::from(code as u8 & 15));
    let word = |eight: &[[u32; WIDTH]]| {
        let mut words = [0; WIDTH];
        for (row, codes) in eight.iter().enumerate() {
            for (word, code) in words.iter_mut().zip(codes) {
                *word |= code << (16 * (row % 2) + 4 * (row / 2));
            }
        }
        words
    };
    let panels = lines.chunks_exact(rows.max(1));
    let packed = panels.flat_map(|panel| panel.chunks(8).map(word));
    Lines::new(packed.collect(), columns)
}
