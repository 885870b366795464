//! Loops that compilers turn into the vector instructions of any CPU.

use super::Simd;
use crate::layout::WIDTH;

/// Any CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    type Floats = [f32; WIDTH];

    fn floats(self, values: &[f32; WIDTH]) -> Self::Floats {
        *values
    }

    fn bf16(self, bits: &[u16; WIDTH]) -> Self::Floats {
        bits.map(from_bf16)
    }

    fn f16(self, bits: &[u16; WIDTH]) -> Self::Floats {
        bits.map(from_f16)
    }

    fn codes(self, codes: &[i8; WIDTH]) -> Self::Floats {
        codes.map(f32::from)
    }

    const EIGHTH: f32 = 1.0;

    fn eighths(self, words: &[u32; WIDTH], mut each: impl FnMut(usize, Self::Floats)) {
        for row in 0..8 {
            // The code comes to the top, and its sign with it to the bottom again.
            let left = 16 * (1 - row % 2) + 12 - 4 * (row / 2);
            let code = |word: u32| (word << left) as i32 >> 28;
            each(row, words.map(|word| code(word) as f32));
        }
    }

    fn multiply_add(self, x: f32, weights: Self::Floats, mut sums: Self::Floats) -> Self::Floats {
        for (sum, weight) in sums.iter_mut().zip(weights) {
            *sum += x * weight;
        }
        sums
    }

    fn fuse(self, a: Self::Floats, b: Self::Floats, mut c: Self::Floats) -> Self::Floats {
        for ((c, a), b) in c.iter_mut().zip(a).zip(b) {
            *c += a * b;
        }
        c
    }

    fn store(self, values: Self::Floats) -> [f32; WIDTH] {
        values
    }

    fn add_pairs<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[i8; 2 * WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        for (sums, row) in sums.iter_mut().zip(rows) {
            for (pair, weights) in row.iter().zip(panel) {
                let [a, b] = pair.map(i32::from);
                for (sum, weight) in sums.iter_mut().zip(weights.as_chunks::<2>().0) {
                    *sum += a * i32::from(weight[0]) + b * i32::from(weight[1]);
                }
            }
        }
    }

    fn add_eighths<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[u32; WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        for (k, words) in panel.iter().enumerate() {
            let rows = rows.map(|row| &row[4 * k..4 * k + 4]);
            self.add_pairs(rows, &self.pairs(words), sums);
        }
    }

    fn pairs(self, words: &[u32; WIDTH]) -> [[i8; 2 * WIDTH]; 4] {
        let mut all = [[0; 2 * WIDTH]; 4];
        for (place, pairs) in all.iter_mut().enumerate() {
            for (pair, word) in pairs.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                let high = word << (12 - 4 * place);
                *pair = [(high as i16 >> 12) as i8, (high as i32 >> 28) as i8];
            }
        }
        all
    }
}

/// What F16 bits stand for.
#[inline(always)]
fn from_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    // The exponent is biased by 15, not by 127: 2¹¹² apart, which also makes subnormals normal.
    let value = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let value = if magnitude >= 0x7c00 << 13 {
        f32::from_bits(magnitude | 0x7f80_0000)
    } else {
        value
    };
    f32::from_bits(value.to_bits() | sign)
}

/// What BF16 bits stand for.
#[inline(always)]
fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn bits_of_halves_stand_for_their_numbers() {
        for bits in 0..=u16::MAX {
            for (found, expected) in [
                (from_f16(bits), f16::from_bits(bits).to_f32()),
                (from_bf16(bits), bf16::from_bits(bits).to_f32()),
            ] {
                let is_nan = found.is_nan() && expected.is_nan();
                assert!(
                    is_nan || found.to_bits() == expected.to_bits(),
                    "{bits:x}: {found}"
                );
            }
        }
    }
}
