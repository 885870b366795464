//! How far the outputs of a pruned network are from those of the dense one.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::PruneError;
use crate::host::read;
use crate::layerwise::given::{Given, Numbers};

/// What an output stands for, and so how far two are from each other.
///
/// Of several float outputs it says that of the first one; the others count as
/// [`Values`](Self::Values), and all distances are then relative: divided by the mean square of what the
/// dense network gives there. What counts is the sum. A tensor of shape `[1]` beside others is taken for a loss
/// of the model's own, and left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outputs {
    /// Logits of classes along the last axis: the Kullback–Leibler divergence of their softmax, to which a
    /// number that is added to all of them is nothing. Where that axis has one place, or is the only one, as
    /// [`Values`](Self::Values).
    #[default]
    Logits,
    /// Numbers that count each by itself, those of a regression, an autoencoder, logits of several labels, or
    /// logits of classes along another axis: half the squared distance, the sum along the last axis.
    Values,
}

/// Divergences of one candidate, place by place.
#[derive(Debug, Clone, Default)]
pub(crate) struct Divergences {
    /// Of each output.
    each: Vec<Vec<f64>>,
    /// Places where the largest of the first output is another one.
    disagree: usize,
}

/// How one of several outputs counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measure {
    kind: Outputs,
    /// What its squared distances are divided by.
    squares: f64,
}

impl Measure {
    /// Of the outputs of all batches: distances of several are relative to their own mean squares.
    pub(crate) fn of(kind: Outputs, dense: &[Given]) -> Vec<Self> {
        let Some(first) = dense.first().filter(|first| first.len() > 1) else {
            return vec![Self { kind, squares: 1.0 }];
        };
        (0..first.len())
            .map(|at| {
                let (mut sum, mut places) = (0.0, 0);
                for given in dense.iter().filter_map(|given| given.get(at)) {
                    let finite = given.values().iter().filter(|value| value.is_finite());
                    sum += finite.map(|value| f64::from(*value).powi(2)).sum::<f64>();
                    places += given.places();
                }
                let squares = sum / places.max(1) as f64;
                Self {
                    kind: if at == 0 { kind } else { Outputs::Values },
                    squares: if squares > 0.0 { squares } else { 1.0 },
                }
            })
            .collect()
    }

    /// What a mean of squares over all numbers, not places, is divided by.
    pub(crate) fn squares_of_numbers(&self, width: usize) -> f64 {
        self.squares / width.max(1) as f64
    }
}

impl Divergences {
    /// Adds the outputs of one batch.
    pub(crate) fn add(
        &mut self,
        measures: &[Measure],
        batch: usize,
        dense: &[Numbers],
        pruned: Vec<Tensor<2>>,
    ) -> Result<(), PruneError> {
        self.each.resize(measures.len(), Vec::new());
        let pairs = dense.iter().zip(pruned).zip(measures);
        for (at, ((dense, pruned), measure)) in pairs.enumerate() {
            let pruned = read(pruned)?;
            let places = pruned.chunks_exact(dense.width());
            self.add_output(at, measure, batch, dense, places)?;
        }
        Ok(())
    }

    /// Adds one output of a batch, of which a pruned network gives `pruned` place by place.
    fn add_output<'a>(
        &mut self,
        at: usize,
        measure: &Measure,
        batch: usize,
        dense: &Numbers,
        pruned: impl Iterator<Item = &'a [f32]>,
    ) -> Result<(), PruneError> {
        if dense.values().iter().any(|value| value.is_nan()) {
            return Err(PruneError::NaNOutputs { batch });
        }
        let width = dense.width();
        for (p, q) in dense.values().chunks_exact(width).zip(pruned) {
            self.each[at].push(match measure.kind {
                // Infinite ones, too.
                _ if p == q => 0.0,
                Outputs::Logits if width > 1 => kullback_leibler(p, q),
                _ => half_squares(p, q) / measure.squares,
            });
            self.disagree += usize::from(at == 0 && largest(p) != largest(q));
        }
        Ok(())
    }

    /// The fraction of places of the first output where another one is the largest.
    pub(crate) fn disagreement(&self) -> f64 {
        let places = self.each.first().map_or(0, Vec::len);
        self.disagree as f64 / places.max(1) as f64
    }

    /// Standard error of the mean.
    pub(crate) fn standard_error(&self) -> f64 {
        self.each.iter().map(|each| mean_and_error(each).1).sum()
    }

    /// Mean and standard error of how much more another candidate diverges, place by place. Of several
    /// outputs the errors add up, as those of the same examples may.
    pub(crate) fn behind(&self, other: &Self) -> (f64, f64) {
        let pairs = other.each.iter().zip(&self.each);
        let of_each = pairs.map(|(other, own)| {
            let pairs = other.iter().zip(own);
            let differences: Vec<f64> = pairs.map(|(other, own)| other - own).collect();
            mean_and_error(&differences)
        });
        of_each.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// The sum over all outputs.
    pub(crate) fn mean(&self) -> f64 {
        self.each.iter().map(|each| mean_and_error(each).0).sum()
    }

    /// Whether the mean is smaller than another one; every number is smaller than NaN.
    pub(crate) fn are_below(&self, other: &Self) -> bool {
        let (own, other) = (self.mean(), other.mean());
        own < other || (other.is_nan() && !own.is_nan())
    }
}

/// Divergences of a network that says the same of everything: the mean of the dense outputs, of logits that of
/// the softmax. Outputs of another width, of longer sequences say, have a mean of their own.
pub(crate) fn of_the_mean(
    measures: &[Measure],
    dense: &[Given],
) -> Result<Divergences, PruneError> {
    let mut divergences = Divergences::default();
    for (at, measure) in measures.iter().enumerate() {
        let mut by_width: BTreeMap<usize, Vec<(usize, &Numbers)>> = BTreeMap::new();
        for (batch, dense) in dense.iter().enumerate() {
            if let Some(dense) = dense.get(at) {
                let same = by_width.entry(dense.width()).or_default();
                same.push((batch, dense));
            }
        }
        divergences.each.push(Vec::new());
        for (width, batches) in by_width {
            let is_distribution = measure.kind == Outputs::Logits && width > 1;
            let all = batches.iter().map(|(_, dense)| *dense);
            let answer = mean(all, width, is_distribution);
            for (batch, dense) in batches {
                let same = std::iter::repeat(&answer[..]);
                divergences.add_output(at, measure, batch, dense, same)?;
            }
        }
    }
    Ok(divergences)
}

/// The mean over all places; of distributions the logarithm of that of the softmax.
fn mean<'a>(
    all: impl Iterator<Item = &'a Numbers>,
    width: usize,
    is_distribution: bool,
) -> Vec<f32> {
    let (mut sums, mut places) = (vec![0.0; width], 0_usize);
    for place in all.flat_map(|one| one.values().chunks_exact(width)) {
        let values: Vec<f64> = match is_distribution {
            true => log_softmax(place).into_iter().map(f64::exp).collect(),
            false => place.iter().map(|value| f64::from(*value)).collect(),
        };
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum += value;
        }
        places += 1;
    }
    let means = sums.into_iter().map(|sum| sum / places as f64);
    let means = means.map(|mean| match is_distribution {
        // No answer rules anything out.
        true if mean < 1e-30 => 1e-30_f64.ln(),
        true => mean.ln(),
        false => mean,
    });
    means.map(|mean| mean as f32).collect()
}

/// Mean and its standard error.
fn mean_and_error(each: &[f64]) -> (f64, f64) {
    let n = each.len().max(1) as f64;
    let mean = each.iter().sum::<f64>() / n;
    let squares: f64 = each.iter().map(|each| (each - mean).powi(2)).sum();
    (mean, (squares / (n - 1.0).max(1.0) / n).sqrt())
}

fn half_squares(p: &[f32], q: &[f32]) -> f64 {
    let pairs = p.iter().zip(q);
    let distance = |(p, q): (&f32, &f32)| match p == q {
        true => 0.0,
        false => 0.5 * (f64::from(*p) - f64::from(*q)).powi(2),
    };
    pairs.map(distance).sum()
}

/// KL of the softmax of `q` from that of `p`.
fn kullback_leibler(p: &[f32], q: &[f32]) -> f64 {
    let pairs = log_softmax(p).into_iter().zip(log_softmax(q));
    // What `p` rules out counts for nothing, whatever `q` says of it.
    let pairs = pairs.filter(|(p, _)| p.exp() != 0.0);
    pairs.map(|(p, q)| p.exp() * (p - q)).sum()
}

fn log_softmax(values: &[f32]) -> Vec<f64> {
    let most = values
        .iter()
        .fold(f32::NEG_INFINITY, |most, v| most.max(*v));
    let shifted: Vec<f64> = values.iter().map(|v| f64::from(*v - most)).collect();
    let total = shifted.iter().map(|v| v.exp()).sum::<f64>().ln();
    shifted.iter().map(|v| v - total).collect()
}

fn largest(values: &[f32]) -> Option<usize> {
    (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]).then(b.cmp(a)))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::layerwise::given::given;

    /// Batches of two widths, each with an answer of its own, and a class that is ruled out everywhere.
    #[test]
    fn one_answer_is_the_mean_over_all_batches() {
        let device = Device::flex();
        let (high, never) = (3.0f32.ln(), f32::NEG_INFINITY);
        let narrow = [[[high, 0.0]], [[0.0, high]]].map(|x| Tensor::<2>::from_data(x, &device));
        let wide = Tensor::<2>::from_data([[high, 0.0, never], [0.0, high, never]], &device);
        let dense: Vec<Given> = narrow
            .into_iter()
            .chain([wide])
            .map(|x| given(&x).unwrap())
            .collect();
        let of = |kind| of_the_mean(&Measure::of(kind, &dense), &dense[..2]).unwrap();
        // (3/4, 1/4) from (1/2, 1/2).
        let nats = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((of(Outputs::Logits).mean() - nats).abs() < 1e-6);
        let measures = Measure::of(Outputs::Logits, &dense);
        let all = of_the_mean(&measures, &dense).unwrap();
        assert_eq!(all.each[0].len(), 4);
        assert!((all.mean() - nats).abs() < 1e-6, "{}", all.mean());
        // Each number is ln 3 / 2 from the mean.
        let half_squares = 0.25 * f64::from(high).powi(2);
        assert!((of(Outputs::Values).mean() - half_squares).abs() < 1e-6);
    }
}
