//! Training between stages: what is trained after which stage, at which learning rate.

use burn::module::Module;
use burn_lean_reparam::Rejected;

use crate::model::checks;
use crate::{Masks, PruneError};

/// The first and the last learning rate after a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    first: f64,
    last: f64,
}

impl Rates {
    pub(crate) fn new(first: f64, last: f64) -> Result<Self, PruneError> {
        for (field, rate) in [("learning_rate", first), ("last_learning_rate", last)] {
            let fits = rate.is_finite() && rate > 0.0;
            checks::accept(fits, field, rate, "positive and finite")?;
        }
        Ok(Self { first, last })
    }

    /// Half a cosine, at t ∈ [0, 1].
    fn at(&self, t: f64) -> f64 {
        self.last + 0.5 * (self.first - self.last) * (1.0 + (std::f64::consts::PI * t).cos())
    }
}

/// The training after one stage: what [`GradualConfig::prune_by_stage`] and
/// [`GradualPruner::prune_by_stage`] ask for.
///
/// Under Burn's `Learner` a stage is one training of so many epochs: a program for it is in
/// `burn_lean::manual::learner`.
///
/// [`GradualConfig::prune_by_stage`]: crate::GradualConfig::prune_by_stage
/// [`GradualPruner::prune_by_stage`]: crate::GradualPruner::prune_by_stage
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTraining {
    /// The stage that it follows, from 0.
    pub stage: usize,
    /// Number of stages.
    pub stages: usize,
    /// Epochs after that stage, at least 1.
    pub epochs: usize,
    rates: Rates,
}

impl StageTraining {
    /// After a stage of so many, with the epochs after one and after the last.
    pub(crate) fn new(
        (stage, stages): (usize, usize),
        (epochs, last_epochs): (usize, usize),
        rates: Rates,
    ) -> Self {
        Self {
            stage,
            stages,
            epochs: match stage + 1 == stages {
                true => last_epochs,
                false => epochs,
            },
            rates,
        }
    }

    /// The learning rate at `progress` ∈ [0, 1] of all its epochs: half a cosine from the first to the
    /// last rate, `last + ½(first − last)(1 + cos(π·progress))`.
    pub fn learning_rate(&self, progress: f64) -> f64 {
        self.rates.at(progress)
    }

    /// Calls `train` unless there is no epoch. What comes back must carry `masks`, and no others: a checkpoint
    /// brings those that it was saved with.
    pub(crate) fn run<M: Module>(
        &self,
        model: M,
        masks: &Masks,
        train: &mut impl FnMut(M, &Self) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<M, Rejected<M, PruneError>> {
        if self.epochs == 0 {
            return Ok(model);
        }
        let model = train(model, self)?;
        let error = match masks.lost_in(&model) {
            Ok(None) => return Ok(model),
            Ok(Some(path)) => PruneError::MasksLost {
                path,
                stage: self.stage,
            },
            Err(error) => error,
        };
        Err(Rejected::new(model, error))
    }

    /// Calls `train` for each epoch.
    pub(crate) fn each_epoch<M>(
        &self,
        mut model: M,
        train: &mut impl FnMut(M, &Epoch) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<M, Rejected<M, PruneError>> {
        for epoch in 0..self.epochs {
            let epoch = Epoch {
                stage: self.stage,
                epoch,
                epochs: self.epochs,
                restart: epoch == 0,
                rates: self.rates,
            };
            model = train(model, &epoch)?;
        }
        Ok(model)
    }
}

/// One epoch of training between stages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epoch {
    /// The stage that it follows, from 0.
    pub stage: usize,
    /// Its number after that stage, from 0.
    pub epoch: usize,
    /// Epochs after that stage.
    pub epochs: usize,
    /// Whether the weights have just been pruned: make a new optimizer, since the momentum of the
    /// old one belongs to weights that are gone.
    pub restart: bool,
    rates: Rates,
}

impl Epoch {
    /// The learning rate at `progress` ∈ [0, 1] of this epoch: half a cosine from the first to the
    /// last rate over the epochs of the stage, `last + ½(first − last)(1 + cos(π·t))`.
    pub fn learning_rate(&self, progress: f64) -> f64 {
        self.rates
            .at((self.epoch as f64 + progress) / self.epochs as f64)
    }
}
