//! Left sides of products: rows of a matrix, or the windows of a convolution.

/// Rows of the left side of a product.
pub trait Left<T>: Sync {
    /// How many.
    fn count(&self) -> usize;
    /// Numbers of a row.
    fn terms(&self) -> usize;
    /// Whether [`take`](Self::take) puts its rows together, of numbers that lie apart.
    fn is_gathered(&self) -> bool {
        false
    }
    /// The rows from `first` on, each filled up with zeros to `stride` numbers.
    fn take<'a>(
        &'a self,
        first: usize,
        count: usize,
        stride: usize,
        scratch: &'a mut Vec<T>,
    ) -> &'a [T];
}

/// A row-major matrix.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    values: &'a [T],
    terms: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Rows of `terms` numbers each.
    ///
    /// # Panics
    ///
    /// Where the numbers are no whole rows.
    pub fn dense(values: &'a [T], terms: usize) -> Self {
        assert!(
            terms > 0 && values.len().is_multiple_of(terms),
            "{} numbers are no rows of {terms}",
            values.len()
        );
        Self { values, terms }
    }
}

impl<T: Copy + Default + Sync> Left<T> for Rows<'_, T> {
    fn count(&self) -> usize {
        self.values.len() / self.terms
    }

    fn terms(&self) -> usize {
        self.terms
    }

    fn take<'a>(
        &'a self,
        first: usize,
        count: usize,
        stride: usize,
        scratch: &'a mut Vec<T>,
    ) -> &'a [T] {
        let values = &self.values[first * self.terms..(first + count) * self.terms];
        // Of a single row only what fills up the last pair, or the last eight, is read.
        if stride == self.terms || count == 1 && self.terms.is_multiple_of(8) {
            return values;
        }
        scratch.clear();
        scratch.resize(count * stride, T::default());
        let lines = scratch.chunks_exact_mut(stride);
        for (line, row) in lines.zip(values.chunks_exact(self.terms)) {
            line[..self.terms].copy_from_slice(row);
        }
        scratch
    }
}

/// Where a convolution of two axes reads its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Taps of a window, `[height, width]`.
    pub kernel: [usize; 2],
    /// Step between windows.
    pub stride: [usize; 2],
    /// Zeros before the first row and column, and after the last ones: `[[top, left], [bottom, right]]`.
    pub padding: [[usize; 2]; 2],
    /// Step between the taps of a window.
    pub dilation: [usize; 2],
}

impl Geometry {
    /// Extents of the output of an input of these; `None` where the window does not fit, or a step
    /// is 0.
    pub fn output(&self, input: [usize; 2]) -> Option<[usize; 2]> {
        let mut output = [0; 2];
        for axis in 0..2 {
            let padded = input[axis] + self.padding[0][axis] + self.padding[1][axis];
            let reach = self.dilation[axis] * self.kernel[axis].checked_sub(1)? + 1;
            output[axis] = padded.checked_sub(reach)?.checked_div(self.stride[axis])? + 1;
        }
        Some(output)
    }
}

/// The windows of a convolution over images `[batch, height, width, channels]`: one row for each
/// pixel of the output, its numbers by row, column and channel of the window.
#[derive(Debug, Clone, Copy)]
pub struct Windows<'a, T> {
    pub(crate) images: &'a [T],
    /// `[height, width, channels]`
    pub(crate) shape: [usize; 3],
    pub(crate) geometry: Geometry,
    pub(crate) output: [usize; 2],
    /// First channel, and how many.
    group: [usize; 2],
    pub(crate) batch: usize,
}

impl<'a, T> Windows<'a, T> {
    /// Windows of images of shape `[batch, height, width, channels]`; `None` where the shape is not
    /// that of the images, or no window fits.
    pub fn new(images: &'a [T], shape: [usize; 4], geometry: Geometry) -> Option<Self> {
        let [batch, height, width, channels] = shape;
        let output = geometry.output([height, width])?;
        (images.len() == shape.iter().product::<usize>()).then_some(Self {
            images,
            shape: [height, width, channels],
            geometry,
            output,
            group: [0, channels],
            batch,
        })
    }

    /// Of these channels alone: the first, and how many.
    ///
    /// # Panics
    ///
    /// Unless the images have them.
    pub fn group(mut self, first: usize, count: usize) -> Self {
        let channels = self.shape[2];
        let end = first.checked_add(count);
        assert!(
            end.is_some_and(|end| end <= channels),
            "channels from {first} on, {count} of them, of {channels}"
        );
        self.group = [first, count];
        self
    }

    /// Extents of the output.
    pub fn output(&self) -> [usize; 2] {
        self.output
    }
}

impl<T: Copy + Default + Sync> Left<T> for Windows<'_, T> {
    fn count(&self) -> usize {
        self.batch * self.output[0] * self.output[1]
    }

    fn is_gathered(&self) -> bool {
        true
    }

    fn terms(&self) -> usize {
        self.geometry.kernel[0] * self.geometry.kernel[1] * self.group[1]
    }

    fn take<'a>(
        &'a self,
        first: usize,
        count: usize,
        stride: usize,
        scratch: &'a mut Vec<T>,
    ) -> &'a [T] {
        scratch.clear();
        scratch.reserve(count * stride);
        let [height, width, channels] = self.shape;
        let Geometry {
            kernel,
            stride: step,
            padding,
            dilation,
        } = self.geometry;
        let [start, length] = self.group;
        let whole = length == channels && dilation[1] == 1;
        for row in first..first + count {
            let end = scratch.len() + stride;
            let (image, pixel) = (
                row / (self.output[0] * self.output[1]),
                row % (self.output[0] * self.output[1]),
            );
            let (top, left) = (
                pixel / self.output[1] * step[0],
                pixel % self.output[1] * step[1],
            );
            let inside = left >= padding[0][1] && left + kernel[1] <= width + padding[0][1];
            for tap in 0..kernel[0] {
                let y = (top + tap * dilation[0]).wrapping_sub(padding[0][0]);
                if y >= height {
                    scratch.resize(scratch.len() + kernel[1] * length, T::default());
                    continue;
                }
                let line = (image * height + y) * width;
                if whole && inside {
                    let at = (line + left - padding[0][1]) * channels;
                    scratch.extend_from_slice(&self.images[at..at + kernel[1] * channels]);
                    continue;
                }
                for tap in 0..kernel[1] {
                    let x = (left + tap * dilation[1]).wrapping_sub(padding[0][1]);
                    if x >= width {
                        scratch.resize(scratch.len() + length, T::default());
                        continue;
                    }
                    let at = (line + x) * channels + start;
                    scratch.extend_from_slice(&self.images[at..at + length]);
                }
            }
            scratch.resize(end, T::default());
        }
        scratch
    }
}
