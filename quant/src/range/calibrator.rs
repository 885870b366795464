//! Choosing a range from a histogram.

use crate::range::histogram::Histogram;
use crate::{NumberFormat, Scheme};

/// The numbers of a grid on the side of zero where the magnitudes are larger.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    /// Numbers for each unit: 1 / scale.
    per_unit: f32,
    /// Of them up to the magnitude that it ends at, the last one in part where the zero point falls between two.
    steps: f32,
    /// The last of the integers.
    largest: f32,
}

impl Side {
    /// That of a range which ends at `magnitude`, and across zero there too, or at `opposite` if that is nearer.
    pub(crate) fn of(scheme: &Scheme, magnitude: f32, opposite: f32) -> Self {
        let codes = scheme.quant_max() - scheme.quant_min();
        if scheme.mapping.is_symmetric() {
            let largest = match scheme.format.is_int() {
                true => (codes / 2.0).floor(),
                false => scheme.quant_max(),
            };
            return Self::ending_at(largest, magnitude);
        }
        // As a share, since the whole may be more than the largest number.
        let share = opposite.min(magnitude) / magnitude;
        let across = codes * (share / (1.0 + share));
        let across = match opposite < magnitude {
            true => across.round_ties_even(),
            // One side of as many magnitudes has a code more where they are odd, and either may: the mean.
            false => across,
        };
        let steps = codes / (1.0 + share);
        Self {
            per_unit: steps / magnitude,
            steps,
            largest: codes - across,
        }
    }

    /// Whose number `largest` stands for `magnitude`.
    fn ending_at(largest: f32, magnitude: f32) -> Self {
        Self {
            per_unit: largest / magnitude,
            steps: largest,
            largest,
        }
    }

    /// How many numbers there are, with 0 and the part of the last one; 1 at least. Whole ones would jump where the
    /// other side ends, and with more of them the entropy is less by itself.
    pub(crate) fn levels(self) -> f64 {
        // NaN of an affine grid whose magnitude is 0.
        (f64::from(self.steps) + 1.0).max(1.0)
    }
}

/// The lower edge of the first bin up to which `percent` of the values lie.
///
/// At 100 percent the upper end of the histogram.
pub fn percentile(magnitudes: &Histogram, percent: f64) -> f32 {
    match percentile_bin(magnitudes, percent) {
        Some(bin) => magnitudes.edge(bin),
        None => magnitudes.max(),
    }
}

/// The first bin up to which `percent` of the values lie; `None` at 100 percent.
pub(crate) fn percentile_bin(magnitudes: &Histogram, percent: f64) -> Option<usize> {
    if percent >= 100.0 {
        return None;
    }
    let total: f64 = magnitudes.counts().iter().sum();
    let mut reached = 0.0;
    magnitudes.counts().iter().position(|count| {
        reached += count / total;
        reached >= percent / 100.0
    })
}

/// Up to so many bins each is tried as the largest magnitude; each takes a look at all bins.
const TRIED_EACH: usize = 1 << 14;
/// About how many are tried of more.
const TRIED: usize = 2048;

/// Bins from one that is tried to the next.
fn stride(bins: usize) -> usize {
    match bins > TRIED_EACH {
        true => bins / TRIED,
        false => 1,
    }
}

/// The centre of the bin that, as the largest magnitude, gives the least squared error of
/// quantization; tried from bin `start_bin` on, of more than 2¹⁴ bins about 2048.
///
/// `largest` is the code of the largest magnitude, 127 for INT8.
pub fn mse(magnitudes: &Histogram, format: NumberFormat, largest: f32, start_bin: usize) -> f32 {
    least_squares(magnitudes, format, start_bin, |magnitude| {
        Side::ending_at(largest, magnitude)
    })
}

/// As [`mse`], where the grid depends on the magnitude that it ends at.
pub(crate) fn least_squares(
    magnitudes: &Histogram,
    format: NumberFormat,
    start_bin: usize,
    side: impl Fn(f32) -> Side,
) -> f32 {
    let bins = magnitudes.counts().len();
    let centre = |index| (magnitudes.edge(index) + magnitudes.edge(index + 1)) / 2.0;
    let centres: Vec<f32> = (0..bins).map(centre).collect();
    let counted = centres
        .iter()
        .copied()
        .zip(magnitudes.counts().iter().copied());
    let filled: Vec<(f32, f64)> = counted.filter(|(_, count)| *count != 0.0).collect();
    let error = |highest: f32| -> f64 {
        let Side {
            per_unit, largest, ..
        } = side(highest);
        let round = |x: f32| match format.is_int() {
            true => x.round_ties_even().min(largest),
            false => format.round(x),
        };
        filled
            .iter()
            .map(|(centre, count)| {
                let error = f64::from(round(centre * per_unit) / per_unit - centre);
                error * error * count
            })
            .sum()
    };
    let candidates = centres
        .iter()
        .skip(start_bin)
        .step_by(stride(bins))
        .copied();
    let best = candidates.map(|highest| (highest, error(highest)));
    let best = best.reduce(|best, next| if next.1 < best.1 { next } else { best });
    best.map_or(magnitudes.max(), |(highest, _)| highest)
}

/// The edge at which clipping and quantizing to `levels` numbers gives the least relative entropy
/// (Kullback–Leibler divergence) to the values; tried from bin `start_bin` on, of more than 2¹⁴ bins about 2048,
/// the last of equals.
///
/// The first bin counts as much as the second, so that a crowd of zeros does not decide.
///
/// # Panics
///
/// Without levels.
pub fn entropy(magnitudes: &Histogram, levels: usize, start_bin: usize) -> f32 {
    assert!(levels > 0, "there is at least one level to quantize to");
    least_entropy(magnitudes, start_bin, |_| levels as f64)
}

/// As [`entropy`], where the number of levels, at least 1 and not always whole, depends on the edge.
pub(crate) fn least_entropy(
    magnitudes: &Histogram,
    start_bin: usize,
    levels: impl Fn(f32) -> f64,
) -> f32 {
    let mut counts = magnitudes.counts().to_vec();
    if let [first, second, ..] = counts.as_mut_slice() {
        *first = *second;
    }
    let mut best = None;
    let (start, stride) = (start_bin.max(1), stride(counts.len()));
    // The whole is among them.
    let start = start + counts.len().saturating_sub(start) % stride;
    for end in (start..=counts.len()).step_by(stride) {
        let (kept, clipped) = counts.split_at(end);
        let mut reference = kept.to_vec();
        reference[end - 1] += clipped.iter().sum::<f64>();
        let levels = levels(magnitudes.edge(end));
        let divergence = relative_entropy(&reference, &merged(kept, levels));
        // NaN, of a histogram without values, is never best.
        if best.is_none_or(|(_, least)| divergence <= least) {
            best = Some((end, divergence));
        }
    }
    best.map_or(magnitudes.max(), |(end, _)| magnitudes.edge(end))
}

/// The counts after quantization: each level's, evenly over those of its bins that had any. The last level is the
/// narrower the less of it there is.
fn merged(counts: &[f64], levels: f64) -> Vec<f64> {
    let width = counts.len() as f64 / levels;
    let levels = levels.ceil() as usize;
    let level = |bin: usize| {
        let mut level = (bin as f64 / width) as usize;
        while (level + 1) as f64 * width <= bin as f64 {
            level += 1;
        }
        while level as f64 * width > bin as f64 {
            level -= 1;
        }
        level.min(levels - 1)
    };
    let mut totals = vec![(0.0, 0usize); levels];
    let filled = || {
        counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count != 0.0)
    };
    for (bin, count) in filled() {
        let total = &mut totals[level(bin)];
        total.0 += count;
        total.1 += 1;
    }
    let mut quantized = vec![0.0; counts.len()];
    for (bin, _) in filled() {
        let (total, bins) = totals[level(bin)];
        quantized[bin] = total / bins as f64;
    }
    quantized
}

/// Σ p ln(p/q) of two histograms, each scaled to sum 1.
fn relative_entropy(p: &[f64], q: &[f64]) -> f64 {
    let (p_sum, q_sum): (f64, f64) = (p.iter().sum(), q.iter().sum());
    let pairs = p.iter().map(|p| p / p_sum).zip(q.iter().map(|q| q / q_sum));
    pairs
        .map(|(p, q)| match (p > 0.0, q > 0.0) {
            (true, true) => p * (p / q).ln(),
            (true, false) => f64::INFINITY,
            _ => 0.0,
        })
        .sum()
}

/// Step of the quantiles that [`search`] moves by.
const QUANTILE_STEP: f64 = 1e-5;

/// The range with the least expected squared error that narrowing from both ends leads to.
///
/// In each round the end moves in that has the emptier bins before it; it ends when the error
/// grows. PyTorch's `HistogramObserver._non_linear_param_search`.
pub fn search(histogram: &Histogram, scheme: &Scheme) -> (f32, f32) {
    let counts = histogram.counts();
    if histogram.is_empty() || histogram.min() == histogram.max() {
        return (histogram.min(), histogram.max());
    }
    let width = histogram.bin_width();
    let codes = f64::exp2(f64::from(scheme.format.bits()));
    let cumulative: Vec<f64> = counts
        .iter()
        .scan(0.0, |sum, count| {
            *sum += count;
            Some(*sum)
        })
        .collect();
    let total = cumulative.last().copied().unwrap_or(0.0);

    let (mut first, mut last) = (0, counts.len() - 1);
    let (mut lower, mut upper) = (0.0, 1.0);
    let mut least = f64::INFINITY;
    while lower < upper {
        let (next_lower, next_upper) = (lower + QUANTILE_STEP, upper - QUANTILE_STEP);
        let (mut from, mut to) = (first, last);
        while from < last && cumulative[from] < next_lower * total {
            from += 1;
        }
        while to > first && cumulative[to] > next_upper * total {
            to -= 1;
        }
        let next = match from - first > last - to {
            true => {
                lower = next_lower;
                (from, last)
            }
            false => {
                upper = next_upper;
                (first, to)
            }
        };
        if next == (first, last) {
            continue;
        }
        let error = expected_error(counts, f64::from(width), next, codes);
        if error > least {
            break;
        }
        least = error;
        (first, last) = next;
    }
    (
        histogram.min() + width * first as f32,
        // Rounding can take it beyond the largest number.
        (histogram.min() + width * (last + 1) as f32).min(f32::MAX),
    )
}

/// ∫ (x − quantized x)² over the density of the histogram, when the bins from `first` to `last`
/// are cut into `codes` intervals, each of which is quantized to its middle.
fn expected_error(counts: &[f64], width: f64, (first, last): (usize, usize), codes: f64) -> f64 {
    let interval = width * (last - first + 1) as f64 / codes;
    if interval == 0.0 {
        return 0.0;
    }
    // ∫ x² from `from` to `to`
    let squares = |from: f64, to: f64| (to.powi(3) - from.powi(3)) / 3.0;
    let code = |x: f64| (x / interval).floor().clamp(0.0, codes - 1.0);
    let half = interval / 2.0;
    counts
        .iter()
        .enumerate()
        .filter(|(_, count)| **count != 0.0)
        .map(|(bin, count)| {
            let begin = (bin as f64 - first as f64) * width;
            let end = begin + width;
            let (begin_code, end_code) = (code(begin), code(end));
            let within = squares(begin - (begin_code + 0.5) * interval, half)
                + (end_code - begin_code - 1.0) * squares(-half, half)
                + squares(-half, end - (end_code + 0.5) * interval);
            count / width * within
        })
        .sum()
}
