//! How far the outputs of a pruned network are from those of the dense one.

use std::collections::BTreeMap;

use burn::tensor::activation::softmax;
use burn::tensor::{FloatDType, Tensor};
use burn_lean_graph::{TensorMapper, Tensors};
use serde::{Deserialize, Serialize};

use crate::PruneError;
use crate::host::read;

/// What an output stands for, and so how far two are from each other.
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
    pub(crate) each: Vec<f64>,
    pub(crate) disagree: usize,
}

impl Divergences {
    /// Adds the outputs of one batch, as [`logits`] has them.
    pub(crate) fn add(
        &mut self,
        kind: Outputs,
        batch: usize,
        dense: &Tensor<2>,
        pruned: &Tensor<2>,
    ) -> Result<(), PruneError> {
        let [_, width] = dense.dims();
        let (dense, pruned) = (read(dense.clone())?, read(pruned.clone())?);
        if dense.iter().any(|value| value.is_nan()) {
            return Err(PruneError::NaNOutputs { batch });
        }
        for (p, q) in dense.chunks_exact(width).zip(pruned.chunks_exact(width)) {
            self.each.push(match kind {
                // Infinite ones, too.
                _ if p == q => 0.0,
                Outputs::Logits if width > 1 => kullback_leibler(p, q),
                _ => half_squares(p, q),
            });
            self.disagree += usize::from(largest(p) != largest(q));
        }
        Ok(())
    }

    /// Mean and standard error of how much more another candidate diverges, place by place.
    pub(crate) fn behind(&self, other: &Self) -> (f64, f64) {
        let pairs = other.each.iter().zip(&self.each);
        let differences: Vec<f64> = pairs.map(|(other, own)| other - own).collect();
        let n = differences.len().max(1) as f64;
        let mean = differences.iter().sum::<f64>() / n;
        let squares: f64 = differences.iter().map(|each| (each - mean).powi(2)).sum();
        (mean, (squares / (n - 1.0).max(1.0) / n).sqrt())
    }

    pub(crate) fn mean(&self) -> f64 {
        self.each.iter().sum::<f64>() / self.each.len().max(1) as f64
    }

    /// Whether the mean is smaller than another one; every number is smaller than NaN.
    pub(crate) fn are_below(&self, other: &Self) -> bool {
        let (own, other) = (self.mean(), other.mean());
        own < other || (other.is_nan() && !own.is_nan())
    }
}

/// Divergences of a network that says the same of everything: the mean of the dense outputs, of logits that of
/// the softmax. Outputs of another width, of longer sequences say, have a mean of their own.
pub(crate) fn of_the_mean(kind: Outputs, dense: &[Tensor<2>]) -> Result<Divergences, PruneError> {
    let mut divergences = Divergences::default();
    let mut by_width: BTreeMap<usize, Vec<(usize, &Tensor<2>)>> = BTreeMap::new();
    for (batch, dense) in dense.iter().enumerate() {
        let [_, width] = dense.dims();
        by_width.entry(width).or_default().push((batch, dense));
    }
    for (width, batches) in by_width {
        let all = batches.iter().map(|(_, dense)| (*dense).clone());
        let all = Tensor::cat(all.collect(), 0).cast(FloatDType::F32);
        let mean = match kind {
            Outputs::Logits if width > 1 => softmax(all, 1).mean_dim(0).clamp_min(1e-30).log(),
            _ => all.mean_dim(0),
        };
        for (batch, dense) in batches {
            let mean = mean.clone().cast(FloatDType::from(dense.dtype()));
            let [places, _] = dense.dims();
            divergences.add(kind, batch, dense, &mean.expand([places, width]))?;
        }
    }
    Ok(divergences)
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

/// The first float tensor of an output, its last axis as columns, all others as rows; of one axis, which
/// counts examples, a row for each.
pub(crate) fn logits(output: &impl Tensors) -> Result<Tensor<2>, PruneError> {
    struct First(Option<Tensor<2>>);
    impl TensorMapper for First {
        fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
            self.0.get_or_insert_with(|| {
                let width = match D {
                    1 => 1,
                    _ => tensor.dims()[D - 1].max(1),
                };
                let rows = tensor.shape().num_elements() / width;
                tensor.clone().reshape([rows, width])
            });
            tensor.clone()
        }
    }
    let mut first = First(None);
    let _ = output.map_tensors(&mut first);
    first.0.ok_or_else(|| PruneError::NotLayerwise {
        what: "a forward pass without a float output to compare by".into(),
    })
}
