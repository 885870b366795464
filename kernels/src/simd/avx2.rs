//! AVX2 and FMA: two registers of eight numbers for a row of a panel.

use std::arch::x86_64::{__m128i, __m256, __m256i};

use pulp::cast;
use pulp::x86::V3;

use super::Simd;
use crate::layout::WIDTH;

impl Simd for V3 {
    type Floats = [__m256; 2];

    #[inline(always)]
    fn floats(self, values: &[f32; WIDTH]) -> Self::Floats {
        cast(*values)
    }

    #[inline(always)]
    fn bf16(self, bits: &[u16; WIDTH]) -> Self::Floats {
        let [a, b]: [__m128i; 2] = cast(*bits);
        [self.bf16_half(a), self.bf16_half(b)]
    }

    #[inline(always)]
    fn f16(self, bits: &[u16; WIDTH]) -> Self::Floats {
        let [a, b]: [__m128i; 2] = cast(*bits);
        [self.f16_half(a), self.f16_half(b)]
    }

    #[inline(always)]
    fn codes(self, codes: &[i8; WIDTH]) -> Self::Floats {
        self.widen(cast(*codes))
    }

    const EIGHTH: f32 = 1.0 / (1 << 28) as f32;

    /// The code is left in the highest four bits, which have its sign.
    #[inline(always)]
    fn eighths(self, words: &[u32; WIDTH], mut each: impl FnMut(usize, Self::Floats)) {
        let words: [__m256i; 2] = cast(*words);
        let highest = self.avx._mm256_set1_epi32(0xf_u32.rotate_right(4) as i32);
        macro_rules! rows {
            ($($row:literal << $left:literal)*) => {
                $(
                    let mut codes = [self.avx._mm256_setzero_ps(); 2];
                    for (codes, words) in codes.iter_mut().zip(words) {
                        let high = self.avx2._mm256_slli_epi32::<$left>(words);
                        let code = self.avx2._mm256_and_si256(high, highest);
                        *codes = self.avx._mm256_cvtepi32_ps(code);
                    }
                    each($row, codes);
                )*
            };
        }
        rows!(0 << 28 1 << 12 2 << 24 3 << 8 4 << 20 5 << 4 6 << 16 7 << 0);
    }

    #[inline(always)]
    fn multiply_add(self, x: f32, weights: Self::Floats, sums: Self::Floats) -> Self::Floats {
        let x = self.avx._mm256_set1_ps(x);
        self.fuse([x, x], weights, sums)
    }

    #[inline(always)]
    fn fuse(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        [
            self.fma._mm256_fmadd_ps(a[0], b[0], c[0]),
            self.fma._mm256_fmadd_ps(a[1], b[1], c[1]),
        ]
    }

    #[inline(always)]
    fn store(self, values: Self::Floats) -> [f32; WIDTH] {
        cast(values)
    }

    #[inline(always)]
    fn add_pairs<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[i8; 2 * WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        let mut rows = rows;
        for row in &mut rows {
            *row = &row[..panel.len()];
        }
        let before = sums;
        let mut sums = [[self.avx._mm256_setzero_si256(); 2]; R];
        for (sums, before) in sums.iter_mut().zip(&*before) {
            *sums = cast(*before);
        }
        for (k, codes) in panel.iter().enumerate() {
            let [low, high]: [__m128i; 2] = cast(*codes);
            let weights = [
                self.avx2._mm256_cvtepi8_epi16(low),
                self.avx2._mm256_cvtepi8_epi16(high),
            ];
            for (sums, row) in sums.iter_mut().zip(rows) {
                self.add_pair(row[k], weights, sums);
            }
        }
        for (before, sums) in before.iter_mut().zip(sums) {
            *before = cast(sums);
        }
    }

    #[inline(always)]
    fn add_eighths<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[u32; WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        let mut fours: [&[[[i16; 2]; 4]]; R] = [&[]; R];
        for (fours, row) in fours.iter_mut().zip(rows) {
            *fours = &row.as_chunks::<4>().0[..panel.len()];
        }
        let before = sums;
        let mut sums = [[self.avx._mm256_setzero_si256(); 2]; R];
        for (sums, before) in sums.iter_mut().zip(&*before) {
            *sums = cast(*before);
        }
        for (k, words) in panel.iter().enumerate() {
            let words: [__m256i; 2] = cast(*words);
            macro_rules! pairs {
                ($($place:literal << $left:literal)*) => {
                    $(
                        let mut weights = words;
                        for weights in &mut weights {
                            let high = self.avx2._mm256_slli_epi16::<$left>(*weights);
                            *weights = self.avx2._mm256_srai_epi16::<12>(high);
                        }
                        for (sums, fours) in sums.iter_mut().zip(fours) {
                            self.add_pair(fours[k][$place], weights, sums);
                        }
                    )*
                };
            }
            pairs!(0 << 12 1 << 8 2 << 4 3 << 0);
        }
        for (before, sums) in before.iter_mut().zip(sums) {
            *before = cast(sums);
        }
    }

    #[inline(always)]
    fn pairs(self, words: &[u32; WIDTH]) -> [[i8; 2 * WIDTH]; 4] {
        let words: [__m256i; 2] = cast(*words);
        let mut all = [[0; 2 * WIDTH]; 4];
        macro_rules! pairs {
            ($($place:literal << $left:literal)*) => {
                $(
                    let [first, second] = [
                        self.avx2._mm256_slli_epi16::<$left>(words[0]),
                        self.avx2._mm256_slli_epi16::<$left>(words[1]),
                    ];
                    let codes = self.avx2._mm256_packs_epi16(
                        self.avx2._mm256_srai_epi16::<12>(first),
                        self.avx2._mm256_srai_epi16::<12>(second),
                    );
                    // Halves of the registers are packed by themselves.
                    all[$place] = cast(self.avx2._mm256_permute4x64_epi64::<0b11_01_10_00>(codes));
                )*
            };
        }
        pairs!(0 << 12 1 << 8 2 << 4 3 << 0);
        all
    }
}

/// The steps of the loops above.
trait Steps {
    fn bf16_half(self, bits: __m128i) -> __m256;
    fn f16_half(self, bits: __m128i) -> __m256;
    fn widen(self, codes: __m128i) -> [__m256; 2];
    fn add_pair(self, pair: [i16; 2], weights: [__m256i; 2], sums: &mut [__m256i; 2]);
}

impl Steps for V3 {
    #[inline(always)]
    fn bf16_half(self, bits: __m128i) -> __m256 {
        let wide = self.avx2._mm256_cvtepu16_epi32(bits);
        cast(self.avx2._mm256_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    fn f16_half(self, bits: __m128i) -> __m256 {
        // Weights are finite: the exponent moves by 2¹¹², which also makes subnormals normal.
        let bias = self.avx._mm256_set1_ps(f32::from_bits((127 + 112) << 23));
        // Of the copies of the sign that widening makes the highest stays.
        let places = self.avx._mm256_set1_epi32(0x8fff_e000_u32 as i32);
        let wide = self.avx2._mm256_cvtepi16_epi32(bits);
        let moved = self.avx2._mm256_slli_epi32::<13>(wide);
        let value = self.avx2._mm256_and_si256(moved, places);
        self.avx._mm256_mul_ps(cast(value), bias)
    }

    #[inline(always)]
    fn widen(self, codes: __m128i) -> [__m256; 2] {
        let upper = self.sse2._mm_srli_si128::<8>(codes);
        let (low, high) = (
            self.avx2._mm256_cvtepi8_epi32(codes),
            self.avx2._mm256_cvtepi8_epi32(upper),
        );
        [
            self.avx._mm256_cvtepi32_ps(low),
            self.avx._mm256_cvtepi32_ps(high),
        ]
    }

    #[inline(always)]
    fn add_pair(self, pair: [i16; 2], weights: [__m256i; 2], sums: &mut [__m256i; 2]) {
        let pair = self.avx._mm256_set1_epi32(cast(pair));
        for (sum, weights) in sums.iter_mut().zip(weights) {
            // At most 2 · 255 · 128: exact.
            let products = self.avx2._mm256_madd_epi16(pair, weights);
            *sum = self.avx2._mm256_add_epi32(*sum, products);
        }
    }
}
