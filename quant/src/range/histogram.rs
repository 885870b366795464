//! Histograms of values, and the ranges that they give.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::range::calibrator::{self, Side};
use crate::{QuantError, Scheme};

/// How a range is chosen from a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RangeMethod {
    /// Narrows the range of the values from both ends as long as the expected squared error of
    /// quantization falls: PyTorch's `HistogramObserver`.
    Search,
    /// The magnitude that this percentage of the values does not reach: NVIDIA's percentile
    /// calibration.
    ///
    /// It is an edge of a [`Histogram`]'s bin. Theirs keeps the width of the first batch's bins; here there are as
    /// many bins over the largest magnitude, so that an outlier of thousands of times the other values makes them
    /// wide. The upper edge is taken of a bin with more values than may be clipped.
    Percentile {
        /// Above 0 and at most 100; 99.99 is usual.
        percent: f64,
    },
    /// The magnitude whose quantization has the least squared error: NVIDIA's mse calibration.
    ///
    /// From 1/16 of the largest magnitude on, or from 128 bins on if that is less; theirs is of the first batch, here
    /// it is of all. Theirs is for symmetric grids. Of an affine one the side of zero with the smaller magnitudes has
    /// the codes that its own largest value needs, or the magnitude if that is less, and the other side has all
    /// others.
    Mse,
    /// The magnitude whose quantization has the least relative entropy to the values: NVIDIA's
    /// entropy calibration.
    ///
    /// From where [`Mse`](Self::Mse) begins, but two bins at least. The side of an affine grid has its codes, as there,
    /// but not rounded to whole ones.
    Entropy,
}

impl RangeMethod {
    /// 99.99 percent.
    pub const fn percentile() -> Self {
        Self::Percentile { percent: 99.99 }
    }

    /// # Errors
    ///
    /// [`QuantError::InvalidConfig`] if the percentage is not one.
    pub fn validate(&self) -> Result<(), QuantError> {
        match self {
            Self::Percentile { percent } if !(*percent > 0.0 && *percent <= 100.0) => {
                Err(QuantError::InvalidConfig {
                    field: "percent",
                    value: percent.to_string(),
                    expected: "above 0 and at most 100",
                })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for RangeMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Search => f.write_str("narrowed by squared error"),
            Self::Percentile { percent } => write!(f, "{percent} % of the values"),
            Self::Mse => f.write_str("least squared error"),
            Self::Entropy => f.write_str("least relative entropy"),
        }
    }
}

/// Parts that a bin is cut into when the range grows, so that counts move to the new bins in
/// proportion.
const PARTS: usize = 16;

/// Counts of values in bins of equal width.
///
/// When values come that lie outside, the range grows to them and the counts so far are spread
/// over the new bins: each bin's count in 16 parts. Infinities are left out.
///
/// ```
/// use burn_lean_quant::range::Histogram;
///
/// let mut histogram = Histogram::new(4);
/// histogram.observe(&[0.0, 0.1, 0.9, 1.0]);
/// assert_eq!(histogram.counts(), [2.0, 0.0, 0.0, 2.0]);
/// histogram.observe(&[2.0]);
/// assert_eq!((histogram.min(), histogram.max()), (0.0, 2.0));
/// assert_eq!(histogram.counts(), [2.0, 2.0, 0.0, 1.0]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    min: f32,
    max: f32,
    counts: Vec<f64>,
}

impl Histogram {
    /// An empty histogram of that many bins.
    ///
    /// # Panics
    ///
    /// Without bins.
    pub fn new(bins: usize) -> Self {
        assert!(bins > 0, "a histogram has at least one bin");
        Self {
            min: f32::INFINITY,
            max: f32::NEG_INFINITY,
            counts: vec![0.0; bins],
        }
    }

    /// One with these counts, from `min` to `max`.
    ///
    /// # Panics
    ///
    /// Without counts.
    pub fn from_counts(min: f32, max: f32, counts: Vec<f64>) -> Self {
        assert!(!counts.is_empty(), "a histogram has at least one bin");
        Self { min, max, counts }
    }

    /// Lower end of the first bin; infinite as long as it is empty.
    pub fn min(&self) -> f32 {
        self.min
    }

    /// Upper end of the last bin.
    pub fn max(&self) -> f32 {
        self.max
    }

    /// The count of each bin.
    pub fn counts(&self) -> &[f64] {
        &self.counts
    }

    /// Whether no finite value was seen.
    pub fn is_empty(&self) -> bool {
        self.min > self.max
    }

    /// Lower end of bin `index`; from index `counts().len()` on, the upper end of the last one.
    pub fn edge(&self, index: usize) -> f32 {
        let bins = self.counts.len();
        let step = self.bin_width();
        // From the nearer end, so that both ends are exact.
        match index <= bins / 2 {
            true => self.min + step * index as f32,
            false => self.max - step * bins.saturating_sub(index) as f32,
        }
    }

    /// The width of a bin, also where the whole is wider than the largest number.
    pub(crate) fn bin_width(&self) -> f32 {
        let bins = self.counts.len() as f32;
        let whole = self.max - self.min;
        match whole.is_finite() {
            true => whole / bins,
            false => self.max / bins - self.min / bins,
        }
    }

    /// Takes values in.
    pub fn observe(&mut self, values: &[f32]) {
        let finite = || values.iter().copied().filter(|value| value.is_finite());
        let (low, high) = finite()
            .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            });
        if low <= high {
            self.grow(low, high);
            self.count(finite());
        }
    }

    /// Takes magnitudes in; the range starts at 0.
    pub(crate) fn observe_magnitudes(&mut self, values: &[f32]) {
        let finite = || {
            let magnitudes = values.iter().map(|value| value.abs());
            magnitudes.filter(|value| value.is_finite())
        };
        if let Some(high) = finite().reduce(f32::max) {
            self.grow(0.0, high);
            self.count(finite());
        }
    }

    /// Extends the range to hold `low` and `high`.
    fn grow(&mut self, low: f32, high: f32) {
        if self.is_empty() {
            (self.min, self.max) = (low, high);
            return;
        }
        let (min, max) = (self.min.min(low), self.max.max(high));
        if (min, max) == (self.min, self.max) {
            return;
        }
        let old = std::mem::replace(
            self,
            Self::from_counts(min, max, vec![0.0; self.counts.len()]),
        );
        let bins = old.counts.len();
        if old.min == old.max {
            let index = self.bin(old.min);
            self.counts[index] += old.counts.iter().sum::<f64>();
            return;
        }
        let part = (f64::from(old.max) - f64::from(old.min)) / (bins * PARTS) as f64;
        let width = (f64::from(max) - f64::from(min)) / bins as f64;
        for (index, count) in old
            .counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count != 0.0)
        {
            for sub in 0..PARTS {
                let middle = f64::from(old.min) + part * ((index * PARTS + sub) as f64 + 0.5);
                let bin = ((middle - f64::from(min)) / width) as usize;
                self.counts[bin.min(bins - 1)] += count / PARTS as f64;
            }
        }
    }

    fn count(&mut self, values: impl Iterator<Item = f32>) {
        for value in values {
            let bin = self.bin(value);
            self.counts[bin] += 1.0;
        }
    }

    /// The bin of a value in the range.
    fn bin(&self, value: f32) -> usize {
        let bins = self.counts.len();
        // A range of one value has its bins one to either side of it.
        let (min, max) = match self.min == self.max {
            true => (self.min - 1.0, self.max + 1.0),
            false => (self.min, self.max),
        };
        let position = f64::from(value) - f64::from(min);
        let bin = position * bins as f64 / (f64::from(max) - f64::from(min));
        (bin as usize).min(bins - 1)
    }

    /// The range that `method` chooses for a scheme; `lowest` and `highest` bound it.
    pub fn range(
        &self,
        method: RangeMethod,
        scheme: &Scheme,
        lowest: f32,
        highest: f32,
    ) -> (f32, f32) {
        // Where the side of zero with the smaller magnitudes ends.
        let opposite = highest.min(-lowest).max(0.0);
        let side = |magnitude: f32| Side::of(scheme, magnitude, opposite);
        let magnitude = match method {
            RangeMethod::Search => return calibrator::search(self, scheme),
            RangeMethod::Percentile { percent } => self.percentile(percent),
            RangeMethod::Mse => {
                calibrator::least_squares(self, scheme.format, self.start_bin(), side)
            }
            RangeMethod::Entropy => {
                let levels = |magnitude: f32| side(magnitude).levels();
                // One bin has the distribution of one level, whatever is clipped.
                calibrator::least_entropy(self, self.start_bin().max(2), levels)
            }
        };
        (lowest.max(-magnitude), highest.min(magnitude))
    }

    /// [`calibrator::percentile`], but of a bin that holds more values than may be clipped the upper edge: its
    /// lower one would clip all of them.
    fn percentile(&self, percent: f64) -> f32 {
        let Some(bin) = calibrator::percentile_bin(self, percent) else {
            return self.max;
        };
        let total: f64 = self.counts.iter().sum();
        let is_coarse = self.counts[bin] > (1.0 - percent / 100.0) * total;
        // Where most values are 0 the percentile is, too; that is no range.
        self.edge(bin + usize::from(is_coarse)).max(self.edge(1))
    }

    /// Smallest range that is tried, in bins: 128, as upstream, of the usual 2048 and of more, which are there for
    /// outliers; in proportion of fewer.
    fn start_bin(&self) -> usize {
        128.min(self.counts.len() / 16)
    }

    /// As numbers of a record: both ends, then the counts. Empty: zeros.
    pub(crate) fn to_values(&self) -> Vec<f32> {
        let ends = match self.is_empty() {
            true => [0.0, 0.0],
            false => [self.min, self.max],
        };
        let counts = self.counts.iter().map(|count| *count as f32);
        ends.into_iter().chain(counts).collect()
    }

    pub(crate) fn from_values(values: &[f32]) -> Self {
        let (ends, counts) = values.split_at(values.len().min(2));
        let counts: Vec<f64> = counts.iter().map(|count| f64::from(*count)).collect();
        match (ends, counts.iter().any(|count| *count > 0.0)) {
            ([min, max], true) => Self::from_counts(*min, *max, counts),
            _ => Self::new(counts.len().max(1)),
        }
    }
}
