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

    #[inline(always)]
    fn nibbles(self, bytes: &[u8; WIDTH]) -> [Self::Floats; 2] {
        let [low, high] = self.split(bytes);
        [self.widen(low), self.widen(high)]
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
    fn add_nibbles<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[u8; WIDTH]],
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
        for (k, bytes) in panel.iter().enumerate() {
            let [first, second] = self.split(bytes);
            let weights = [
                self.avx2
                    ._mm256_cvtepi8_epi16(self.sse2._mm_unpacklo_epi8(first, second)),
                self.avx2
                    ._mm256_cvtepi8_epi16(self.sse2._mm_unpackhi_epi8(first, second)),
            ];
            for (sums, row) in sums.iter_mut().zip(rows) {
                self.add_pair(row[k], weights, sums);
            }
        }
        for (before, sums) in before.iter_mut().zip(sums) {
            *before = cast(sums);
        }
    }
}

/// The steps of the loops above.
trait Steps {
    fn bf16_half(self, bits: __m128i) -> __m256;
    fn f16_half(self, bits: __m128i) -> __m256;
    fn widen(self, codes: __m128i) -> [__m256; 2];
    fn split(self, bytes: &[u8; WIDTH]) -> [__m128i; 2];
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
        let wide = self.avx2._mm256_cvtepu16_epi32(bits);
        let magnitude = self.avx._mm256_set1_epi32(0x7fff);
        let rest = self.avx2._mm256_and_si256(wide, magnitude);
        let sign = self.avx2._mm256_xor_si256(wide, rest);
        let rest = cast(self.avx2._mm256_slli_epi32::<13>(rest));
        let value = self.avx._mm256_mul_ps(rest, bias);
        let sign = self.avx2._mm256_slli_epi32::<16>(sign);
        self.avx._mm256_or_ps(value, cast(sign))
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

    /// The codes of the low and of the high halves.
    #[inline(always)]
    fn split(self, bytes: &[u8; WIDTH]) -> [__m128i; 2] {
        let bytes: __m128i = cast(*bytes);
        let half = self.sse2._mm_set1_epi8(15);
        let eight = self.sse2._mm_set1_epi8(8);
        let low = self.sse2._mm_and_si128(bytes, half);
        let shifted = self.sse2._mm_srli_epi16::<4>(bytes);
        let high = self.sse2._mm_and_si128(shifted, half);
        [
            self.sse2._mm_sub_epi8(low, eight),
            self.sse2._mm_sub_epi8(high, eight),
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
