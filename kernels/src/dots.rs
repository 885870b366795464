//! Codes times codes, four products at a time, by rten-gemm: for left sides of many rows on a CPU that sums
//! such products exactly.

use std::fmt;

use rayon::prelude::*;
use rten_gemm::{GemmExecutor, GemmInputA, GemmInputB, GemmOptions, PackedBMatrix, QuantParams};
use rten_tensor::NdTensorView;

use crate::Epilogue;
use crate::drive::{Place, store};
use crate::layout::{WIDTH, panels};
use crate::rows::Left;
use crate::simd::{Simd, Task, dispatch};

/// Left numbers that are brought to bytes at once.
const GATHERED: usize = 1 << 20;
/// Rows of them, at least.
const ROWS: usize = 64;
/// Sums that a thread takes.
const SUMS: usize = 1 << 16;

/// A matrix of codes of 8 bits.
pub(crate) struct Dots {
    packed: PackedBMatrix<i8>,
    bytes: usize,
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
        let bytes = 4 * packed.clone().into_vec().len();
        Some(Self { packed, bytes })
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
        place.check([rows, columns], epilogue, output);
        let piece = (GATHERED / terms.max(1)).clamp(ROWS, rows.max(ROWS));
        let (mut scratch, mut bytes, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        let executor = Executor::default();
        for first in (0..rows).step_by(piece) {
            let count = piece.min(rows - first);
            let zero = to_bytes(left.take(first, count, terms, &mut scratch), &mut bytes);
            sums.resize(count * columns, 0);
            let zeros = vec![zero; count];
            let options = GemmOptions {
                a_quant: Some(QuantParams { zero_point: &zeros }),
                ..GemmOptions::default()
            };
            let rows = NdTensorView::from_data([count, terms], &bytes[..]);
            let done = executor.gemm(
                &mut sums,
                GemmInputA::Unpacked(rows),
                GemmInputB::Packed(&self.packed),
                options,
            );
            done.expect("it was packed for this kernel and has these sizes");
            let output = &mut output[first * place.stride..(first + count) * place.stride];
            let at_once = (SUMS / columns.max(1)).max(1);
            let parts = output.par_chunks_mut(at_once * place.stride);
            let sums = sums.par_chunks(at_once * columns);
            parts.zip(sums).for_each(|(output, sums)| {
                dispatch(Finish {
                    sums,
                    columns,
                    epilogue,
                    output,
                    place,
                });
            });
        }
    }
}

/// Distances from the code of zero as codes, and the code of zero.
fn to_bytes(distances: &[i16], bytes: &mut Vec<u8>) -> u8 {
    let (mut low, mut high) = (0, 0);
    for distance in distances {
        low = low.min(*distance);
        high = high.max(*distance);
    }
    assert!(
        i32::from(high) - i32::from(low) <= 255,
        "codes from {low} to {high} are of no grid of 8 bits"
    );
    bytes.clear();
    bytes.extend(distances.iter().map(|distance| (distance - low) as u8));
    low.unsigned_abs() as u8
}

/// What happens to the sums of some rows.
struct Finish<'a> {
    sums: &'a [i32],
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
        for (sums, output) in rows.zip(self.output.chunks_exact_mut(stride)) {
            for panel in 0..panels(self.columns) {
                let start = panel * WIDTH;
                let width = WIDTH.min(self.columns - start);
                let mut of_panel = [0; WIDTH];
                match sums[start..].first_chunk::<WIDTH>() {
                    Some(whole) => of_panel = *whole,
                    None => of_panel[..width].copy_from_slice(&sums[start..]),
                }
                let values = self.epilogue.of_codes(panel, &of_panel);
                store(&values, width, &mut output[column + start..]);
            }
        }
    }
}
