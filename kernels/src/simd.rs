//! The inner loops, for AVX-512 with VNNI, for AVX2 and for any CPU.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use crate::layout::WIDTH;

/// Instructions of a CPU.
pub(crate) trait Simd: Copy {
    /// [`WIDTH`] floats.
    type Floats: Copy;

    fn floats(self, values: &[f32; WIDTH]) -> Self::Floats;
    fn bf16(self, bits: &[u16; WIDTH]) -> Self::Floats;
    fn f16(self, bits: &[u16; WIDTH]) -> Self::Floats;
    fn codes(self, codes: &[i8; WIDTH]) -> Self::Floats;
    /// What [`eighths`](Self::eighths) are to be multiplied by: a power of two.
    const EIGHTH: f32;
    /// The codes of 4 bits of eight rows, one row after the other.
    fn eighths(self, words: &[u32; WIDTH], each: impl FnMut(usize, Self::Floats));
    fn multiply_add(self, x: f32, weights: Self::Floats, sums: Self::Floats) -> Self::Floats;
    /// `a · b + c`.
    fn fuse(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    fn store(self, values: Self::Floats) -> [f32; WIDTH];

    /// Adds products of pairs of codes, of each row and column.
    fn add_pairs<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[i8; 2 * WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    );
    /// As [`add_pairs`](Self::add_pairs), of codes in eighths of words.
    fn add_eighths<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[u32; WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    );
    /// The pairs of codes in eighths of words, as bytes.
    fn pairs(self, words: &[u32; WIDTH]) -> [[i8; 2 * WIDTH]; 4];
}

/// Work that is compiled for each kind of CPU.
pub(crate) trait Task {
    fn run<S: Simd>(self, simd: S);
}

/// Runs a task with the best instructions that the CPU has.
pub(crate) fn dispatch(task: impl Task) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = avx512::Vnni::try_new() {
        return simd.vectorize(With { task, simd });
    }
    dispatch_narrow(task);
}

/// As [`dispatch`], with registers of at most 256 bits: for loops that the compiler turns into vector
/// instructions, which wider ones made slower.
pub(crate) fn dispatch_narrow(task: impl Task) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = pulp::x86::V3::try_new() {
        return simd.vectorize(With { task, simd });
    }
    task.run(portable::Portable);
}

/// A closure would not do: what it calls is compiled without the instructions unless all of it is
/// inlined.
#[cfg(target_arch = "x86_64")]
struct With<T, S> {
    task: T,
    simd: S,
}

#[cfg(target_arch = "x86_64")]
impl<T: Task, S: Simd> pulp::NullaryFnOnce for With<T, S> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.task.run(self.simd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::eighths;

    /// Codes of eight rows come out as they went in, as floats and in products.
    struct Check<'a> {
        codes: &'a [i8],
        words: &'a [[u32; WIDTH]],
    }

    impl Task for Check<'_> {
        fn run<S: Simd>(self, simd: S) {
            let code = |row: usize, column: usize| self.codes[row * WIDTH + column];
            let mut rows = 0;
            simd.eighths(&self.words[0], |row, found| {
                for (column, found) in simd.store(found).into_iter().enumerate() {
                    assert_eq!(found * S::EIGHTH, f32::from(code(row, column)));
                }
                rows += row;
            });
            assert_eq!(rows, (0..8).sum());
            let left: Vec<i16> = (0..16).map(|row| 255 - 34 * row).collect();
            let mut sums = [[3; WIDTH]; 1];
            simd.add_eighths([left.as_chunks::<2>().0], self.words, &mut sums);
            for (column, sum) in sums[0].into_iter().enumerate() {
                let product = |row: usize| i32::from(left[row]) * i32::from(code(row, column));
                assert_eq!(sum, 3 + (0..16).map(product).sum::<i32>());
            }
            for (pair, found) in simd.pairs(&self.words[1]).into_iter().enumerate() {
                for (at, found) in found.into_iter().enumerate() {
                    assert_eq!(found, code(8 + 2 * pair + at % 2, at / 2));
                }
            }
        }
    }

    #[test]
    fn eighths_are_read_alike_by_all_cpus() {
        let codes: Vec<i8> = (0..16 * WIDTH).map(|at| (at * 7 % 16) as i8 - 8).collect();
        let panels = eighths(&codes, 16, WIDTH);
        let words = panels.of(0, 0..2, &[]);
        let check = || Check {
            codes: &codes,
            words,
        };
        check().run(portable::Portable);
        dispatch_narrow(check());
        dispatch(check());
    }
}
