//! What a classifier answered, and how far its confidences can be trusted.

use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::RecipeError;

/// The answers of a classifier to labelled examples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answers {
    labels: Vec<i64>,
    predicted: Vec<i64>,
    /// Probability of what was predicted.
    confidence: Vec<f64>,
}

/// One bin of a reliability diagram.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReliabilityBin {
    /// Examples whose confidence is in the bin.
    pub examples: usize,
    /// Their mean confidence; 0 without examples.
    pub confidence: f64,
    /// The share of them that is right; 0 without examples.
    pub accuracy: f64,
}

impl Answers {
    /// Of logits `[examples, classes]` and labels `[examples]`, batch by batch. Confidences are the softmax
    /// of the logits, in F64 whatever those are in.
    ///
    /// # Errors
    ///
    /// Those of the batches; [`RecipeError::Task`] where logits and labels differ in number, a label
    /// is none of the classes, a logit is NaN or +∞, all are −∞, or the device fails.
    pub fn collect(
        batches: impl IntoIterator<Item = Result<(Tensor<2>, Tensor<1, Int>), RecipeError>>,
    ) -> Result<Self, RecipeError> {
        let mut answers = Self::default();
        for batch in batches {
            let (logits, labels) = batch?;
            let [examples, classes] = logits.dims();
            let logits = logits.try_into_data().map_err(RecipeError::task)?;
            let labels = labels.try_into_data().map_err(RecipeError::task)?;
            let logits: Vec<f64> = logits.iter::<f64>().collect();
            let labels: Vec<i64> = labels.iter::<i64>().collect();
            if labels.len() != examples || classes == 0 {
                let reason = format!("{examples} rows of logits, but {} labels", labels.len());
                return Err(RecipeError::task(reason));
            }
            let first = answers.labels.len();
            let is_class = |label: &i64| (0..classes as i64).contains(label);
            if let Some(at) = labels.iter().position(|label| !is_class(label)) {
                let reason = format!(
                    "the label of example {} is {}, but the logits are of {classes} classes, from 0 on",
                    first + at,
                    labels[at],
                );
                return Err(RecipeError::task(reason));
            }
            answers.labels.extend(&labels);
            for row in logits.chunks_exact(classes) {
                answers.push(row)?;
            }
        }
        Ok(answers)
    }

    fn push(&mut self, logits: &[f64]) -> Result<(), RecipeError> {
        // The first of equals, as `argmax` has it; probabilities are equal where logits are not yet.
        let best = logits.iter().enumerate();
        let (class, largest) =
            best.fold((0, f64::NEG_INFINITY), |best, (class, logit)| {
                match *logit > best.1 {
                    true => (class, *logit),
                    false => best,
                }
            });
        let sum: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        if sum.is_nan() {
            let reason = format!(
                "a logit of example {} is NaN or +∞, or all are −∞: look at its inputs, and at the weights",
                self.predicted.len(),
            );
            return Err(RecipeError::task(reason));
        }
        self.predicted.push(class as i64);
        self.confidence.push(1.0 / sum);
        Ok(())
    }

    /// Refuses answers to other examples, by their labels.
    pub(super) fn check_examples(&self, other: &Self) -> Result<(), RecipeError> {
        match self.labels == other.labels {
            true => Ok(()),
            false => Err(RecipeError::task(
                "the test gave other labels when it was asked again: it must give the same examples \
                 in the same order each time",
            )),
        }
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no example.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The class of each example.
    pub fn predicted(&self) -> &[i64] {
        &self.predicted
    }

    /// Whether each example is right.
    pub fn right(&self) -> impl Iterator<Item = bool> {
        let pairs = self.predicted.iter().zip(&self.labels);
        pairs.map(|(predicted, label)| predicted == label)
    }

    /// Number of examples that are right.
    pub fn correct(&self) -> usize {
        self.right().filter(|right| *right).count()
    }

    /// The reliability diagram in `bins` bins of equal width: bin i holds confidences in
    /// (i / bins, (i + 1) / bins].
    pub fn reliability(&self, bins: usize) -> Vec<ReliabilityBin> {
        let bins = bins.max(1);
        let mut sums = vec![(0usize, 0.0, 0usize); bins];
        for (confidence, right) in self.confidence.iter().zip(self.right()) {
            let bin = ((confidence * bins as f64).ceil() as usize).clamp(1, bins) - 1;
            sums[bin].0 += 1;
            sums[bin].1 += confidence;
            sums[bin].2 += usize::from(right);
        }
        let bins = sums.into_iter().map(|(examples, confidence, right)| {
            let of = examples.max(1) as f64;
            ReliabilityBin {
                examples,
                confidence: confidence / of,
                accuracy: right as f64 / of,
            }
        });
        bins.collect()
    }

    /// Expected calibration error: Σ over bins of their share of the examples times
    /// |accuracy − confidence|.
    ///
    /// [On Calibration of Modern Neural Networks, Guo et al.,
    /// 2017](https://arxiv.org/abs/1706.04599), with 15 bins there.
    pub fn calibration_error(&self, bins: usize) -> f64 {
        let n = self.len().max(1) as f64;
        let gaps = self.reliability(bins).into_iter();
        gaps.map(|bin| bin.examples as f64 / n * (bin.accuracy - bin.confidence).abs())
            .sum()
    }
}
