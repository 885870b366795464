//! Codes times codes, four products at a time, by rten-gemm: for left sides of many rows on a CPU that sums
//! such products exactly.

use std::fmt;

use rayon::prelude::*;
use rten_gemm::{GemmExecutor, GemmInputA, GemmInputB, GemmOptions, PackedBMatrix};
use rten_tensor::NdTensorView;

use crate::Epilogue;
use crate::drive::{Place, store};
use crate::layout::{WIDTH, panels};
use crate::rows::Left;
use crate::shares::in_shares;
use crate::simd::{Simd, Task, dispatch};

/// Left numbers that are brought to bytes at once.
const GATHERED: usize = 1 << 20;
/// Rows of them, at least, and of those that a thread brings to bytes at once.
const ROWS: usize = 64;
/// Sums that a thread takes.
const SUMS: usize = 1 << 16;

/// A matrix of codes of 8 bits.
pub(crate) struct Dots {
    packed: PackedBMatrix<i8>,
    bytes: usize,
    /// Of the codes of each column.
    sums: Vec<i32>,
}

impl fmt::Debug for Dots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dots")
    }
}

type Executor = GemmExecutor<u8, i8, i32>;

impl Dots {
    /// `None` where sums of four products saturate.
    pub(crate) fn new(codes: &[i8], rows: usize, columns: usize) -> Option<Self> {
        let executor = Executor::default();
        if executor.may_saturate() {
            return None;
        }
        let packed = executor.prepack_b(NdTensorView::from_data([rows, columns], codes));
        let bytes = 4 * (packed.clone().into_vec().len() + columns);
        let mut sums = vec![0; columns];
        for row in codes.chunks_exact(columns.max(1)) {
            for (sum, code) in sums.iter_mut().zip(row) {
                *sum += i32::from(*code);
            }
        }
        Some(Self {
            packed,
            bytes,
            sums,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn multiply(
        &self,
        left: &dyn Left<i16>,
        epilogue: &Epilogue,
        output: &mut [f32],
        place: Place,
    ) {
        let (rows, terms, columns) = (left.count(), left.terms(), self.packed.cols());
        place.check([rows, columns], epilogue, true, output);
        let piece = (GATHERED / terms.max(1)).clamp(ROWS, rows.max(ROWS));
        let (mut bytes, mut sums) = (Vec::new(), Vec::new());
        let executor = Executor::default();
        for first in (0..rows).step_by(piece) {
            let count = piece.min(rows - first);
            bytes.resize(count * terms, 0);
            let zeros = in_shares(&mut bytes, terms, |row, bytes| {
                let (mut zeros, mut scratch) = (Vec::new(), Vec::new());
                for (part, bytes) in bytes.chunks_mut(ROWS * terms).enumerate() {
                    let from = first + row + part * ROWS;
                    let codes = left.take(from, bytes.len() / terms, terms, &mut scratch);
                    to_bytes(codes, terms, bytes, &mut zeros);
                }
                zeros
            });
            let zeros = zeros.concat();
            sums.resize(count * columns, 0);
            let rows = NdTensorView::from_data([count, terms], &bytes[..]);
            let done = executor.gemm(
                &mut sums,
                GemmInputA::Unpacked(rows),
                GemmInputB::Packed(&self.packed),
                GemmOptions::default(),
            );
            done.expect("it was packed for this kernel and has these sizes");
            let output = &mut output[first * place.stride..(first + count) * place.stride];
            let at_once = (SUMS / columns.max(1)).max(1);
            let parts = output.par_chunks_mut(at_once * place.stride);
            let sums = sums.par_chunks(at_once * columns);
            parts
                .zip(sums)
                .enumerate()
                .for_each(|(part, (output, sums))| {
                    dispatch(Finish {
                        sums,
                        first: first + part * at_once,
                        zeros: &zeros[part * at_once..],
                        of_columns: &self.sums,
                        columns,
                        epilogue,
                        output,
                        place,
                    });
                });
        }
    }
}

/// Distances from the code of zero as codes; adds the code of zero of each row.
fn to_bytes(distances: &[i16], terms: usize, bytes: &mut [u8], zeros: &mut Vec<u8>) {
    let rows = distances.chunks_exact(terms);
    for (row, bytes) in rows.zip(bytes.chunks_exact_mut(terms)) {
        let (mut low, mut high) = (0, 0);
        for distance in row {
            low = low.min(*distance);
            high = high.max(*distance);
        }
        assert!(
            i32::from(high) - i32::from(low) <= 255,
            "codes from {low} to {high} are of no grid of 8 bits"
        );
        for (byte, distance) in bytes.iter_mut().zip(row) {
            *byte = (distance - low) as u8;
        }
        zeros.push(low.unsigned_abs() as u8);
    }
}

/// What happens to the sums of some rows.
struct Finish<'a> {
    sums: &'a [i32],
    /// The first of the rows.
    first: usize,
    /// The code of zero of each row.
    zeros: &'a [u8],
    of_columns: &'a [i32],
    columns: usize,
    epilogue: &'a Epilogue,
    output: &'a mut [f32],
    place: Place,
}

impl Task for Finish<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Place { stride, column } = self.place;
        let rows = self.sums.chunks_exact(self.columns);
        let rows = rows.zip(self.output.chunks_exact_mut(stride)).enumerate();
        for (row, (sums, output)) in rows {
            let zero = i32::from(self.zeros[row]);
            for panel in 0..panels(self.columns) {
                let start = panel * WIDTH;
                let width = WIDTH.min(self.columns - start);
                let (mut of_panel, mut of_columns) = ([0; WIDTH], [0; WIDTH]);
                match (
                    sums[start..].first_chunk::<WIDTH>(),
                    self.of_columns[start..].first_chunk::<WIDTH>(),
                ) {
                    (Some(sums), Some(columns)) => (of_panel, of_columns) = (*sums, *columns),
                    _ => {
                        of_panel[..width].copy_from_slice(&sums[start..]);
                        of_columns[..width].copy_from_slice(&self.of_columns[start..]);
                    }
                }
                for (sum, of_column) in of_panel.iter_mut().zip(&of_columns) {
                    *sum -= zero * of_column;
                }
                let values = self.epilogue.of_codes(self.first + row, panel, &of_panel);
                store(&values, width, &mut output[column + start..]);
            }
        }
    }
}
