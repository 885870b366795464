//! AVX-512 with VNNI: one register of sixteen numbers for a row of a panel.

use std::arch::x86_64::{__m128i, __m256i, __m512, __m512i};

use pulp::cast;

use super::Simd;
use crate::layout::WIDTH;

pulp::simd_type! {
    /// What the loops below use, and VNNI: a product of pairs and its addition become one instruction of it.
    pub(crate) struct Vnni {
        pub(crate) sse: "sse",
        pub(crate) sse2: "sse2",
        pub(crate) avx: "avx",
        pub(crate) avx2: "avx2",
        pub(crate) fma: "fma",
        pub(crate) avx512f: "avx512f",
        pub(crate) avx512bw: "avx512bw",
        pub(crate) avx512vl: "avx512vl",
        pub(crate) avx512vnni: "avx512vnni",
    }
}

impl Simd for Vnni {
    type Floats = __m512;

    #[inline(always)]
    fn floats(self, values: &[f32; WIDTH]) -> __m512 {
        cast(*values)
    }

    #[inline(always)]
    fn bf16(self, bits: &[u16; WIDTH]) -> __m512 {
        let bits: __m256i = cast(*bits);
        let wide = self.avx512f._mm512_cvtepu16_epi32(bits);
        cast(self.avx512f._mm512_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    fn f16(self, bits: &[u16; WIDTH]) -> __m512 {
        let bits: __m256i = cast(*bits);
        self.avx512f._mm512_cvtph_ps(bits)
    }

    #[inline(always)]
    fn codes(self, codes: &[i8; WIDTH]) -> __m512 {
        let codes: __m128i = cast(*codes);
        let wide = self.avx512f._mm512_cvtepi8_epi32(codes);
        self.avx512f._mm512_cvtepi32_ps(wide)
    }

    #[inline(always)]
    fn nibbles(self, bytes: &[u8; WIDTH]) -> [__m512; 2] {
        // The code of each half of a byte; of an index the lowest four bits count.
        let codes: __m512 = cast([
            -8.0_f32, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0,
            7.0,
        ]);
        let bytes: __m128i = cast(*bytes);
        let low = self.avx512f._mm512_cvtepu8_epi32(bytes);
        let high = self.avx512f._mm512_srli_epi32::<4>(low);
        [
            self.avx512f._mm512_permutexvar_ps(low, codes),
            self.avx512f._mm512_permutexvar_ps(high, codes),
        ]
    }

    #[inline(always)]
    fn multiply_add(self, x: f32, weights: __m512, sums: __m512) -> __m512 {
        self.fuse(self.avx512f._mm512_set1_ps(x), weights, sums)
    }

    #[inline(always)]
    fn fuse(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        self.avx512f._mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    fn store(self, values: __m512) -> [f32; WIDTH] {
        cast(values)
    }

    #[inline(always)]
    fn add_pairs<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[i8; 2 * WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        self.add(rows, panel, sums, |simd, codes| {
            simd.avx512bw._mm512_cvtepi8_epi16(cast(*codes))
        });
    }

    #[inline(always)]
    fn add_nibbles<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[u8; WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    ) {
        self.add(rows, panel, sums, |simd, bytes| {
            let bytes: __m128i = cast(*bytes);
            // The halves of a byte in the two halves of 32 bits, less the 8 that was added.
            let wide = simd.avx512f._mm512_cvtepu8_epi32(bytes);
            let high = simd.avx512f._mm512_slli_epi32::<12>(wide);
            let both = simd.avx512f._mm512_or_si512(wide, high);
            let half = simd.avx512f._mm512_set1_epi32(0x000f_000f);
            let both = simd.avx512f._mm512_and_si512(both, half);
            let eight = simd.avx512f._mm512_set1_epi32(0x0008_0008);
            simd.avx512bw._mm512_sub_epi16(both, eight)
        });
    }
}

/// The steps of the loops above.
trait Steps: Sized {
    fn add<const R: usize, L>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[L],
        sums: &mut [[i32; WIDTH]; R],
        widen: impl Fn(Self, &L) -> __m512i,
    );
    fn add_pair(self, pair: [i16; 2], weights: __m512i, sum: __m512i) -> __m512i;
}

impl Steps for Vnni {
    /// Two sums for each row, so that few of them do not wait.
    #[inline(always)]
    fn add<const R: usize, L>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[L],
        sums: &mut [[i32; WIDTH]; R],
        widen: impl Fn(Self, &L) -> __m512i,
    ) {
        let mut rows = rows;
        for row in &mut rows {
            *row = &row[..panel.len()];
        }
        let mut even: [__m512i; R] = [self.avx512f._mm512_setzero_si512(); R];
        let mut odd = even;
        for (even, sums) in even.iter_mut().zip(&*sums) {
            *even = cast(*sums);
        }
        let (twos, rest) = panel.as_chunks::<2>();
        for (k, lines) in twos.iter().enumerate() {
            let [first, second] = [widen(self, &lines[0]), widen(self, &lines[1])];
            for ((even, odd), row) in even.iter_mut().zip(&mut odd).zip(rows) {
                *even = self.add_pair(row[2 * k], first, *even);
                *odd = self.add_pair(row[2 * k + 1], second, *odd);
            }
        }
        if let [line] = rest {
            let weights = widen(self, line);
            for (even, row) in even.iter_mut().zip(rows) {
                *even = self.add_pair(row[2 * twos.len()], weights, *even);
            }
        }
        for ((sums, even), odd) in sums.iter_mut().zip(even).zip(odd) {
            *sums = cast(self.avx512f._mm512_add_epi32(even, odd));
        }
    }

    #[inline(always)]
    fn add_pair(self, pair: [i16; 2], weights: __m512i, sum: __m512i) -> __m512i {
        let pair = self.avx512f._mm512_set1_epi32(cast(pair));
        // At most 2 · 255 · 128: exact.
        let products = self.avx512bw._mm512_madd_epi16(pair, weights);
        self.avx512f._mm512_add_epi32(sum, products)
    }
}
