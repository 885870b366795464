//! What becomes of the running statistics of BatchNorm layers when weights are pruned.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::{Batch, PruneError, mean_loss, recompute_batch_norm};

/// Examples that new statistics are computed over, at most.
const EXAMPLES: usize = 1000;

/// What a stage does with the running statistics of BatchNorm layers; nothing in a model without.
///
/// Pruned weights give other activations. In one stage, statistics from before make most of the
/// damage at high sparsity: ResNet20 on CIFAR-10 at 0.9 has some 10 % accuracy with them and 70 to
/// 76 % with new ones. In several stages with a first-order term the weights are fitted to the
/// statistics that they are used with, so that new ones can do harm. Held-out examples know.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunningStatistics {
    /// As they were, or computed anew over up to 1,000 of the examples that gave the gradients,
    /// whichever has the smaller loss on the held-out examples. So for each ridge of a sweep, too,
    /// which costs the forward passes over both. Where the ridge is fixed and the loader yields no
    /// more than the Fisher samples, those judge.
    Judged,
    /// Computed anew after every stage, whatever the loss says.
    Recomputed,
    /// As they were.
    Kept,
}

/// How running statistics were chosen after a stage.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct JudgedStatistics {
    /// Whether they are new.
    pub recomputed: bool,
    /// Loss with the statistics as they were.
    #[serde(with = "burn_lean_reparam::json::float")]
    pub kept_loss: f64,
    /// Loss with new ones.
    #[serde(with = "burn_lean_reparam::json::float")]
    pub recomputed_loss: f64,
}

/// The examples of one stage that running statistics are computed over, and how.
pub(crate) struct Statistics<'a, B> {
    how: RunningStatistics,
    seen: Vec<B>,
    missing: usize,
    judges: &'a [B],
}

impl<B: Batch> Statistics<'_, B> {
    /// For a model, over `most` examples at most; it looks at nothing where the model has no BatchNorm.
    pub(crate) fn new<M: Module>(how: RunningStatistics, model: &M, most: usize) -> Self {
        let has_any = crate::statistics::batch_norm::has_batch_norm(model);
        Self {
            how,
            seen: Vec::new(),
            missing: match how {
                RunningStatistics::Kept => 0,
                _ if has_any => EXAMPLES.min(most),
                _ => 0,
            },
            judges: &[],
        }
    }

    /// Whether there is a choice.
    pub(crate) fn is_open(&self) -> bool {
        self.missing > 0 || !self.seen.is_empty()
    }

    /// Takes examples, as many as are missing. A batch that is refused elsewhere has none.
    pub(crate) fn see(&mut self, batch: &B) {
        if batch.check().is_err() {
            return;
        }
        let examples = batch.examples().min(self.missing);
        if examples > 0 {
            self.missing -= examples;
            self.seen.push(batch.slice(0..examples));
        }
    }

    /// With examples to judge by; those that were seen, if there are none.
    pub(crate) fn judged_by<'b>(self, judges: &'b [B]) -> Statistics<'b, B> {
        Statistics {
            how: self.how,
            seen: self.seen,
            missing: self.missing,
            judges,
        }
    }

    /// The model with the statistics that are chosen, its loss, and how; the loss alone is that of
    /// the model as it is where there is no choice.
    pub(crate) fn choose<M: Module>(
        &self,
        model: M,
        loss: &dyn Fn(&M, &B) -> Tensor<1>,
    ) -> Result<(M, f64, Option<JudgedStatistics>), PruneError> {
        let judges = match self.judges {
            [] => &self.seen[..],
            judges => judges,
        };
        let kept_loss = mean_loss(&model, loss, judges)?;
        if self.seen.is_empty() {
            return Ok((model, kept_loss, None));
        }
        let renewed = recompute_batch_norm(model.clone(), loss, self.seen.iter().cloned())?;
        let recomputed_loss = mean_loss(&renewed, loss, judges)?;
        // A NaN loses against every number.
        let is_better = recomputed_loss < kept_loss || kept_loss.is_nan();
        let recomputed = self.how == RunningStatistics::Recomputed || is_better;
        let report = JudgedStatistics {
            recomputed,
            kept_loss,
            recomputed_loss,
        };
        Ok(match recomputed {
            true => (renewed, recomputed_loss, Some(report)),
            false => (model, kept_loss, Some(report)),
        })
    }
}
