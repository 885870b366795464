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
    /// Of two rows, the low halves and the high halves; codes have 8 added.
    fn nibbles(self, bytes: &[u8; WIDTH]) -> [Self::Floats; 2];
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
    /// As [`add_pairs`](Self::add_pairs), of codes in halves of bytes.
    fn add_nibbles<const R: usize>(
        self,
        rows: [&[[i16; 2]]; R],
        panel: &[[u8; WIDTH]],
        sums: &mut [[i32; WIDTH]; R],
    );
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
