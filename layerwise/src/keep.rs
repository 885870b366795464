//! How many weights of a layer are kept, and in which shape.

use std::cmp::Ordering;

use rayon::prelude::*;

use crate::Support;
use crate::error::{LayerwiseError, same};

/// Scores of a part up to which each is compared with all.
const SMALL: usize = 16;

/// How many weights of a layer `[o, d]` are kept, and in which shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// So many weights, wherever they are.
    Weights(usize),
    /// So many weights of every row.
    PerRow(usize),
    /// `n` weights of every `m` consecutive ones of a row.
    NOfM {
        /// Kept of each group.
        n: usize,
        /// Consecutive weights of a group; divides d.
        m: usize,
    },
}

impl Keep {
    /// Refuses what does not fit a layer of that size.
    pub(crate) fn check(&self, outputs: usize, features: usize) -> Result<(), LayerwiseError> {
        if let Self::NOfM { m: group, .. } = *self
            && (group == 0 || !features.is_multiple_of(group))
        {
            return Err(LayerwiseError::DoesNotDivide { group, features });
        }
        let (keep, weights) = match *self {
            Self::Weights(count) => (count, outputs * features),
            Self::PerRow(count) => (count, features),
            Self::NOfM { n, m } => (n, m),
        };
        match keep <= weights {
            true => Ok(()),
            false => Err(LayerwiseError::KeepsTooMany { keep, weights }),
        }
    }

    /// The weights with the highest scores, `[o, d]`; of equal ones the first.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::Mismatch`] where this is no whole number of rows,
    /// [`LayerwiseError::DoesNotDivide`] and [`LayerwiseError::KeepsTooMany`].
    pub fn highest(&self, scores: &[f64], features: usize) -> Result<Support, LayerwiseError> {
        let outputs = scores.len() / features.max(1);
        same("scores in whole rows", outputs * features, scores.len())?;
        self.check(outputs, features)?;
        Ok(self.select(scores, features))
    }

    /// [`highest`](Self::highest) where it fits.
    pub(crate) fn select(&self, scores: &[f64], features: usize) -> Support {
        let mut kept = vec![false; scores.len()];
        // Parts, each of which keeps so many.
        let (part, count) = match *self {
            Self::Weights(count) => (scores.len(), count),
            Self::PerRow(count) => (features, count),
            Self::NOfM { n, m } => (m, n),
        };
        if part > 0 {
            kept.par_chunks_mut(part)
                .zip(scores.par_chunks(part))
                .with_min_len((1 << 12) / part.min(1 << 12))
                .for_each_init(Vec::new, |room, (kept, scores)| match part {
                    ..=SMALL => highest_of_few(scores, count, kept),
                    _ => highest_of(scores, count, room, kept),
                });
        }
        Support::of(features, kept)
    }
}

/// Marks the `count` highest scores; of equal ones the first. `room` is to sort in.
fn highest_of(scores: &[f64], count: usize, room: &mut Vec<f64>, kept: &mut [bool]) {
    if count == 0 || count >= scores.len() {
        return kept.fill(count > 0);
    }
    room.clear();
    room.extend_from_slice(scores);
    let (higher, lowest, _) = room.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    let above = higher.iter().filter(|one| one.total_cmp(lowest).is_gt());
    let mut equal = count - above.count();
    for (score, kept) in scores.iter().zip(kept) {
        *kept = match score.total_cmp(lowest) {
            Ordering::Greater => true,
            Ordering::Equal if equal > 0 => {
                equal -= 1;
                true
            }
            _ => false,
        };
    }
}

/// The same of scores so few that each is compared with all.
fn highest_of_few(scores: &[f64], count: usize, kept: &mut [bool]) {
    for (at, (score, kept)) in scores.iter().zip(kept).enumerate() {
        let before = scores[..at]
            .iter()
            .filter(|other| other.total_cmp(score).is_ge());
        let after = scores[at + 1..]
            .iter()
            .filter(|other| other.total_cmp(score).is_gt());
        *kept = before.count() + after.count() < count;
    }
}
