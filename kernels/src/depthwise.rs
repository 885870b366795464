//! Convolutions whose channels do not see each other.

use crate::error::expect;
use crate::layout::{WIDTH, in_panels, panels};
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
}

impl Depthwise<i8> {
    /// Sums of codes, exactly: `output` is `[batch, height, width, channels]`.
    ///
    /// # Panics
    ///
    /// Where windows, epilogue or output have other sizes.
    pub fn convolve(&self, windows: &Windows<'_, i16>, epilogue: &Epilogue, output: &mut [f32]) {
        let finish = |panel: usize, sums: &[i32; WIDTH]| epilogue.of_codes(0, panel, sums);
        let add = |sum: i32, x: i16, weight: i8| sum + i32::from(x) * i32::from(weight);
        dispatch_narrow(Convolve {
            kernel: self,
            windows,
            columns: epilogue.columns(),
            output,
            zero: 0_i32,
            add,
            finish,
        });
    }
}

impl Depthwise<f32> {
    /// Sums of floats: `output` is `[batch, height, width, channels]`.
    ///
    /// # Panics
    ///
    /// Where windows, epilogue or output have other sizes.
    pub fn convolve(&self, windows: &Windows<'_, f32>, epilogue: &Epilogue, output: &mut [f32]) {
        let finish = |panel: usize, sums: &[f32; WIDTH]| {
            let mut values = *sums;
            epilogue.of_floats(panel, &mut values);
            values
        };
        let add = |sum: f32, x: f32, weight: f32| sum + x * weight;
        dispatch_narrow(Convolve {
            kernel: self,
            windows,
            columns: epilogue.columns(),
            output,
            zero: 0.0_f32,
            add,
            finish,
        });
    }
}

struct Convolve<'a, T, X, C, A, F> {
    kernel: &'a Depthwise<T>,
    windows: &'a Windows<'a, X>,
    /// Of the epilogue.
    columns: usize,
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
    F: Fn(usize, &[C; WIDTH]) -> [f32; WIDTH],
{
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let [height, width, channels] = self.windows.shape;
        let geometry = self.windows.geometry;
        let [rows, columns] = self.windows.output;
        let [down, across] = geometry.kernel;
        assert_eq!(
            channels, self.kernel.channels,
            "the images have other channels"
        );
        assert_eq!(
            down * across,
            self.kernel.taps,
            "the windows have other taps"
        );
        assert_eq!(channels, self.columns, "the epilogue is of other channels");
        let size = self.windows.batch * rows * columns * channels;
        assert_eq!(self.output.len(), size, "the output has another size");
        let pixels = self.output.chunks_exact_mut(channels.max(1)).enumerate();
        for (pixel, output) in pixels {
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
                let values = (self.finish)(panel, &sums);
                output[first..first + count].copy_from_slice(&values[..count]);
            }
        }
    }
}
