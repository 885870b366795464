//! Floats times weights that are stored in F32, half precision, or codes with scales.

mod scaled;

use std::ops::Range;

use half::{bf16, f16};

use crate::blocks::{Filled, Packed};
use crate::drive::{HEIGHT, Place, Right, multiply};
use crate::error::expect;
use crate::layout::{Lines, WIDTH, apart, eighths, lines};
use crate::rows::Left;
use crate::simd::Simd;
use crate::{Blocks, Epilogue, KernelError};
use scaled::Scaled;

/// In what the floats of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Storage {
    /// 4 bytes each.
    #[default]
    F32,
    /// 2 bytes each, rounded to the nearest; up to 65,504.
    F16,
    /// 2 bytes each, rounded to the nearest.
    BF16,
}

/// A matrix `[k, n]` that floats are multiplied by. Products and sums are in F32.
#[derive(Debug, Clone, PartialEq)]
pub struct FloatMatrix {
    rows: usize,
    columns: usize,
    panels: Panels,
}

#[derive(Debug, Clone, PartialEq)]
enum Panels {
    F32(Lines<f32, WIDTH>),
    F16(Lines<u16, WIDTH>),
    BF16(Lines<u16, WIDTH>),
    Codes(Codes),
}

/// Codes, and scales of blocks of rows.
#[derive(Debug, Clone, PartialEq)]
struct Codes {
    codes: Signed,
    blocks: Packed,
}

#[derive(Debug, Clone, PartialEq)]
enum Signed {
    Bytes(Lines<i8, WIDTH>),
    Eighths(Lines<u32, WIDTH>),
}

impl FloatMatrix {
    /// Packs row-major numbers, rounded to how they are stored. F16 takes finite numbers up to 65,504;
    /// larger ones are stored as F32.
    ///
    /// # Errors
    ///
    /// [`KernelError::Length`].
    pub fn new(
        values: &[f32],
        rows: usize,
        columns: usize,
        storage: Storage,
    ) -> Result<Self, KernelError> {
        expect("weights", rows * columns, values.len())?;
        let fits = values.iter().all(|value| value.abs() < 65520.0);
        let panels = match storage {
            Storage::F16 if fits => Panels::F16(lines(values, rows, columns, |value| {
                f16::from_f32(value).to_bits()
            })),
            Storage::BF16 => Panels::BF16(lines(values, rows, columns, |value| {
                bf16::from_f32(value).to_bits()
            })),
            _ => Panels::F32(lines(values, rows, columns, |value| value)),
        };
        Ok(Self {
            rows,
            columns,
            panels,
        })
    }

    /// Packs row-major signed codes of 4 or 8 bits. Codes of 4 bits are stored as bytes where there are several
    /// blocks and 8 does not divide their rows.
    ///
    /// # Errors
    ///
    /// [`KernelError::Length`], [`KernelError::Bits`], [`KernelError::Code`], and
    /// [`KernelError::Block`] unless blocks divide the rows.
    pub fn of_codes(
        codes: &[i8],
        [rows, columns]: [usize; 2],
        bits: u8,
        blocks: Blocks<'_>,
    ) -> Result<Self, KernelError> {
        let blocks = Packed::new(codes, [rows, columns], bits, blocks)?;
        let codes = match blocks.take_eighths(rows, bits) {
            true => Signed::Eighths(eighths(codes, rows, columns)),
            false => Signed::Bytes(lines(codes, rows, columns, |code| code)),
        };
        Ok(Self {
            rows,
            columns,
            panels: Panels::Codes(Codes { codes, blocks }),
        })
    }

    /// Its rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(panels) => panels.bytes(),
            Panels::F16(panels) | Panels::BF16(panels) => panels.bytes(),
            Panels::Codes(Codes { codes, blocks }) => {
                let codes = match codes {
                    Signed::Bytes(codes) => codes.bytes(),
                    Signed::Eighths(codes) => codes.bytes(),
                };
                codes + blocks.bytes()
            }
        }
    }

    /// Multiplies rows by it: `output` is `[rows, n]`.
    ///
    /// # Panics
    ///
    /// Where rows, epilogue or output have other sizes, and for an epilogue with a bias of codes.
    pub fn multiply(&self, left: &dyn Left<f32>, epilogue: &Epilogue, output: &mut [f32]) {
        self.multiply_into(left, epilogue, output, self.columns, 0);
    }

    /// As [`multiply`](Self::multiply), into columns from `column` on of rows of `stride` numbers.
    ///
    /// # Panics
    ///
    /// As [`multiply`](Self::multiply).
    pub fn multiply_into(
        &self,
        left: &dyn Left<f32>,
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
            Panels::F32(panels) => {
                let right = Floats::<_, false> { of, panels };
                multiply(left, &right, epilogue, output, place);
            }
            Panels::F16(panels) => {
                let right = Floats::<_, false> { of, panels };
                multiply(left, &right, epilogue, output, place);
            }
            Panels::BF16(panels) => {
                let right = Floats::<_, true> { of, panels };
                multiply(left, &right, epilogue, output, place);
            }
            Panels::Codes(Codes { codes, blocks }) => match codes {
                Signed::Bytes(panels) => {
                    let right = Scaled { of, panels, blocks };
                    multiply(left, &right, epilogue, output, place);
                }
                Signed::Eighths(panels) => {
                    let right = Scaled { of, panels, blocks };
                    multiply(left, &right, epilogue, output, place);
                }
            },
        }
    }
}

/// Panels of floats; `BRAIN` tells BF16 from F16.
struct Floats<'a, T, const BRAIN: bool> {
    of: (usize, usize),
    panels: &'a Lines<T, WIDTH>,
}

/// Lines of a panel.
#[derive(Default)]
struct Decoded<T> {
    /// As floats.
    floats: Vec<[f32; WIDTH]>,
    /// Of a narrow panel, filled up.
    filled: Vec<[T; WIDTH]>,
    of_blocks: Filled,
}

/// A row of a panel, as it is stored.
trait Line: Sync {
    fn widen<S: Simd, const BRAIN: bool>(&self, simd: S) -> S::Floats;
    /// Whether it takes time.
    const WIDENS: bool;
}

impl Line for [f32; WIDTH] {
    const WIDENS: bool = false;

    #[inline(always)]
    fn widen<S: Simd, const BRAIN: bool>(&self, simd: S) -> S::Floats {
        simd.floats(self)
    }
}

impl Line for [u16; WIDTH] {
    const WIDENS: bool = true;

    #[inline(always)]
    fn widen<S: Simd, const BRAIN: bool>(&self, simd: S) -> S::Floats {
        if BRAIN {
            simd.bf16(self)
        } else {
            simd.f16(self)
        }
    }
}

impl<T: Copy + Default + Sync, const BRAIN: bool> Right<f32> for Floats<'_, T, BRAIN>
where
    [T; WIDTH]: Line,
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
        let Decoded { floats, filled, .. } = decoded;
        self.panels.fill_up(panel, lines.clone(), filled);
        if <[T; WIDTH]>::WIDENS && rows > HEIGHT {
            floats.clear();
            for line in self.panels.of(panel, lines, filled) {
                floats.push(simd.store(line.widen::<S, BRAIN>(simd)));
            }
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
        _: &[f32],
        sums: &mut [[f32; WIDTH]; R],
    ) {
        let Decoded { floats, filled, .. } = decoded;
        let panel = self.panels.of(panel, lines.clone(), filled);
        let rows = part(rows, self.stride(), lines);
        match <[T; WIDTH]>::WIDENS && !floats.is_empty() {
            true => sum::<S, R, _, false>(simd, rows, floats, sums),
            false => sum::<S, R, _, BRAIN>(simd, rows, panel, sums),
        }
    }
}

/// The same numbers of each of `R` rows.
#[inline(always)]
fn part<const R: usize>(rows: &[f32], stride: usize, terms: Range<usize>) -> [&[f32]; R] {
    let mut parts: [&[f32]; R] = [&[]; R];
    for (index, part) in parts.iter_mut().enumerate() {
        *part = &rows[index * stride + terms.start..index * stride + terms.end];
    }
    parts
}

/// Adds products of rows and the lines of a panel.
#[inline(always)]
fn sum<S: Simd, const R: usize, L: Line, const BRAIN: bool>(
    simd: S,
    mut rows: [&[f32]; R],
    panel: &[L],
    sums: &mut [[f32; WIDTH]; R],
) {
    for row in &mut rows {
        *row = &row[..panel.len()];
    }
    let one = simd.floats(&[1.0; WIDTH]);
    if R <= 2 {
        // Few sums wait for each other: four of each, which are added in the end.
        let mut parts = [[simd.floats(&[0.0; WIDTH]); 4]; R];
        let (fours, rest) = panel.as_chunks::<4>();
        for (k, lines) in fours.iter().enumerate() {
            for (part, line) in lines.iter().enumerate() {
                let weights = line.widen::<S, BRAIN>(simd);
                for (parts, row) in parts.iter_mut().zip(rows) {
                    parts[part] = simd.multiply_add(row[4 * k + part], weights, parts[part]);
                }
            }
        }
        for (k, line) in (4 * fours.len()..).zip(rest) {
            let weights = line.widen::<S, BRAIN>(simd);
            for (parts, row) in parts.iter_mut().zip(rows) {
                parts[0] = simd.multiply_add(row[k], weights, parts[0]);
            }
        }
        let mut added = *sums;
        for (sums, parts) in added.iter_mut().zip(parts) {
            let mut all = simd.floats(sums);
            for part in parts {
                all = simd.fuse(part, one, all);
            }
            *sums = simd.store(all);
        }
        // Infinities of both signs add up to NaN: what overflows does so as in many rows.
        if added.iter().flatten().all(|sum| sum.is_finite()) {
            *sums = added;
            return;
        }
    }
    // From 0: a sum of sums is off by the lengths of both, and not by their product.
    let mut all = [simd.floats(&[0.0; WIDTH]); R];
    for (k, line) in panel.iter().enumerate() {
        let weights = line.widen::<S, BRAIN>(simd);
        for (sums, row) in all.iter_mut().zip(rows) {
            *sums = simd.multiply_add(row[k], weights, *sums);
        }
    }
    for (sums, all) in sums.iter_mut().zip(all) {
        *sums = simd.store(simd.fuse(all, one, simd.floats(sums)));
    }
}
