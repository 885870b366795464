//! Floats times the nonzero weights of each column.

use rayon::prelude::*;

use crate::error::expect;
use crate::simd::{Simd, Task, dispatch_narrow};
use crate::{Epilogue, KernelError};

/// A matrix `[k, n]` that is mostly zero: for each column the rows and values of the others.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseMatrix {
    rows: usize,
    columns: usize,
    /// Where each column starts, and the end.
    starts: Vec<u32>,
    indices: Indices,
    values: Vec<f32>,
}

#[derive(Debug, Clone, PartialEq)]
enum Indices {
    Short(Vec<u16>),
    Long(Vec<u32>),
}

/// Rows that are multiplied at once.
const LANES: usize = 32;

/// Weights of a column whose products are added up by themselves.
const PART: usize = 1024;

impl SparseMatrix {
    /// The nonzero numbers of a row-major matrix.
    ///
    /// # Errors
    ///
    /// [`KernelError::Length`].
    pub fn new(values: &[f32], rows: usize, columns: usize) -> Result<Self, KernelError> {
        expect("weights", rows * columns, values.len())?;
        // Row by row, as they lie in memory: first how many each column has, then where they go.
        let mut starts = vec![0_u32; columns + 1];
        for line in values.chunks_exact(columns.max(1)) {
            for (count, value) in starts[1..].iter_mut().zip(line) {
                *count += u32::from(*value != 0.0);
            }
        }
        let mut end = 0;
        for start in &mut starts {
            end += *start;
            *start = end;
        }
        let mut next = starts.clone();
        let (mut found, mut kept) = (vec![0_u32; end as usize], vec![0.0; end as usize]);
        for (row, line) in values.chunks_exact(columns.max(1)).enumerate() {
            for (next, value) in next.iter_mut().zip(line) {
                if *value != 0.0 {
                    found[*next as usize] = row as u32;
                    kept[*next as usize] = *value;
                    *next += 1;
                }
            }
        }
        let indices = match rows <= 1 << 16 {
            true => Indices::Short(found.into_iter().map(|row| row as u16).collect()),
            false => Indices::Long(found),
        };
        Ok(Self {
            rows,
            columns,
            starts,
            indices,
            values: kept,
        })
    }

    /// Its rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// How many weights are not zero.
    pub fn kept(&self) -> usize {
        self.values.len()
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        let index = match self.indices {
            Indices::Short(_) => 2,
            Indices::Long(_) => 4,
        };
        self.values.len() * (4 + index) + 4 * self.starts.len()
    }

    /// Multiplies rows `[rows, k]` by it: `output` is `[rows, n]`, NaN where a zero that is left out meets a
    /// number that is not finite.
    ///
    /// # Panics
    ///
    /// Where rows, epilogue or output have other sizes, and for an epilogue with a bias of codes.
    pub fn multiply(&self, left: &[f32], epilogue: &Epilogue, output: &mut [f32]) {
        assert!(left.len().is_multiple_of(self.rows.max(1)), "no whole rows");
        let rows = left.len() / self.rows.max(1);
        epilogue.check([rows, self.columns], false);
        assert_eq!(
            output.len(),
            rows * self.columns,
            "the output has another size"
        );
        if self.columns == 0 {
            return;
        }
        for first in (0..rows).step_by(LANES) {
            let count = LANES.min(rows - first);
            let left = &left[first * self.rows..(first + count) * self.rows];
            let output = &mut output[first * self.columns..(first + count) * self.columns];
            self.lanes(left, count, output);
        }
        for (row, line) in output.chunks_exact_mut(self.columns).enumerate() {
            for (panel, values) in line.chunks_mut(crate::layout::WIDTH).enumerate() {
                let mut all = [0.0; crate::layout::WIDTH];
                all[..values.len()].copy_from_slice(values);
                let all = epilogue.of_rows(row, panel, all);
                let width = values.len();
                values.copy_from_slice(&all[..width]);
            }
        }
        let lines = left.chunks_exact(self.rows.max(1));
        for (left, line) in lines.zip(output.chunks_exact_mut(self.columns)) {
            if left.iter().any(|x| !x.is_finite()) {
                self.spoil(left, line);
            }
        }
    }

    /// Of one row.
    fn spoil(&self, left: &[f32], line: &mut [f32]) {
        let all = left.iter().filter(|x| !x.is_finite()).count();
        for (column, sum) in line.iter_mut().enumerate() {
            let range = self.starts[column] as usize..self.starts[column + 1] as usize;
            let is_bad = |row: usize| !left[row].is_finite();
            let kept = match &self.indices {
                Indices::Short(rows) => rows[range].iter().filter(|i| is_bad((**i).into())).count(),
                Indices::Long(rows) => rows[range].iter().filter(|i| is_bad(**i as usize)).count(),
            };
            if kept < all {
                *sum = f32::NAN;
            }
        }
    }

    /// Up to [`LANES`] rows.
    fn lanes(&self, left: &[f32], count: usize, output: &mut [f32]) {
        // One number of each row beside each other.
        let lanes = match count {
            1 => 1,
            2..=8 => 8,
            9..=16 => 16,
            _ => LANES,
        };
        let mut turned = Vec::new();
        if lanes > 1 {
            turned.resize(self.rows * lanes, 0.0);
            for (lane, row) in left.chunks_exact(self.rows).enumerate() {
                for (k, value) in row.iter().enumerate() {
                    turned[k * lanes + lane] = *value;
                }
            }
        }
        let left = if lanes > 1 { &turned[..] } else { left };
        let threads = rayon::current_num_threads();
        let parts = threads.min((self.values.len() * lanes) >> 19).max(1);
        let share = self.columns.div_ceil(parts);
        let part = |start: usize| {
            let end = (start + share).min(self.columns);
            let mut sums = vec![0.0; (end - start) * lanes];
            macro_rules! of {
                ($lanes:literal) => {
                    dispatch_narrow(Columns::<$lanes> {
                        matrix: self,
                        left: left.as_chunks::<$lanes>().0,
                        start,
                        sums: sums.as_chunks_mut::<$lanes>().0,
                    })
                };
            }
            match lanes {
                1 => of!(1),
                8 => of!(8),
                16 => of!(16),
                _ => of!(32),
            }
            (start, sums)
        };
        let starts: Vec<usize> = (0..self.columns).step_by(share).collect();
        let stripes: Vec<(usize, Vec<f32>)> = match parts {
            1 => starts.into_iter().map(part).collect(),
            _ => starts.into_par_iter().map(part).collect(),
        };
        for (start, sums) in stripes {
            for (column, sums) in sums.chunks_exact(lanes).enumerate() {
                for (lane, sum) in sums[..count].iter().enumerate() {
                    output[lane * self.columns + start + column] = *sum;
                }
            }
        }
    }
}

struct Columns<'a, const L: usize> {
    matrix: &'a SparseMatrix,
    left: &'a [[f32; L]],
    start: usize,
    sums: &'a mut [[f32; L]],
}

impl<const L: usize> Task for Columns<'_, L> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (column, sums) in self.sums.iter_mut().enumerate() {
            let at = self.start + column;
            let range = self.matrix.starts[at] as usize..self.matrix.starts[at + 1] as usize;
            let values = &self.matrix.values[range.clone()];
            *sums = match &self.matrix.indices {
                Indices::Short(indices) => sum(self.left, values, &indices[range], |i| i.into()),
                Indices::Long(indices) => sum(self.left, values, &indices[range], |i| i as usize),
            };
        }
    }
}

/// A sum of sums: it is off by the lengths of both, and not by their product.
#[inline(always)]
fn sum<const L: usize, I: Copy>(
    left: &[[f32; L]],
    values: &[f32],
    indices: &[I],
    at: impl Fn(I) -> usize,
) -> [f32; L] {
    let mut all = [0.0f32; L];
    for (values, indices) in values.chunks(PART).zip(indices.chunks(PART)) {
        let sums = sum_part(left, values, indices, &at);
        for (all, sum) in all.iter_mut().zip(sums) {
            *all += sum;
        }
    }
    all
}

/// Two sums each, so that additions need not wait for each other.
#[inline(always)]
fn sum_part<const L: usize, I: Copy>(
    left: &[[f32; L]],
    values: &[f32],
    indices: &[I],
    at: impl Fn(I) -> usize,
) -> [f32; L] {
    let mut parts = [[0.0f32; L]; 2];
    let (pairs, last) = values.as_chunks::<2>();
    let (rows, last_row) = indices.as_chunks::<2>();
    for (values, rows) in pairs.iter().zip(rows) {
        for part in 0..2 {
            let row = &left[at(rows[part])];
            for (sum, x) in parts[part].iter_mut().zip(row) {
                *sum = x.mul_add(values[part], *sum);
            }
        }
    }
    let [mut sums, others] = parts;
    for (value, row) in last.iter().zip(last_row) {
        for (sum, x) in sums.iter_mut().zip(&left[at(*row)]) {
            *sum = x.mul_add(*value, *sum);
        }
    }
    for (sum, other) in sums.iter_mut().zip(others) {
        *sum += other;
    }
    sums
}
