//! All candidates for one network: the walks that make them, and the one that diverges least.

use std::collections::HashSet;
use std::time::Instant;

use burn::module::Module;
use burn_lean_graph::Tensors;

use crate::layerwise::attempt::{Attempt, Setting};
use crate::layerwise::calibration::{Calibration, Extent};
use crate::layerwise::candidates::Tried;
use crate::layerwise::divergences::{Divergences, Measure, of_the_mean};
use crate::layerwise::given::Given;
use crate::layerwise::rows::Sampling;
use crate::layerwise::shares::Shared;
use crate::layerwise::{Candidate, Effort, effort};
use crate::{PruneError, Pruner, Selection};

/// What all candidates have in common, whatever each layer keeps.
pub(crate) struct Contest<'a, M, I, O> {
    pub(crate) pruner: &'a Pruner,
    pub(crate) selection: &'a Selection,
    /// BatchNorm layers that do no more than shift.
    pub(crate) folded: &'a HashSet<String>,
    pub(crate) calibration: &'a Calibration<'a, M, I, O>,
    /// When nothing new is begun any more.
    pub(crate) deadline: Option<Instant>,
}

/// The candidate that diverges least so far.
pub(crate) struct Best<M> {
    pub(crate) attempt: Attempt<M>,
    pub(crate) tried: Tried,
    /// Of the dense network, for each batch.
    pub(crate) outputs: Vec<Given>,
    /// Of one pass over the batches that layers are fitted to.
    pub(crate) multiplications: f64,
    /// Paths of the BatchNorm layers that keep their statistics.
    pub(crate) still: HashSet<String>,
}

impl<M: Module, I: Tensors, O: Tensors> Contest<'_, M, I, O> {
    pub(crate) fn is_late(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// What a walk is made with where each layer keeps as many weights as in `kept`.
    pub(crate) fn setting<'s>(&'s self, kept: &'s [bool], extent: &Extent) -> Setting<'s> {
        Setting {
            pruner: self.pruner,
            selection: self.selection,
            magnitude: kept,
            sampling: Sampling {
                batches: extent.fitted,
                rows: self.pruner.rows,
            },
            folded: self.folded,
            judges: extent.judges.clone(),
        }
    }

    /// One walk through the dense network, of which `outputs` are known or not.
    pub(crate) fn attempt(
        &self,
        kept: &[bool],
        extent: &Extent,
        candidate: Candidate,
        outputs: Option<&[Given]>,
    ) -> Result<Attempt<M>, PruneError> {
        let dense = &self.calibration.dense;
        let walk = self.calibration.walk(dense, extent)?;
        let setting = self.setting(kept, extent);
        setting.attempt(dense.valid(), walk, candidate, outputs)
    }

    /// `first` and what is tried beside it.
    pub(crate) fn best(&self, first: Candidate, shared: &Shared) -> Result<Best<M>, PruneError> {
        let (dense, all) = (&self.calibration.dense, self.calibration.all());
        let walk = self.calibration.walk(dense, &all)?;
        let multiplications = effort::multiplications(&walk) * self.calibration.fitted as f64;
        let mut tried = Tried::default();
        let begun = Instant::now();
        let setting = self.setting(&shared.kept, &all);
        let still = setting.still(walk.graph());
        let mut attempt = setting.attempt(dense.valid(), walk, first, None)?;
        tried.add(first, &attempt.divergences, begun);
        let outputs = std::mem::take(&mut attempt.dense);
        for candidate in self.beside(first) {
            // Nobody can be judged by outputs of other rows.
            if self.is_late() || attempt.unpaired > 0 {
                break;
            }
            let begun = Instant::now();
            if candidate == Candidate::Magnitude
                && let Some(seen) = self.screened(shared, &outputs)?
            {
                let (behind, error) = tried.least().behind(&seen);
                if behind > f64::max(4.0 * error, 0.5 * tried.least().mean()) {
                    tried.add(candidate, &seen, begun);
                    continue;
                }
            }
            let other = self.attempt(&shared.kept, &all, candidate, Some(&outputs))?;
            if tried.add(candidate, &other.divergences, begun) {
                attempt = other;
            }
        }
        Ok(Best {
            attempt,
            tried,
            outputs,
            multiplications,
            still,
        })
    }

    /// What is tried beside the first.
    fn beside(&self, first: Candidate) -> Vec<Candidate> {
        match (self.pruner.candidates, self.pruner.effort) {
            _ if first == Candidate::Magnitude => Vec::new(),
            (false, _) => Vec::new(),
            (true, Effort::Thorough) => vec![Candidate::MagnitudeFitted, Candidate::Magnitude],
            (true, _) => vec![Candidate::Magnitude],
        }
    }

    /// How magnitude does on a few batches, which say enough of one that is far behind; `None` where there are
    /// no fewer.
    fn screened(
        &self,
        shared: &Shared,
        outputs: &[Given],
    ) -> Result<Option<Divergences>, PruneError> {
        let calibration = self.calibration;
        if calibration.fitted <= 1 || calibration.held_out == 0 {
            return Ok(None);
        }
        if let Some(seen) = &shared.screened {
            return Ok(Some(seen.clone()));
        }
        let few = calibration.few();
        let outputs = few.batches.iter().map(|at| outputs[*at].clone());
        let outputs: Vec<Given> = outputs.collect();
        let seen = self.attempt(&shared.kept, &few, Candidate::Magnitude, Some(&outputs))?;
        Ok(Some(seen.divergences))
    }

    /// The mean divergence of a network with one answer for everything, from outputs of the dense one.
    pub(crate) fn of_one_answer(
        &self,
        outputs: &[Given],
        extent: &Extent,
    ) -> Result<f64, PruneError> {
        let measures = Measure::of(self.pruner.outputs, outputs);
        Ok(of_the_mean(&measures, &outputs[extent.judges.clone()])?.mean())
    }
}
