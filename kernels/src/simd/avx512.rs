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

    const EIGHTH: f32 = 1.0;

    #[inline(always)]
    fn eighths(self, words: &[u32; WIDTH], mut each: impl FnMut(usize, __m512)) {
        // Of an index the lowest four bits count.
        let codes: __m512 = cast([
            0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0,
            -1.0,
        ]);
        let words: __m512i = cast(*words);
        macro_rules! rows {
            ($($row:literal >> $right:literal)*) => {
                $(
                    let index = self.avx512f._mm512_srli_epi32::<$right>(words);
                    each($row, self.avx512f._mm512_permutexvar_ps(index, codes));
                )*
            };
        }
        rows!(0 >> 0 1 >> 16 2 >> 4 3 >> 20 4 >> 8 5 >> 24 6 >> 12 7 >> 28);
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

    /// Two sums for each row, so that few of them do not wait.
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
        let [mut even, mut odd] = self.begin(sums);
        let (twos, rest) = panel.as_chunks::<2>();
        for (k, lines) in twos.iter().enumerate() {
            let first = self.avx512bw._mm512_cvtepi8_epi16(cast(lines[0]));
            let second = self.avx512bw._mm512_cvtepi8_epi16(cast(lines[1]));
            for ((even, odd), row) in even.iter_mut().zip(&mut odd).zip(rows) {
                *even = self.add_pair(row[2 * k], first, *even);
                *odd = self.add_pair(row[2 * k + 1], second, *odd);
            }
        }
        if let [line] = rest {
            let weights = self.avx512bw._mm512_cvtepi8_epi16(cast(*line));
            for (even, row) in even.iter_mut().zip(rows) {
                *even = self.add_pair(row[2 * twos.len()], weights, *even);
            }
        }
        self.end(even, odd, sums);
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
        let [mut even, mut odd] = self.begin(sums);
        for (k, words) in panel.iter().enumerate() {
            let words: __m512i = cast(*words);
            macro_rules! pairs {
                ($($place:literal << $left:literal to $sums:ident)*) => {
                    $(
                        let high = self.avx512bw._mm512_slli_epi16::<$left>(words);
                        let weights = self.avx512bw._mm512_srai_epi16::<12>(high);
                        for (sum, fours) in $sums.iter_mut().zip(fours) {
                            *sum = self.add_pair(fours[k][$place], weights, *sum);
                        }
                    )*
                };
            }
            pairs!(0 << 12 to even 1 << 8 to odd 2 << 4 to even 3 << 0 to odd);
        }
        self.end(even, odd, sums);
    }

    #[inline(always)]
    fn pairs(self, words: &[u32; WIDTH]) -> [[i8; 2 * WIDTH]; 4] {
        let words: __m512i = cast(*words);
        let mut all = [[0; 2 * WIDTH]; 4];
        macro_rules! pairs {
            ($($place:literal << $left:literal)*) => {
                $(
                    let high = self.avx512bw._mm512_slli_epi16::<$left>(words);
                    let codes = self.avx512bw._mm512_srai_epi16::<12>(high);
                    all[$place] = cast(self.avx512bw._mm512_cvtepi16_epi8(codes));
                )*
            };
        }
        pairs!(0 << 12 1 << 8 2 << 4 3 << 0);
        all
    }
}

/// The steps of the loops above.
trait Steps: Sized {
    fn begin<const R: usize>(self, sums: &[[i32; WIDTH]; R]) -> [[__m512i; R]; 2];
    fn end<const R: usize>(
        self,
        even: [__m512i; R],
        odd: [__m512i; R],
        sums: &mut [[i32; WIDTH]; R],
    );
    fn add_pair(self, pair: [i16; 2], weights: __m512i, sum: __m512i) -> __m512i;
}

impl Steps for Vnni {
    #[inline(always)]
    fn begin<const R: usize>(self, sums: &[[i32; WIDTH]; R]) -> [[__m512i; R]; 2] {
        let zero = [self.avx512f._mm512_setzero_si512(); R];
        let mut even = zero;
        for (even, sums) in even.iter_mut().zip(sums) {
            *even = cast(*sums);
        }
        [even, zero]
    }

    #[inline(always)]
    fn end<const R: usize>(
        self,
        even: [__m512i; R],
        odd: [__m512i; R],
        sums: &mut [[i32; WIDTH]; R],
    ) {
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
