//! From a trained model to a pruned one, in one stage or in several.

use std::collections::HashMap;
use std::path::PathBuf;

use burn::config::Config;
use burn::module::{Module, ParamGroup};
use burn::tensor::Tensor;
use burn_lean_reparam::{Rejected, own_copy};
use serde::{Deserialize, Serialize};

use crate::run::start::Start;
use crate::{
    Batch, DeadColumns, FisherConfig, Layout, Masks, PruneError, Ridge, RidgeChoice,
    RunningStatistics, Selection, SolverConfig, SparsitySchedule,
    fisher::FisherReport,
    problem::{Objective, Rounded},
    solver::JudgedRidge,
    statistics::JudgedStatistics,
};

/// How a model is pruned by CHITA; not the settings of [`Pruner`](crate::Pruner).
///
/// One stage is CHITA: gradients of the dense model, one problem, one solution. Several stages are
/// CHITA++: each takes fresh gradients at the weights that the one before left, which become the
/// new w₀, and prunes a little further along the [`SparsitySchedule`].
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{Budget, FisherConfig, PrunerConfig, SolverConfig};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(8, 4).init(&device);
/// let solver = SolverConfig::new(Budget::Sparsity(0.75));
/// let pruned = PrunerConfig::new(solver, FisherConfig::new(4)).prune(
///     model,
///     |model, x: &Tensor<2>| model.forward(x.clone()).square().mean(),
///     // Four for the gradients, two to choose the ridge by.
///     |_seed| [Tensor::<2>::ones([6, 8], &device)],
/// )?;
/// assert_eq!(pruned.masks.nonzeros(), 8);
/// let zeros = pruned.model.weight.val().equal_elem(0.0).int().sum().into_scalar::<i64>();
/// assert_eq!(zeros, 24);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Config, Debug)]
pub struct PrunerConfig {
    /// What to solve for in the last stage, and how in every stage.
    pub solver: SolverConfig,
    /// How gradients are collected in every stage.
    pub fisher: FisherConfig,
    /// Stages, at least 1. Default 1.
    #[config(default = 1)]
    pub stages: usize,
    /// Which sparsity each stage prunes to. Default: exponential from 0.1.
    #[config(default = "SparsitySchedule::Exponential { base: 0.1 }")]
    pub schedule: SparsitySchedule,
    /// How the ridge is chosen. Default: in every stage, a sweep that the loss on held-out examples
    /// judges.
    #[config(default = "RidgeChoice::sweep()")]
    pub ridge: RidgeChoice,
    /// Examples that judge the ridges of a sweep, and new running statistics: what the loader yields
    /// after those of the Fisher samples. Default 500; fewer where the loader ends.
    #[config(default = 500)]
    pub held_out: usize,
    /// What happens to the running statistics of BatchNorm layers. Default: computed anew where that
    /// lowers the loss on the held-out examples.
    #[config(default = "RunningStatistics::Judged")]
    pub running_statistics: RunningStatistics,
    /// Whether the problem has the gradient of the loss, a = 1/m. Default: with more than one
    /// stage, since the weights are no minimum of the loss from the second on; a sweep over ridges
    /// judges each with it and without.
    #[config(default = "None")]
    pub first_order: Option<bool>,
    /// Floating-point operations of each weight by the path of its parameter, as
    /// [`flops`](crate::flops()) counts them. Default: counted on the first batch of the loader if
    /// the budget bounds operations, 2 otherwise.
    #[config(default = "None")]
    pub flops: Option<HashMap<String, f64>>,
    /// The parameters to prune. Default: see [`Selection::of`]; of them those that an N:M pattern
    /// divides, see [`Selection::for_pattern`].
    #[config(default = "None")]
    pub group: Option<ParamGroup>,
    /// Seed; the loader of stage t gets `seed + t`. Default 0.
    #[config(default = 0)]
    pub seed: u64,
    /// A folder to keep finished stages in, so that an interrupted run goes on after the last of
    /// them. It answers only for the same config and the same model, to the bit, with what its weights carry;
    /// when and whether quantizers quantize is not looked at. Default: none.
    #[config(default = "None")]
    pub state: Option<PathBuf>,
}

/// A pruned model.
#[derive(Debug, Clone)]
pub struct Pruned<M> {
    /// The model, with zeros; nothing holds them yet. `masks.attach(model)` does.
    pub model: M,
    /// Which weights were kept.
    pub masks: Masks,
    /// Which parameters were pruned, and why others were not.
    pub selection: Selection,
    /// The stages, in their order.
    pub stages: Vec<StageReport>,
}

/// What one stage did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageReport {
    /// Its number, from 0.
    pub stage: usize,
    /// Number of stages.
    pub stages: usize,
    /// Sparsity over the prunable weights that it aimed at; of a bound on operations, the part of these that was
    /// to go.
    pub target: f64,
    /// Weights kept.
    pub nonzeros: usize,
    /// Value of the problem, over all p weights.
    pub objective: f64,
    /// The terms of it.
    pub terms: Objective,
    /// See [`Solution::relative_gap`](crate::Solution::relative_gap).
    #[serde(with = "burn_lean_reparam::json::float")]
    pub relative_gap: f64,
    /// The ridge that was used.
    pub ridge: Ridge,
    /// All ridges of a sweep, as they were judged.
    pub ridges: Vec<JudgedRidge>,
    /// How the running statistics of BatchNorm layers were chosen; `None` where there was no choice.
    pub statistics: Option<JudgedStatistics>,
    /// Codes and scales of the last stage, where the solver has a grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounded: Option<Rounded>,
    /// How the gradients came about; the mean loss in it is that before the stage.
    pub gradients: FisherReport,
    /// Time of the solver in seconds, wall clock.
    pub solve_seconds: f64,
}

impl PrunerConfig {
    /// Prunes `model`.
    ///
    /// `loss` is the mean loss of some examples; `loader` yields the examples of a stage in an
    /// order that its seed determines. The model is taken as it is deployed, see
    /// [`FisherConfig::collect`]; it may carry masks already, which hold.
    ///
    /// # Errors
    ///
    /// The model comes back in the error: as it was after the last finished stage where a stage
    /// fails, as the stage made it where keeping it fails. What can be refused without gradients is
    /// refused before any is computed.
    /// - [`PruneError::InvalidConfig`], [`PruneError::Sparsity`], [`PruneError::NoPrunableParameter`]
    ///   and what else [`Selection::of`] and [`solve`](crate::solve) refuse.
    /// - What [`FisherConfig::collect`] finds in model, loss and batches, among it
    ///   [`PruneError::LoaderEnded`] where a loader has too few examples, and
    ///   [`PruneError::NoHeldOut`] where it has none left to judge a ridge by.
    /// - What keeping and loading [`state`](Self::state) finds.
    pub fn prune<M: Module, B: Batch, I: IntoIterator<Item = B>>(
        &self,
        model: M,
        loss: impl Fn(&M, &B) -> Tensor<1>,
        loader: impl FnMut(u64) -> I,
    ) -> Result<Pruned<M>, Rejected<M, PruneError>> {
        self.prune_with(model, loss, loader, |model, _, _| Ok(model))
    }

    /// Like [`prune`](Self::prune), with something to do after every stage: look at the model,
    /// recompute its BatchNorm statistics, train it.
    ///
    /// What `after_stage` returns is what the next stage prunes, and what is kept in
    /// [`state`](Self::state). A kept stage is loaded into the model that a later call brings, so it
    /// must carry the reparameterizations that this one brought and no others: masks that
    /// `after_stage` attaches are folded in at its end, as [`GradualConfig`](crate::GradualConfig)
    /// does.
    ///
    /// # Errors
    ///
    /// As [`prune`](Self::prune), and whatever `after_stage` returns, with the model that it
    /// returns. [`PruneError::StageReparameterized`] where a stage cannot be kept for what it
    /// carries.
    pub fn prune_with<M: Module, B: Batch, I: IntoIterator<Item = B>>(
        &self,
        model: M,
        loss: impl Fn(&M, &B) -> Tensor<1>,
        loader: impl FnMut(u64) -> I,
        after_stage: impl FnMut(M, &Masks, &StageReport) -> Result<M, Rejected<M, PruneError>>,
    ) -> Result<Pruned<M>, Rejected<M, PruneError>> {
        self.run(model, loss, loader, after_stage, &[])
    }

    /// [`prune_with`](Self::prune_with); `more` is what else the kept stages depend on, by name.
    pub(crate) fn run<M: Module, B: Batch, I: IntoIterator<Item = B>>(
        &self,
        model: M,
        loss: impl Fn(&M, &B) -> Tensor<1>,
        mut loader: impl FnMut(u64) -> I,
        mut after_stage: impl FnMut(M, &Masks, &StageReport) -> Result<M, Rejected<M, PruneError>>,
        more: &[(&str, f64)],
    ) -> Result<Pruned<M>, Rejected<M, PruneError>> {
        let start = match self.start(&model, more) {
            Ok(start) => start,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let Start { budgets, store } = start;
        let (mut model, mut done) = match &store {
            Some(store) => store.resume(model, budgets.len())?,
            None => (own_copy(&model), None),
        };
        // A loaded model has the identities of its record.
        let selection = match self.selection(&model, &budgets, &loss, &mut loader) {
            Ok(selection) => selection,
            Err(error) => return Err(Rejected::new(model, error)),
        };
        let mut reports = done
            .as_mut()
            .map(|done| std::mem::take(&mut done.reports))
            .unwrap_or_default();
        let mut masks = match done {
            Some(done) => Some(done.masks),
            None => match carried_masks(&model, selection.layout()) {
                Ok(masks) => masks,
                Err(error) => return Err(Rejected::new(model, error)),
            },
        };
        // Said of the stage before.
        let mut unreached: Vec<String> = Vec::new();
        for (stage, (target, budget)) in budgets.iter().enumerate().skip(reports.len()) {
            let batches = loader(self.seed.wrapping_add(stage as u64));
            let is_last = stage + 1 == budgets.len();
            let solver = SolverConfig {
                budget: budget.clone(),
                dead_columns: self.solver.dead_columns.or(Some(DeadColumns::PrunedFirst)),
                // What is pruned further is rounded at the end.
                grid: self.solver.grid.clone().filter(|_| is_last),
                ..self.solver.clone()
            };
            let staged = self
                .stage(&model, &selection, &loss, batches, &solver, masks.as_ref())
                .and_then(|mut staged| {
                    let support = &mut staged.solved.solution.support;
                    if let Some(masks) = &masks {
                        // A budget that is larger than what is left brings nothing back.
                        let kept: Vec<bool> = masks.flags().collect();
                        support.retain(|index| kept[*index]);
                    }
                    let new = Masks::from_support(selection.layout(), support)?;
                    Ok((staged, new))
                });
            let (staged, new) = match staged {
                Ok(staged) => staged,
                Err(error) => return Err(Rejected::new(model, error)),
            };
            let solved = staged.solved;
            let report = StageReport {
                stage,
                stages: budgets.len(),
                target: *target,
                nonzeros: solved.solution.support.len(),
                objective: solved.solution.objective,
                terms: solved.solution.terms,
                relative_gap: solved.solution.relative_gap,
                ridge: solved.ridge,
                ridges: solved.ridges,
                statistics: staged.statistics,
                rounded: solved.solution.rounded,
                gradients: solved.gradients,
                solve_seconds: solved.seconds,
            };
            if report.gradients.unreached != unreached {
                report.gradients.warn_of_unreached();
                unreached.clone_from(&report.gradients.unreached);
            }
            tracing::info!(
                stage,
                target = *target,
                objective = report.objective,
                loss = report.gradients.loss,
                "stage of pruning"
            );
            model = after_stage(staged.model, &new, &report)?;
            reports.push(report);
            if let Some(store) = &store
                && let Err(error) = store.save(stage, &model, &new, &reports)
            {
                return Err(Rejected::new(model, error));
            }
            masks = Some(new);
        }
        match masks {
            Some(masks) => Ok(Pruned {
                model,
                masks,
                selection,
                stages: reports,
            }),
            None => Err(Rejected::new(model, PruneError::NoPrunableParameter)),
        }
    }
}

/// The masks that the model comes with, for each layer of the layout; none where they hold nothing.
fn carried_masks<M: Module>(model: &M, layout: &Layout) -> Result<Option<Masks>, PruneError> {
    let carried = Masks::of(model)?;
    let layers = Masks::keeping_all(layout).parameters().to_vec();
    let masks = layers.into_iter().map(|all| match carried.get(all.path()) {
        Some(mask) => mask.clone(),
        None => all,
    });
    let masks = Masks::new(masks.collect())?;
    Ok((masks.nonzeros() < masks.weights()).then_some(masks))
}
