//! What a run refuses of a model and its data before anything is computed.

use burn::module::Module;
use burn_lean_prune::SparsityPattern;
use burn_lean_reparam::each_plain_float;

use super::prune;
use super::session::{Examples, Outputs, Session};
use crate::RecipeError;
use crate::check::Check;

impl<M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, '_, '_, M, I, T, O> {
    /// Refuses paths that no parameter has, a share that shrinking cannot reach, grids that do not fit a
    /// weight, and Fisher samples that no batch is large enough for.
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
            }
            plan.check(&format!("quantize[{index}]"), model)?;
        }
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

/// The paths of the float tensors of a model.
pub(super) fn paths<M: Module>(model: &M) -> Vec<String> {
    let mut paths = Vec::new();
    each_plain_float(model, |at, _| paths.push(at.path()));
    paths
}
