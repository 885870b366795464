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

    fn nibbles(self, bytes: &[u8; WIDTH]) -> [Self::Floats; 2] {
        [
            bytes.map(|byte| f32::from((byte & 15) as i8 - 8)),
            bytes.map(|byte| f32::from((byte >> 4) as i8 - 8)),
        ]
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

    fn add_nibbles<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[u8; WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        for (sums, row) in sums.iter_mut().zip(rows) {
            for (pair, bytes) in row.iter().zip(panel) {
                let [a, b] = pair.map(i32::from);
                for (sum, byte) in sums.iter_mut().zip(bytes) {
                    let (low, high) = (i32::from(byte & 15) - 8, i32::from(byte >> 4) - 8);
                    *sum += a * low + b * high;
                }
            }
        }
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
