//! Ways to prune the same network, and the judge between them, who needs no labels.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::layerwise::divergences::Divergences;

/// A way to prune a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Candidate {
    /// As the pruner is configured.
    Configured,
    /// The support of magnitude, its values fitted.
    MagnitudeFitted,
    /// Magnitude, dense values.
    Magnitude,
    /// The best of the others, its values tuned together: the kept weights of all layers, also of those
    /// that were not fitted, biases and gains, by gradients of the distance from the dense network's
    /// outputs.
    Tuned,
}

impl Candidate {
    /// What stands beside a progress bar.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Configured => "layer by layer",
            Self::MagnitudeFitted => "magnitude, fitted",
            Self::Magnitude => "magnitude",
            Self::Tuned => "tuned together",
        }
    }
}

/// How a candidate did on held-out examples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct JudgedCandidate {
    /// The candidate that was judged.
    pub candidate: Candidate,
    /// Mean divergence of the outputs from those of the dense network, over all places but the last axis,
    /// along which [`Outputs`](crate::layerwise::Outputs) says what it is: of the softmax (Kullback–Leibler, nats), or half the squared
    /// distance.
    #[serde(with = "burn_lean_reparam::json::float")]
    pub divergence: f64,
    /// Standard error of it.
    #[serde(with = "burn_lean_reparam::json::float")]
    pub standard_error: f64,
    /// Fraction of places of the first output where the largest is another one than the dense network's.
    pub disagreement: f64,
    /// Wall clock.
    pub seconds: f64,
}

impl JudgedCandidate {
    pub(crate) fn new(candidate: Candidate, judged: &Divergences, time: Duration) -> Self {
        Self {
            candidate,
            divergence: judged.mean(),
            standard_error: judged.standard_error(),
            disagreement: judged.disagreement(),
            seconds: time.as_secs_f64(),
        }
    }
}

/// All candidates so far, in the order in which they were tried.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    pub(crate) judged: Vec<JudgedCandidate>,
    divergences: Vec<Divergences>,
    least: usize,
}

impl Tried {
    /// Adds one that was begun then; whether it diverges less than all before.
    pub(crate) fn add(
        &mut self,
        candidate: Candidate,
        divergences: &Divergences,
        begun: Instant,
    ) -> bool {
        let result = JudgedCandidate::new(candidate, divergences, begun.elapsed());
        tracing::info!(
            ?candidate,
            divergence = result.divergence,
            seconds = result.seconds,
            "candidate"
        );
        let is_least = self
            .divergences
            .get(self.least)
            .is_none_or(|least| divergences.are_below(least));
        if is_least {
            self.least = self.judged.len();
        }
        self.judged.push(result);
        self.divergences.push(divergences.clone());
        is_least
    }

    /// Those of the candidate that diverges least.
    pub(crate) fn least(&self) -> &Divergences {
        &self.divergences[self.least]
    }

    pub(crate) fn chosen(&self) -> Candidate {
        self.judged[self.least].candidate
    }

    /// Whether all others are behind by more than two standard errors.
    pub(crate) fn can_tell(&self) -> bool {
        let others = self.divergences.iter().enumerate();
        let mut others = others.filter(|(at, _)| *at != self.least);
        others.all(|(_, other)| {
            let (behind, error) = self.least().behind(other);
            behind > 2.0 * error
        })
    }
}
