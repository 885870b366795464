//! Convolutions whose channels do not see each other.

use crate::error::expect;
use crate::layout::{WIDTH, in_panels, panels};
use crate::shares::in_shares;
use crate::simd::{Simd, Task, dispatch_narrow};
use crate::{Epilogue, KernelError, Windows};

/// A convolution with one window for each channel: weights `[taps, channels]`, codes (`i8` by `i16`) or
/// floats.
#[derive(Debug, Clone, PartialEq)]
pub struct Depthwise<T> {
    taps: usize,
    channels: usize,
    /// `[panel, tap]`
    panels: Vec<[T; WIDTH]>,
}

impl<T: Copy + Default> Depthwise<T> {
    /// Packs weights `[taps, channels]`, taps by row and column.
    ///
    /// # Errors
    ///
    /// [`KernelError::Length`].
    pub fn new(values: &[T], taps: usize, channels: usize) -> Result<Self, KernelError> {
        expect("weights", taps * channels, values.len())?;
        Ok(Self {
            taps,
            channels,
            panels: in_panels(values, taps, channels, |value| value),
        })
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        self.panels.len() * WIDTH * size_of::<T>()
    }

    /// All pixels, of which each is a row for the epilogue; whether the sums are of codes.
    #[allow(clippy::too_many_arguments)]
    fn pixels<X, C, A, F>(
        &self,
        windows: &Windows<'_, X>,
        epilogue: &Epilogue,
        are_codes: bool,
        output: &mut [f32],
        zero: C,
        add: A,
        finish: F,
    ) where
        T: Sync,
        X: Copy + Sync,
        C: Copy + Sync,
        A: Fn(C, X, T) -> C + Copy + Sync,
        F: Fn(usize, usize, &[C; WIDTH]) -> [f32; WIDTH] + Copy + Sync,
    {
        let channels = windows.shape[2];
        let [down, across] = windows.geometry.kernel;
        assert_eq!(channels, self.channels, "the images have other channels");
        assert_eq!(down * across, self.taps, "the windows have other taps");
        let pixels = windows.batch * windows.output[0] * windows.output[1];
        epilogue.check([pixels, channels], are_codes);
        assert_eq!(
            output.len(),
            pixels * channels,
            "the output has another size"
        );
        in_shares(output, channels, |first, output| {
            dispatch_narrow(Convolve {
                kernel: self,
                windows,
                first,
                output,
                zero,
                add,
                finish,
            });
        });
    }
}

impl Depthwise<i8> {
    /// Sums of codes, exactly: `output` is `[batch, height, width, channels]`, the rows of the epilogue are its pixels.
    ///
    /// # Panics
    ///
    /// Where windows, epilogue or output have other sizes.
    pub fn convolve(&self, windows: &Windows<'_, i16>, epilogue: &Epilogue, output: &mut [f32]) {
        let finish =
            |pixel: usize, panel: usize, sums: &[i32; WIDTH]| epilogue.of_codes(pixel, panel, sums);
        let add = |sum: i32, x: i16, weight: i8| sum + i32::from(x) * i32::from(weight);
        self.pixels(windows, epilogue, true, output, 0_i32, add, finish);
    }
}

impl Depthwise<f32> {
    /// Sums of floats: `output` is `[batch, height, width, channels]`, the rows of the epilogue are its pixels.
    ///
    /// # Panics
    ///
    /// Where windows, epilogue or output have other sizes, and for an epilogue with a bias of codes.
    pub fn convolve(&self, windows: &Windows<'_, f32>, epilogue: &Epilogue, output: &mut [f32]) {
        let finish =
            |pixel: usize, panel: usize, sums: &[f32; WIDTH]| epilogue.of_rows(pixel, panel, *sums);
        let add = |sum: f32, x: f32, weight: f32| sum + x * weight;
        self.pixels(windows, epilogue, false, output, 0.0_f32, add, finish);
    }
}

struct Convolve<'a, T, X, C, A, F> {
    kernel: &'a Depthwise<T>,
    windows: &'a Windows<'a, X>,
    /// The first pixel of the output.
    first: usize,
    output: &'a mut [f32],
    zero: C,
    add: A,
    finish: F,
}

impl<T, X, C, A, F> Task for Convolve<'_, T, X, C, A, F>
where
    T: Copy,
    X: Copy,
    C: Copy,
    A: Fn(C, X, T) -> C,
    F: Fn(usize, usize, &[C; WIDTH]) -> [f32; WIDTH],
{
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let [height, width, channels] = self.windows.shape;
        let geometry = self.windows.geometry;
        let [rows, columns] = self.windows.output;
        let [down, across] = geometry.kernel;
        let pixels = self.output.chunks_exact_mut(channels.max(1));
        for (pixel, output) in (self.first..).zip(pixels) {
            let image = pixel / (rows * columns);
            let (y, x) = (pixel / columns % rows, pixel % columns);
            for panel in 0..panels(channels) {
                let first = panel * WIDTH;
                let count = WIDTH.min(channels - first);
                let mut sums = [self.zero; WIDTH];
                for tap in 0..down * across {
                    let from = |at: usize, tap: usize, axis: usize| {
                        (at * geometry.stride[axis] + tap * geometry.dilation[axis])
                            .wrapping_sub(geometry.padding[0][axis])
                    };
                    let (y, x) = (from(y, tap / across, 0), from(x, tap % across, 1));
                    if y >= height || x >= width {
                        continue;
                    }
                    let at = ((image * height + y) * width + x) * channels + first;
                    let weights = &self.kernel.panels[panel * self.kernel.taps + tap];
                    let numbers = &self.windows.images[at..at + count];
                    for ((sum, x), weight) in sums.iter_mut().zip(numbers).zip(weights) {
                        *sum = (self.add)(*sum, *x, *weight);
                    }
                }
                let values = (self.finish)(pixel, panel, &sums);
                output[first..first + count].copy_from_slice(&values[..count]);
            }
        }
    }
}
