//! The stage that makes layers smaller, and trains what is left.

use burn::module::Module;
use burn::store::ModuleRecord;
use burn_lean_prune::load_shrunk;

use super::StageOutcome;
use super::check::paths;
use super::session::{Examples, Outputs, Session, Shipped, own};
use crate::state::Kept;
use crate::tensors::on_device;
use crate::{RecipeError, ShrinkStage};

const KEY: &str = "1-shrink";
/// The part of the stage that cuts.
const CUT: &str = "1-shrink-cut";

impl<M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, '_, '_, M, I, T, O> {
    pub(crate) fn shrink(
        &self,
        plan: &ShrinkStage,
        dense: &M,
    ) -> Result<StageOutcome<M>, RecipeError> {
        let name = plan.name();
        let load = |record: ModuleRecord| {
            let mut small = load_shrunk(own(dense), record)?;
            if let Some(resize) = &self.task.resize {
                resize(&mut small);
            }
            Ok(small)
        };
        self.stage(
            KEY,
            &name,
            load,
            || {
                let small = match self.state.finished(CUT)? {
                    Some((record, _)) => load(record)?,
                    None => self.cut(plan, dense)?,
                };
                match &plan.tune {
                    Some(tune) => self.trained(KEY, &name, tune, small, Some(dense)),
                    None => Ok(small),
                }
            },
            Shipped::dense,
        )
    }

    /// Refuses a share that is out of reach: that depends on shapes, which training leaves as they are.
    pub(crate) fn check_shrink(&self, plan: &ShrinkStage, model: &M) -> Result<(), RecipeError> {
        self.smaller(plan, model)
            .map(|_| ())
            .map_err(|error| error.at(&plan.name()))
    }

    fn cut(&self, plan: &ShrinkStage, dense: &M) -> Result<M, RecipeError> {
        let start = std::time::Instant::now();
        let small = self.smaller(plan, dense)?;
        // Training goes on from checkpoints of this very model.
        let kept = Kept {
            row: None,
            masks: None,
            seconds: start.elapsed().as_secs_f64(),
            latency: String::new(),
        };
        self.state.keep(CUT, &small, kept, || Ok(()))?;
        Ok(small)
    }

    fn smaller(&self, plan: &ShrinkStage, dense: &M) -> Result<M, RecipeError> {
        let forward = |model: &M, inputs: I| (self.task.forward)(model, inputs);
        let batch = self
            .inputs(KEY)
            .next()
            .ok_or(RecipeError::NoBatch { stage: plan.name() })?;
        let batch = on_device(&batch, &self.inner);
        let shrink = plan.shrink(&paths(dense));
        let shrunk = match &self.task.resize {
            Some(resize) => shrink.shrink_resizing(own(dense), forward, batch, resize),
            None => shrink.shrink(own(dense), forward, batch),
        };
        Ok(shrunk?.model)
    }
}
