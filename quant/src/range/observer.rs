//! Collecting the range of the values that pass by.
//!
//! The semantics are those of PyTorch's observers (`torch.ao.quantization.observer`). Minima,
//! maxima and moving averages stay on the device; histograms are read to the host, so they belong
//! to a calibration and not to a training loop.

use std::fmt;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::range::histogram::{Histogram, RangeMethod};
use crate::range::state::Buffer;
use crate::{QuantError, Scheme, fake::Range};

/// What the range of a quantizer is made of.
///
/// In training, a batch with an infinity or NaN leaves the range as it is; if it is the first, the
/// next one sets the range. (A device whose minima and maxima leave NaN out takes the other
/// values.) In a calibration it is an error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ObserverConfig {
    /// The values at hand, nothing else: for weights, and for dynamic quantization of activations.
    Memoryless,
    /// Lowest and highest value ever seen.
    MinMax,
    /// Moving averages of the lowest and the highest value of each batch: the first batch sets
    /// them, then m ← m + c · (x − m). A batch is what comes by in one forward pass, be it in several
    /// calls of one layer; but calls of [`ForwardQ`](crate::ForwardQ) of layers without a recurrence are
    /// batches of their own.
    ///
    /// They come between the ranges of batches that alternate: a critic that sees a batch of data and
    /// then one of a generator's, in turns, gets a range between the two, and clips the wider. There
    /// choose [`MinMax`](Self::MinMax), and freeze it once the generator is under way
    /// ([`Schedule::freeze_observers_at`](crate::Schedule::freeze_observers_at)); or run both as one
    /// batch.
    MovingAverage {
        /// c, above 0 and at most 1.
        averaging_constant: f64,
    },
    /// A histogram of the values seen in a calibration. Per tensor only.
    ///
    /// Outside of a calibration the range stays as it is; a quantizer that has none takes the
    /// lowest and the highest value of the first batch.
    Histogram {
        /// Number of bins, at least 2 and at most 2²⁰; 2048 is usual.
        bins: usize,
        /// How the range is chosen from it.
        range: RangeMethod,
    },
}

impl ObserverConfig {
    /// Moving averages with PyTorch's constant, 0.01.
    pub const fn moving_average() -> Self {
        Self::MovingAverage {
            averaging_constant: 0.01,
        }
    }

    /// A histogram of 2048 bins.
    pub const fn histogram(range: RangeMethod) -> Self {
        Self::Histogram { bins: 2048, range }
    }

    /// # Errors
    ///
    /// [`QuantError::InvalidConfig`] if a number is out of its range.
    pub fn validate(&self) -> Result<(), QuantError> {
        match self {
            Self::Memoryless | Self::MinMax => Ok(()),
            Self::MovingAverage { averaging_constant } => {
                if *averaging_constant > 0.0 && *averaging_constant <= 1.0 {
                    return Ok(());
                }
                Err(QuantError::InvalidConfig {
                    field: "averaging_constant",
                    value: averaging_constant.to_string(),
                    expected: "above 0 and at most 1",
                })
            }
            Self::Histogram { bins, range } => {
                if !(2..=1 << 20).contains(bins) {
                    return Err(QuantError::InvalidConfig {
                        field: "bins",
                        value: bins.to_string(),
                        expected: "2 to 1048576",
                    });
                }
                range.validate()
            }
        }
    }

    /// Whether something is remembered from one batch to the next.
    pub fn has_memory(&self) -> bool {
        *self != Self::Memoryless
    }
}

impl fmt::Display for ObserverConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memoryless => f.write_str("of the values at hand"),
            Self::MinMax => f.write_str("lowest to highest value"),
            Self::MovingAverage { averaging_constant } => {
                write!(f, "moving averages, {averaging_constant}")
            }
            Self::Histogram { range, .. } => write!(f, "histogram, {range}"),
        }
    }
}

/// The range so far.
#[derive(Module, Debug)]
pub(crate) struct Observer {
    #[module(skip)]
    config: ObserverConfig,
    min: Buffer,
    max: Buffer,
    /// Lower and upper end, then the counts.
    histogram: Option<Buffer>,
    /// Whether the range is known to be finite, and no batch changes it.
    #[module(skip)]
    settled: bool,
}

impl Observer {
    pub(crate) fn new(config: ObserverConfig, groups: usize, device: &Device) -> Self {
        let histogram = match config {
            ObserverConfig::Histogram { bins, .. } => Some(Buffer::zeros(bins + 2, device)),
            _ => None,
        };
        Self {
            config,
            min: Buffer::zeros(groups, device),
            max: Buffer::zeros(groups, device),
            histogram,
            settled: false,
        }
    }

    pub(crate) fn range(&self) -> Range {
        Range {
            min: self.min.value(),
            max: self.max.value(),
        }
    }

    pub(crate) fn set_range(&mut self, range: Range) {
        self.min.set(range.min);
        self.max.set(range.max);
        self.settled = false;
    }

    /// The range is finite: that of a histogram stays as it is until another one is set.
    pub(crate) fn settle(&mut self) {
        self.settled = matches!(self.config, ObserverConfig::Histogram { .. });
    }

    /// A record was loaded, whose range nobody looked at.
    pub(crate) fn unsettle(&mut self) {
        self.settled = false;
    }

    /// Whether [`observe`](Self::observe) would leave the range as it is, whatever the batch.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Takes a batch in; `observed` says whether there was one before.
    ///
    /// A batch whose range is not finite leaves the range as it is. The first one becomes it
    /// nevertheless, since only a look at the device could tell; the next one then replaces it.
    /// Nothing is read from the device.
    pub(crate) fn observe(&mut self, batch: Range, observed: bool) {
        if !observed {
            return self.set_range(batch);
        }
        let old = self.range();
        let (old_min, old_max) = (old.min.clone(), old.max.clone());
        let (min, max) = (batch.min.clone(), batch.max.clone());
        let next = match self.config {
            ObserverConfig::Memoryless => batch.clone(),
            ObserverConfig::MinMax => Range {
                min: old_min.min_pair(min),
                max: old_max.max_pair(max),
            },
            ObserverConfig::MovingAverage { averaging_constant } => Range {
                min: moved(old_min, min, averaging_constant),
                max: moved(old_max, max, averaging_constant),
            },
            ObserverConfig::Histogram { .. } => old.clone(),
        };
        let next = where_finite(&old, next, &batch);
        self.set_range(where_finite(&batch, next, &old));
    }

    /// Takes a batch in as the bounds of a histogram.
    pub(crate) fn widen(&mut self, batch: Range, observed: bool) {
        let range = match observed {
            true => Range {
                min: self.min.value().min_pair(batch.min),
                max: self.max.value().max_pair(batch.max),
            },
            false => batch,
        };
        self.set_range(range);
    }

    /// Takes the values of a batch into the histogram, if there is one; reads that to the host.
    pub(crate) fn calibrate(&mut self, values: &[f32], first: bool) -> Result<(), QuantError> {
        let (ObserverConfig::Histogram { bins, range }, Some(buffer)) =
            (self.config, &mut self.histogram)
        else {
            return Ok(());
        };
        let mut histogram = match first {
            true => Histogram::new(bins),
            false => Histogram::from_values(&read(buffer.value())?),
        };
        match range {
            RangeMethod::Search => histogram.observe(values),
            _ => histogram.observe_magnitudes(values),
        }
        let values = histogram.to_values();
        let len = values.len();
        let device = buffer.value().device();
        let values = TensorData::new(values, [len]);
        buffer.set(Tensor::from_data(values, (&device, DType::F32)));
        Ok(())
    }

    /// The range that the histogram gives, if there is one; reads it to the host.
    pub(crate) fn choose_range(&mut self, scheme: &Scheme) -> Result<(), QuantError> {
        let (ObserverConfig::Histogram { range, .. }, Some(buffer)) =
            (self.config, &self.histogram)
        else {
            return Ok(());
        };
        let histogram = Histogram::from_values(&read(buffer.value())?);
        let (lowest, highest) = (read(self.min.value())?, read(self.max.value())?);
        let (min, max) = histogram.range(range, scheme, lowest[0], highest[0]);
        let device = self.min.value().device();
        self.set_range(Range {
            min: Tensor::from_data([min], (&device, DType::F32)),
            max: Tensor::from_data([max], (&device, DType::F32)),
        });
        Ok(())
    }

    /// The range of several observers that saw different data.
    pub(crate) fn merge(&mut self, others: &[&Self]) -> Result<(), QuantError> {
        let device = self.min.value().device();
        let mut all: Vec<Range> = others
            .iter()
            .map(|other| Range {
                min: other.min.value().to_device(&device),
                max: other.max.value().to_device(&device),
            })
            .collect();
        let Some(mut merged) = all.pop() else {
            return Ok(());
        };
        let count = others.len() as f32;
        let average = matches!(self.config, ObserverConfig::MovingAverage { .. });
        for range in all {
            merged = match average {
                true => Range {
                    min: merged.min + range.min,
                    max: merged.max + range.max,
                },
                false => Range {
                    min: merged.min.min_pair(range.min),
                    max: merged.max.max_pair(range.max),
                },
            };
        }
        if average {
            merged.min = merged.min / count;
            merged.max = merged.max / count;
        }
        self.set_range(merged);
        Ok(())
    }
}

impl Range {
    /// What both hold; of a group in which one is not finite the other.
    pub(crate) fn joined(self, other: Self) -> Self {
        let both = Self {
            min: self.min.clone().min_pair(other.min.clone()),
            max: self.max.clone().max_pair(other.max.clone()),
        };
        let both = where_finite(&other, both, &self);
        where_finite(&self, both, &other)
    }
}

/// `range` for the groups in which `judged` is finite, and `other` for the rest.
fn where_finite(judged: &Range, range: Range, other: &Range) -> Range {
    // By one comparison, which neither NaN nor an infinity passes on any device.
    let width = judged.max.clone() - judged.min.clone();
    let finite = width.abs().lower_equal_elem(f32::MAX);
    Range {
        min: other.min.clone().mask_where(finite.clone(), range.min),
        max: other.max.clone().mask_where(finite, range.max),
    }
}

/// m + c · (x − m)
fn moved(old: Tensor<1>, new: Tensor<1>, averaging_constant: f64) -> Tensor<1> {
    old.clone() + (new - old).mul_scalar(averaging_constant as f32)
}

/// The values of a tensor on the host.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, QuantError> {
    let data = tensor.try_into_data().map_err(QuantError::device)?;
    Ok(data.iter::<f32>().collect())
}
