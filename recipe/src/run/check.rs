//! What a run refuses of a model and its data before anything is computed.

use burn::module::Module;
use burn_lean_deploy::{Export, Form};
use burn_lean_graph::record;
use burn_lean_prune::SparsityPattern;
use burn_lean_quant::QuantError;
use burn_lean_reparam::{attached, each_plain_float};

#[cfg(feature = "engine")]
use super::Latency;
use super::prune;
use super::session::{Examples, Outputs, Session};
use crate::check::Check;
use crate::{Format, PruneMethod, PruneStage, QuantizeStage, RecipeError};

impl<M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, '_, '_, M, I, T, O> {
    /// Refuses paths that no parameter has, a share that shrinking cannot reach, grids that do not fit a
    /// weight, weights that carry something already, Fisher samples that no batch is large enough for or that
    /// do not fit into memory, and a forward pass that a later stage cannot record.
    pub(crate) fn check(&self, model: &M) -> Result<(), RecipeError> {
        let paths = paths(model);
        if let Some(shrink) = &self.recipe.shrink {
            Check("shrink").found(&shrink.exclude, &paths)?;
            if self.recipe.train.is_some() {
                self.check_shrink(shrink, model)?;
            }
        }
        for (index, plan) in self.recipe.quantize.iter().enumerate() {
            let mut plan = plan.clone();
            if self.recipe.shrink.is_some() {
                // What it divides then is not known yet.
                plan.block = None;
            } else {
                plan.check_memory(&format!("quantize[{index}]"), model)?;
            }
            plan.check(&format!("quantize[{index}]"), model)?;
        }
        if self.recipe.shrink.is_none() {
            // Shrinking folds masks in, and refuses all else.
            self.check_carried(model)?;
        }
        self.check_forward(model)?;
        let Some(plan) = &self.recipe.prune else {
            return Ok(());
        };
        let check = Check("prune");
        check.found(&plan.exclude, &paths)?;
        let pattern = match self.recipe.shrink {
            None => plan.sparsity.pattern(),
            // What it divides then is not known yet.
            Some(_) => SparsityPattern::Unstructured,
        };
        plan.check(model, &pattern)?;
        let Some(size) = plan.batch_size else {
            return Ok(());
        };
        let mut largest = None;
        for (inputs, _) in self.batches(prune::KEY, 0) {
            let examples = inputs.examples();
            if examples >= size {
                return Ok(());
            }
            // The last one is often smaller than the others.
            largest = largest.max(Some(examples));
        }
        let Some(largest) = largest else {
            return Err(RecipeError::NoBatch { stage: plan.name() });
        };
        let expected = format!("at most {largest}, the examples in a batch of the loader");
        check.refuse("batch_size", size, expected)
    }
}

impl<M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, '_, '_, M, I, T, O> {
    /// Refuses what a model carries where stages attach reparameterizations of their own, or fold.
    fn check_carried(&self, model: &M) -> Result<(), RecipeError> {
        let carried = attached(model);
        if carried.is_empty() {
            return Ok(());
        }
        if let Some(prune) = &self.recipe.prune {
            prune.check_carried(model, &carried)?;
        }
        for (index, plan) in self.recipe.quantize.iter().enumerate() {
            let stage = format!("quantize[{index}]");
            plan.check_carried(&stage, model)?;
            self.folded(plan, model).map_err(|error| error.at(&stage))?;
        }
        Ok(())
    }

    /// Refuses a forward pass that stages after the training have to record and that cannot be.
    fn check_forward(&self, model: &M) -> Result<(), RecipeError> {
        let forward = |model: &M, inputs: I| (self.task.forward)(model, inputs);
        let layerwise =
            |plan: &PruneStage| (plan.method == PruneMethod::Layerwise).then(|| plan.name());
        let folds = |plan: &QuantizeStage| plan.fold.then(|| plan.name());
        let stage = self.recipe.prune.iter().find_map(layerwise);
        let stage = stage.or_else(|| self.recipe.quantize.iter().find_map(folds));
        let written = match self.recipe.export.contains(&Format::Onnx) {
            true => Some("export".to_string()),
            #[cfg(feature = "engine")]
            false if self.run.latency == Latency::Engine => Some("latency".to_string()),
            false => None,
        };
        if let Some(stage) = &written {
            let at = |error: RecipeError| error.at(stage);
            let export = Export::record(&model.valid(), &self.example()?, forward);
            let exported = export.and_then(|export| export.to_onnx(Form::Float));
            return exported.map(drop).map_err(RecipeError::from).map_err(at);
        }
        let Some(stage) = stage else { return Ok(()) };
        let recorded = record(&model.valid(), &self.example()?, forward);
        let recorded = recorded
            .map_err(QuantError::from)
            .map_err(RecipeError::from);
        recorded.map(drop).map_err(|error| error.at(&stage))
    }
}

/// The paths of the float tensors of a model.
pub(super) fn paths<M: Module>(model: &M) -> Vec<String> {
    let mut paths = Vec::new();
    each_plain_float(model, |at, _| paths.push(at.path()));
    paths
}
