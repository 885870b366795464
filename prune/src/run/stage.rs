//! One stage of pruning: gradients, solution, running statistics.

use std::time::Instant;

use burn::module::Module;
use burn::tensor::{DType, Tensor};

use crate::statistics::running::Statistics;
use crate::{
    Batch, Fisher, Masks, Problem, PruneError, PrunerConfig, Ridge, RidgeChoice, Selection,
    Solution, SolverConfig, fisher::FisherReport, solve_with_ridge, solver::JudgedRidge,
    statistics::JudgedStatistics,
};

impl PrunerConfig {
    /// Gradients and solution of one stage, and the model with it.
    pub(crate) fn stage<M: Module, B: Batch>(
        &self,
        model: &M,
        selection: &Selection,
        loss: &dyn Fn(&M, &B) -> Tensor<1>,
        batches: impl IntoIterator<Item = B>,
        solver: &SolverConfig,
        frozen: Option<&Masks>,
    ) -> Result<Staged<M>, PruneError> {
        let free = frozen.map(|masks| free_weights(masks, selection));
        let first_order = match self.first_order.unwrap_or(self.stages > 1) {
            true => 1.0 / self.fisher.batch_size as f64,
            false => 0.0,
        };
        // What lies behind the samples in their last batch is held out.
        let most = self.fisher.samples.saturating_mul(self.fisher.batch_size);
        let mut statistics = Statistics::new(self.running_statistics, model, most);
        let mut batches = batches.into_iter();
        let seen = batches.by_ref().inspect(|batch| statistics.see(batch));
        let (Fisher { gradients, report }, rest) = self
            .fisher
            .collect_free(model, selection, loss, seen, free)?;
        let dense = selection.flatten(model)?;
        let problem = Problem::new(gradients, dense, selection.layout().clone())?
            .with_first_order(first_order)?;
        let start = Instant::now();
        let judges = self.judges(&statistics, rest.into_iter().chain(batches))?;
        let statistics = statistics.judged_by(&judges);
        let mut judge = |solution: &Solution| {
            let pruned = selection.unflatten(model.clone(), solution.weights.clone())?;
            let (_, loss, _) = statistics.choose(pruned, loss)?;
            Ok(loss)
        };
        let ridges = self.ridges(first_order);
        let sweep = solve_with_ridge(&problem, solver, &ridges, &mut judge)?;
        let solved = Solved {
            solution: sweep.solution,
            gradients: report,
            ridge: sweep.chosen,
            ridges: sweep.candidates,
            seconds: start.elapsed().as_secs_f64(),
        };
        settle(solved, &statistics, selection, model, loss)
    }

    /// The ridges to judge; where nobody has said whether the gradient of the loss counts, with it and
    /// without: where the loss is small, the empirical Fisher is far below its curvature, and the step along
    /// the gradient too long for every ridge.
    fn ridges(&self, first_order: f64) -> RidgeChoice {
        let mut ridges = self.ridge.clone();
        if let (RidgeChoice::Sweep(candidates), None) = (&mut ridges, self.first_order)
            && first_order != 0.0
        {
            let open = candidates.clone().into_iter();
            let open = open.filter(|ridge| ridge.first_order.is_none());
            candidates.extend(open.map(|ridge| Ridge {
                first_order: Some(0.0),
                ..ridge
            }));
        }
        ridges
    }

    /// The examples that judge what there is to choose in a stage; none where there is nothing.
    fn judges<B: Batch>(
        &self,
        statistics: &Statistics<'_, B>,
        batches: impl Iterator<Item = B>,
    ) -> Result<Vec<B>, PruneError> {
        match (&self.ridge, statistics.is_open()) {
            (RidgeChoice::Fixed(_), false) => Ok(Vec::new()),
            (RidgeChoice::Fixed(_), true) => match self.held_out(batches) {
                Err(PruneError::NoHeldOut) => Ok(Vec::new()),
                judges => judges,
            },
            _ => self.held_out(batches),
        }
    }

    /// The next examples of the loader.
    fn held_out<B: Batch>(&self, batches: impl Iterator<Item = B>) -> Result<Vec<B>, PruneError> {
        let mut taken = Vec::new();
        let mut missing = self.held_out;
        for batch in batches {
            batch.check()?;
            let examples = batch.examples().min(missing);
            missing -= examples;
            taken.push(batch.slice(0..examples));
            if missing == 0 {
                break;
            }
        }
        taken.retain(|batch| batch.examples() > 0);
        match taken.is_empty() {
            true => Err(PruneError::NoHeldOut),
            false => Ok(taken),
        }
    }
}

/// The solution of one stage, and what it took.
pub(crate) struct Solved {
    pub(crate) solution: Solution,
    pub(crate) gradients: FisherReport,
    pub(crate) ridge: Ridge,
    pub(crate) ridges: Vec<JudgedRidge>,
    pub(crate) seconds: f64,
}

/// A model after one stage.
pub(crate) struct Staged<M> {
    pub(crate) solved: Solved,
    pub(crate) model: M,
    /// How its running statistics were chosen.
    pub(crate) statistics: Option<JudgedStatistics>,
}

/// The model with a solution.
fn settle<M: Module, B: Batch>(
    solved: Solved,
    statistics: &Statistics<'_, B>,
    selection: &Selection,
    model: &M,
    loss: &dyn Fn(&M, &B) -> Tensor<1>,
) -> Result<Staged<M>, PruneError> {
    let model = selection.unflatten(model.clone(), solved.solution.weights.clone())?;
    let (model, statistics) = match statistics.is_open() {
        true => {
            let (model, _, chosen) = statistics.choose(model, loss)?;
            (model, chosen)
        }
        false => (model, None),
    };
    Ok(Staged {
        solved,
        model,
        statistics,
    })
}

/// 1 for a weight that the masks keep, 0 for one that stays pruned, `[p]`.
fn free_weights(masks: &Masks, selection: &Selection) -> Tensor<1> {
    let flags = masks.flags().map(|kept| if kept { 1.0 } else { 0.0 });
    let flags: Vec<f32> = flags.collect();
    Tensor::from_data(&flags[..], (selection.device(), DType::F32))
}
