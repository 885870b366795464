//! What a run of the pruner starts from, and what it refuses before any gradient is computed.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_lean_reparam::attached;
use serde_json::Value;

use crate::flops;
use crate::model::checks;
use crate::problem::feasible::Feasible;
use crate::run::checksum::checksums;
use crate::run::stage_budgets::stage_budgets;
use crate::run::stage_store::StageStore;
use crate::solver::check;
use crate::solver::grid::levels::Levels;
use crate::{
    Batch, Budget, FisherConfig, Layout, PruneError, PrunerConfig, RidgeChoice, Selection,
};

/// A run that has not begun.
pub(crate) struct Start {
    /// Target and budget of each stage.
    pub(crate) budgets: Vec<(f64, Budget)>,
    pub(crate) store: Option<StageStore>,
}

impl PrunerConfig {
    /// Refuses what needs no gradient to be refused. `more` is what else a run depends on, by name.
    pub(crate) fn start<M: Module>(
        &self,
        model: &M,
        more: &[(&str, f64)],
    ) -> Result<Start, PruneError> {
        let selection = self.select(model)?;
        self.check_flops(&selection)?;
        let budgets = stage_budgets(
            &self.solver.budget,
            &self.solver.pattern,
            (&self.schedule, self.stages),
            selection.layout(),
        )?;
        check(&self.solver)?;
        self.check_budgets(&budgets, selection.layout())?;
        if let Some(grid) = &self.solver.grid {
            Levels::new(grid, selection.layout())?;
        }
        self.ridge.check()?;
        if let RidgeChoice::Sweep(_) = &self.ridge {
            let expected = "at least 1, to judge the ridges of a sweep by";
            checks::accept(self.held_out > 0, "held_out", self.held_out, expected)?;
        }
        self.fisher.check(&selection)?;
        let weights = selection.finite_weights(model)?;
        let store = match &self.state {
            Some(folder) => {
                let mut run: Vec<(&str, Value)> = checksums(model, &selection, &weights)?;
                let more = more.iter();
                run.extend(more.map(|(name, value)| (*name, Value::from(*value))));
                // Where numbers lie does not change them, nor whether somebody looks on.
                let mut config = self.clone().with_state(None);
                config.fisher.on_disk = None;
                config.fisher.memory_bound = FisherConfig::new(1).memory_bound;
                config.fisher.progress = true;
                Some(StageStore::new(folder, &config, attached(model), run)?)
            }
            None => None,
        };
        Ok(Start { budgets, store })
    }

    /// What is pruned.
    pub(crate) fn select<M: Module>(&self, model: &M) -> Result<Selection, PruneError> {
        Selection::for_pattern(model, self.group.as_ref(), &self.solver.pattern)
    }

    /// What is pruned, with the operations of each weight where they are known or matter.
    pub(crate) fn selection<M: Module, B: Batch, I: IntoIterator<Item = B>>(
        &self,
        model: &M,
        budgets: &[(f64, Budget)],
        loss: &dyn Fn(&M, &B) -> Tensor<1>,
        loader: &mut impl FnMut(u64) -> I,
    ) -> Result<Selection, PruneError> {
        let selection = self.select(model)?;
        selection.warn_of_excluded();
        let counted = match (&self.flops, &self.solver.budget) {
            (Some(flops), _) => flops.clone(),
            (None, Budget::Flops { .. }) => {
                let batch = loader(self.seed).into_iter().next();
                let batch = batch.ok_or(PruneError::LoaderEnded {
                    expected: self.fisher.samples,
                    found: 0,
                    batch_size: self.fisher.batch_size,
                })?;
                flops(model, loss, &batch)?
            }
            _ => return Ok(selection),
        };
        for flops in counted.values() {
            let fits = flops.is_finite() && *flops >= 0.0;
            checks::accept(fits, "flops", flops, "finite and not negative")?;
        }
        let selection = selection.with_flops(&counted);
        self.check_budgets(budgets, selection.layout())?;
        Ok(selection)
    }

    /// Refuses operations of parameters that the model lacks; those of parameters that are not pruned, which
    /// [`flops`](crate::flops()) counts too, are let through.
    fn check_flops(&self, selection: &Selection) -> Result<(), PruneError> {
        let paths = selection.parameters().iter();
        let paths: Vec<&str> = paths.map(|parameter| parameter.path.as_str()).collect();
        let named = self.flops.iter().flatten();
        let unknown = named.map(|(path, _)| path.as_str());
        match unknown.filter(|path| !paths.contains(path)).min() {
            Some(path) => Err(PruneError::UnknownLayer {
                path: path.into(),
                known: paths.join(", "),
            }),
            None => Ok(()),
        }
    }

    fn check_budgets(&self, budgets: &[(f64, Budget)], layout: &Layout) -> Result<(), PruneError> {
        for (_, budget) in budgets {
            Feasible::new(&self.solver.pattern, budget, layout)?;
        }
        Ok(())
    }
}
