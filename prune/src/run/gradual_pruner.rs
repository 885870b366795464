//! Gradual pruning from inputs alone: by magnitude or layer by layer, with training between the stages.

use std::path::PathBuf;

use burn::module::Module;
use burn_lean_graph::Tensors;
use burn_lean_reparam::{Rejected, attached};
use serde::{Deserialize, Serialize};

use crate::run::checksum::checksums;
use crate::run::stage_budgets::stage_budgets;
use crate::run::stage_store::StageStore;
use crate::run::training::{Rates, StageTraining};
use crate::{
    Budget, Masks, PruneError, Pruner, Selection, SparsitySchedule,
    layerwise::{Candidate, LayerwiseReport},
    run::Epoch,
};

/// How a model is pruned gradually without gradients of a loss: prune, train with the zeros held, prune
/// further.
///
/// ```text
/// for stage t:
///     prune to the target of t                            by magnitude, or layer by layer
///     BatchNorm statistics anew                           where the pruner recalibrates
///     attach the masks
///     for epoch of the stage: model = train(model, epoch)  learning rate: cosine, restarted
///     fold the masks in
/// ```
///
/// It is [`GradualConfig`](crate::GradualConfig) with magnitude or a [`Pruner`] in the place of CHITA:
/// `forward` and inputs are enough, labels and losses are the business of `train` alone. Layer by layer a
/// layer is fitted to what the model of the stage before returns, trained as it is, and a weight that has
/// gone can come back in a later stage; by magnitude it cannot.
///
/// # With mixed precision, a teacher, the Learner
///
/// `train` computes as it likes: in [`Autocast::run`] of the crate `amp`, which leaves weights as they
/// are, and with the loss of a dense teacher (`Distillation` of the crate `recipe`); under Burn's Learner by
/// [`prune_by_stage`](Self::prune_by_stage). What acts on weights *between* the stages, too, a cast of
/// a prepared model or fake quantization, is for [`GradualConfig`](crate::GradualConfig).
///
/// [`Autocast::run`]: https://docs.rs/burn-lean-amp
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_lean_prune::{Budget, GradualPruner, SparsitySchedule};
///
/// let device = Device::flex();
/// let mut gradual = GradualPruner::new(Budget::Sparsity(0.75), 2, 1, 2);
/// gradual.schedule = SparsitySchedule::Linear { base: 0.5 };
/// let mut epochs = Vec::new();
/// let pruned = gradual.prune(
///     LinearConfig::new(8, 4).init(&device.clone().autodiff()),
///     |model, x: Tensor<2>| model.forward(x),
///     |_seed| [Tensor::<2>::random([64, 8], Distribution::Normal(0.0, 1.0), &device)],
///     |model, epoch| {
///         epochs.push((epoch.stage, epoch.epoch, epoch.restart));
///         Ok(model) // train here, with `epoch.learning_rate(…)`
///     },
/// )?;
/// assert_eq!(epochs, [(0, 0, true), (1, 0, true), (1, 1, false)]);
/// let kept: Vec<usize> = pruned.stages.iter().map(|stage| stage.nonzeros).collect();
/// assert_eq!(kept, [16, 8]);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradualPruner {
    /// What prunes in a stage. Default: layer by layer. Of the embedded digits' MLP it was ahead of magnitude by
    /// 13 points at 0.98; where training mends what magnitude does, there at 0.9 and of MNIST's MLP, it was
    /// behind by a point (`benches/RESULTS.md`). It takes seconds a stage where magnitude takes next to none.
    pub method: StageMethod,
    /// How, with the budget of the last stage. By magnitude, of it are looked at budget, pattern,
    /// parameters, whether statistics are measured anew and on how many examples. Default: that of
    /// [`Pruner::new`] without [tuning](Pruner::tuning), since training follows.
    pub pruner: Pruner,
    /// Stages, at least 1.
    pub stages: usize,
    /// Which sparsity each stage prunes to. Default: polynomial from 0.5, or constant where a budget
    /// given as a sparsity is at most that.
    pub schedule: SparsitySchedule,
    /// Epochs of training after every stage but the last.
    pub epochs: usize,
    /// Epochs of training after the last stage.
    pub last_epochs: usize,
    /// Learning rate at the start of each stage's training. Default 0.1.
    pub learning_rate: f64,
    /// Learning rate at the end of it. Default 1e-5.
    pub last_learning_rate: f64,
    /// Seed; the loader of stage t gets `seed + t`. Default 0.
    pub seed: u64,
    /// A folder for the newest finished stage, pruned and trained, so that an interrupted run goes on
    /// after it. It answers only for the same settings and the same model, to the bit; numbers are the same
    /// where `train` depends on nothing but the model and the epoch. Default: none.
    #[serde(skip)]
    pub state: Option<PathBuf>,
}

/// A run that has not begun.
struct Start {
    rates: Rates,
    /// Target and budget of each stage.
    budgets: Vec<(f64, Budget)>,
    store: Option<StageStore>,
}

/// What prunes in a stage of [`GradualPruner`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StageMethod {
    /// The smallest weights of all layers go, the others keep their values; BatchNorm statistics are
    /// measured anew.
    Magnitude,
    /// [`Pruner`], layer by layer.
    #[default]
    Layerwise,
}

/// A model that was pruned gradually by [`GradualPruner`].
#[derive(Debug, Clone)]
pub struct GradualPruned<M> {
    /// The model, with zeros; nothing holds them now. `masks.attach(model)` does.
    pub model: M,
    /// Which weights were kept.
    pub masks: Masks,
    /// Which parameters were pruned, and why others were not.
    pub selection: Selection,
    /// The stages, in their order.
    pub stages: Vec<LayerwiseStage>,
}

/// What one stage of [`GradualPruner`] did, before the training after it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerwiseStage {
    /// Its number, from 0.
    pub stage: usize,
    /// Sparsity over the prunable weights that it aimed at.
    pub target: f64,
    /// Weights kept.
    pub nonzeros: usize,
    /// What was done; the dense network in it is the model before the stage.
    pub report: LayerwiseReport,
}

impl GradualPruner {
    /// To this budget in so many stages, with so many epochs after each and after the last; otherwise
    /// with the defaults.
    pub fn new(budget: Budget, stages: usize, epochs: usize, last_epochs: usize) -> Self {
        let schedule = match &budget {
            Budget::Sparsity(sparsity) | Budget::PerLayer(sparsity) if *sparsity <= 0.5 => {
                SparsitySchedule::Constant
            }
            _ => SparsitySchedule::Polynomial { base: 0.5 },
        };
        Self {
            method: StageMethod::default(),
            pruner: Pruner {
                tuning: Some(0),
                ..Pruner::new(budget)
            },
            stages,
            schedule,
            epochs,
            last_epochs,
            learning_rate: 0.1,
            last_learning_rate: 1e-5,
            seed: 0,
            state: None,
        }
    }

    /// Prunes `model` in stages and trains it after each of them.
    ///
    /// `forward` gives the outputs of a batch of inputs, `loader` the inputs of a stage in an order that
    /// its seed determines, as many as [`Pruner::prune`] takes. `train` runs one epoch and returns the
    /// model; its weights carry masks, so whatever the optimizer does, pruned weights stay zero. In the
    /// model that comes back the masks are folded in.
    ///
    /// # Errors
    ///
    /// The model comes back in the error: as it was after the last finished stage where a stage fails;
    /// where `train` fails, it is the one that `train` returns, with masks.
    /// - [`PruneError::InvalidConfig`]: a learning rate that is not positive and finite, no stage.
    /// - [`PruneError::CarriesReparameterization`]: the model carries anything, which would be folded in
    ///   with the masks.
    /// - [`PruneError::Record`], [`PruneError::Io`], [`PruneError::StagesOfAnotherRun`]: of the
    ///   [`state`](Self::state).
    /// - [`PruneError::MasksLost`]: `train` returns a model without the masks, or with others: those of a
    ///   checkpoint, say, that was saved in a stage that has been pruned anew since.
    /// - Whatever `train` returns, and as [`Pruner::prune`] and [`SparsitySchedule::targets`].
    pub fn prune<M: Module, I: Tensors, O: Tensors, B: IntoIterator<Item = I>>(
        &self,
        model: M,
        forward: impl Fn(&M, I) -> O,
        loader: impl FnMut(u64) -> B,
        mut train: impl FnMut(M, &Epoch) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<GradualPruned<M>, Rejected<M, PruneError>> {
        self.prune_by_stage(model, forward, loader, |model, training| {
            training.each_epoch(model, &mut train)
        })
    }

    /// Like [`prune`](Self::prune), with all epochs of a stage at once: for a training that has its own
    /// loop over epochs, Burn's `Learner` for example, see [`StageTraining`].
    ///
    /// `train_stage` is not called where a stage has no epochs.
    ///
    /// # Errors
    ///
    /// As [`prune`](Self::prune).
    pub fn prune_by_stage<M: Module, I: Tensors, O: Tensors, B: IntoIterator<Item = I>>(
        &self,
        mut model: M,
        forward: impl Fn(&M, I) -> O,
        mut loader: impl FnMut(u64) -> B,
        mut train_stage: impl FnMut(M, &StageTraining) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<GradualPruned<M>, Rejected<M, PruneError>> {
        let Start {
            rates,
            budgets,
            store,
        } = match self.start(&model) {
            Ok(start) => start,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let first = match self.method {
            StageMethod::Layerwise => Candidate::Configured,
            StageMethod::Magnitude => Candidate::Magnitude,
        };
        let (mut stages, mut last) = (Vec::new(), None);
        if let Some(store) = &store {
            let (loaded, done) = store.resume(model, budgets.len())?;
            model = loaded;
            if let Some(done) = done {
                let selection = match self.selection(&model) {
                    Ok(selection) => selection,
                    Err(error) => return Err(Rejected::new(model, error)),
                };
                (stages, last) = (done.reports, Some((done.masks, selection)));
            }
        }
        for (stage, (target, budget)) in budgets.iter().enumerate().skip(stages.len()) {
            let pruner = Pruner {
                budget: budget.clone(),
                ..self.pruner.clone()
            };
            let batches = loader(self.seed.wrapping_add(stage as u64));
            let selection = match pruner.selection(&model) {
                Ok(selection) => selection,
                Err(error) => return Err(Rejected::new(model, error)),
            };
            let pruned = pruner.prune_as(first, selection, model, &forward, batches)?;
            let nonzeros = pruned.masks.nonzeros();
            tracing::info!(stage, target = *target, nonzeros, "stage of pruning");
            let training = StageTraining::new(
                (stage, budgets.len()),
                (self.epochs, self.last_epochs),
                rates,
            );
            let masked = pruned.masks.attach(pruned.model)?;
            model = training
                .run(masked, &pruned.masks, &mut train_stage)?
                .materialize();
            stages.push(LayerwiseStage {
                stage,
                target: *target,
                nonzeros,
                report: pruned.report,
            });
            if let Some(store) = &store
                && let Err(error) = store.save(stage, &model, &pruned.masks, &stages)
            {
                return Err(Rejected::new(model, error));
            }
            last = Some((pruned.masks, pruned.selection));
        }
        match last {
            Some((masks, selection)) => Ok(GradualPruned {
                model,
                masks,
                selection,
                stages,
            }),
            None => Err(Rejected::new(model, PruneError::NoPrunableParameter)),
        }
    }

    /// What needs no forward pass to be refused, and what follows from the config.
    fn start<M: Module>(&self, model: &M) -> Result<Start, PruneError> {
        let rates = Rates::new(self.learning_rate, self.last_learning_rate)?;
        if let Some(carrier) = attached(model).into_iter().next() {
            return Err(PruneError::CarriesReparameterization {
                path: carrier.path,
                name: carrier.name,
            });
        }
        let Pruner {
            budget, pattern, ..
        } = &self.pruner;
        let selection = self.selection(model)?;
        let schedule = (&self.schedule, self.stages);
        let budgets = stage_budgets(budget, pattern, schedule, selection.layout())?;
        selection.warn_of_excluded();
        let store = match &self.state {
            Some(folder) => {
                let weights = selection.finite_weights(model)?;
                let run = checksums(model, &selection, &weights)?;
                Some(StageStore::new(folder, self, Vec::new(), run)?)
            }
            None => None,
        };
        Ok(Start {
            rates,
            budgets,
            store,
        })
    }

    fn selection<M: Module>(&self, model: &M) -> Result<Selection, PruneError> {
        let Pruner { pattern, group, .. } = &self.pruner;
        Selection::for_pattern(model, group.as_ref(), pattern)
    }
}
