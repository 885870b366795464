//! How far the outputs of a pruned network are from those of the dense one.

use std::collections::BTreeMap;

use burn::tensor::activation::softmax;
use burn::tensor::{FloatDType, Tensor};
use burn_lean_graph::{TensorMapper, Tensors};
use burn_lean_reparam::reductions;
use serde::{Deserialize, Serialize};

use crate::PruneError;
use crate::host::read;

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

/// The float tensors that a network gives for a batch, as [`outputs`] has them.
pub(crate) type Given = Vec<Tensor<2>>;

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
    pub(crate) fn of(kind: Outputs, dense: &[Given]) -> Result<Vec<Self>, PruneError> {
        let Some(first) = dense.first().filter(|first| first.len() > 1) else {
            return Ok(vec![Self { kind, squares: 1.0 }]);
        };
        (0..first.len())
            .map(|at| {
                let (mut sum, mut places) = (0.0, 0);
                for given in dense.iter().filter_map(|given| given.get(at)) {
                    let values = read(given.clone())?;
                    let finite = values.iter().filter(|value| value.is_finite());
                    sum += finite.map(|value| f64::from(*value).powi(2)).sum::<f64>();
                    places += given.dims()[0];
                }
                let squares = sum / places.max(1) as f64;
                Ok(Self {
                    kind: if at == 0 { kind } else { Outputs::Values },
                    squares: if squares > 0.0 { squares } else { 1.0 },
                })
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
        dense: &[Tensor<2>],
        pruned: &[Tensor<2>],
    ) -> Result<(), PruneError> {
        self.each.resize(measures.len(), Vec::new());
        let pairs = dense.iter().zip(pruned).zip(measures);
        for (at, ((dense, pruned), measure)) in pairs.enumerate() {
            let [_, width] = dense.dims();
            let (dense, pruned) = (read(dense.clone())?, read(pruned.clone())?);
            if dense.iter().any(|value| value.is_nan()) {
                return Err(PruneError::NaNOutputs { batch });
            }
            for (p, q) in dense.chunks_exact(width).zip(pruned.chunks_exact(width)) {
                self.each[at].push(match measure.kind {
                    // Infinite ones, too.
                    _ if p == q => 0.0,
                    Outputs::Logits if width > 1 => kullback_leibler(p, q),
                    _ => half_squares(p, q) / measure.squares,
                });
                self.disagree += usize::from(at == 0 && largest(p) != largest(q));
            }
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
        let mut one = Divergences::default();
        let mut by_width: BTreeMap<usize, Vec<(usize, &Tensor<2>)>> = BTreeMap::new();
        for (batch, dense) in dense.iter().enumerate() {
            if let Some(dense) = dense.get(at) {
                by_width
                    .entry(dense.dims()[1])
                    .or_default()
                    .push((batch, dense));
            }
        }
        for (width, batches) in by_width {
            let all = batches.iter().map(|(_, dense)| (*dense).clone());
            let all = Tensor::cat(all.collect(), 0).cast(FloatDType::F32);
            let mean = match measure.kind {
                Outputs::Logits if width > 1 => reductions::mean_dim(softmax(all, 1), 0)
                    .clamp_min(1e-30)
                    .log(),
                _ => reductions::mean_dim(all, 0),
            };
            for (batch, dense) in batches {
                let mean = mean.clone().cast(FloatDType::from(dense.dtype()));
                let [places, _] = dense.dims();
                let (dense, mean) = ([dense.clone()], [mean.expand([places, width])]);
                one.add(&[*measure], batch, &dense, &mean)?;
            }
        }
        divergences.each.extend(one.each);
    }
    Ok(divergences)
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
    let log_softmax = |values: &[f32]| -> Vec<f64> {
        let most = values
            .iter()
            .fold(f32::NEG_INFINITY, |most, v| most.max(*v));
        let shifted: Vec<f64> = values.iter().map(|v| f64::from(*v - most)).collect();
        let total = shifted.iter().map(|v| v.exp()).sum::<f64>().ln();
        shifted.iter().map(|v| v - total).collect()
    };
    let pairs = log_softmax(p).into_iter().zip(log_softmax(q));
    // What `p` rules out counts for nothing, whatever `q` says of it.
    let pairs = pairs.filter(|(p, _)| p.exp() != 0.0);
    pairs.map(|(p, q)| p.exp() * (p - q)).sum()
}

fn largest(values: &[f32]) -> Option<usize> {
    (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]).then(b.cmp(a)))
}

/// The float tensors of an output, the last axis of each as columns, all others as rows; of one axis, which
/// counts examples, a row for each. A number alone, without an axis for examples beside it, is no output but a
/// loss of the model's own, where there are others.
pub(crate) fn outputs(output: &impl Tensors) -> Result<Given, PruneError> {
    struct All(Given);
    impl TensorMapper for All {
        fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
            let width = match D {
                1 => 1,
                _ => tensor.dims()[D - 1].max(1),
            };
            let rows = tensor.shape().num_elements() / width;
            if D > 1 || rows > 1 || self.0.is_empty() {
                self.0.push(tensor.clone().reshape([rows, width]));
            }
            tensor.clone()
        }
    }
    let mut all = All(Vec::new());
    let _ = output.map_tensors(&mut all);
    match all.0.is_empty() {
        false => Ok(all.0),
        true => Err(PruneError::NotLayerwise {
            what: "a forward pass without a float output to compare by".into(),
        }),
    }
}
