//! The stage that prunes and trains with the zeros held.

use burn::module::Module;
use burn_lean_prune::{Masks, PruneError, SparseRecord, layerwise};

use super::session::{Examples, Outputs, Session, Shipped, after, load, own, seed_device};
use super::train::Trainer;
use super::{Progress, StageOutcome};
use crate::state::Kept;
use crate::{PruneMethod, PruneStage, RecipeError};

pub(super) const KEY: &str = "1-prune";
/// The part of the stage that chooses the zeros.
const SOLVED: &str = "1-prune-solved";

impl<M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, '_, '_, M, I, T, O> {
    /// The pruned model, and its masks. A fine-tuned one may learn from `teacher`; `done` is what has been
    /// done to `dense`, where that is smaller already.
    pub(crate) fn prune(
        &self,
        plan: &PruneStage,
        dense: &M,
        teacher: &M,
        done: Option<&str>,
    ) -> Result<(StageOutcome<M>, Masks), RecipeError> {
        let name = after(done, plan.name());
        let (outcome, masks) = self.stage_with_masks(
            KEY,
            &name,
            |record| load(own(dense), record),
            || {
                let (model, masks) = self.solved(plan, dense, teacher, &name)?;
                let model = match &plan.tune {
                    Some(tune) if plan.method != PruneMethod::Gradual => {
                        let masked = masks.attach(own(&model))?;
                        let model = self.trained(KEY, &name, tune, masked, Some(teacher))?;
                        model.materialize()
                    }
                    _ => model,
                };
                Ok((model, Some(masks)))
            },
            |model| {
                let file = SparseRecord::from_module(&model.valid())?.to_bytes()?;
                Ok(Shipped { model, file })
            },
        )?;
        let masks = masks.ok_or_else(|| self.state.lacks(KEY, "masks"))?;
        Ok((outcome, masks))
    }

    /// The model with zeros, before it is trained (of `gradual`: at the end), and where they are.
    fn solved(
        &self,
        plan: &PruneStage,
        dense: &M,
        teacher: &M,
        name: &str,
    ) -> Result<(M, Masks), RecipeError> {
        if let Some((record, kept)) = self.state.finished(SOLVED)?
            && let Some(masks) = kept.masks
        {
            return Ok((load(own(dense), record)?, masks));
        }
        let start = std::time::Instant::now();
        seed_device(self, KEY);
        let (model, masks) = self.solve(plan, dense, teacher, name)?;
        let kept = Kept {
            row: None,
            masks: Some(masks.clone()),
            seconds: start.elapsed().as_secs_f64(),
            latency: String::new(),
        };
        self.state.keep(SOLVED, &model, kept, || {
            self.listener().tell(&Progress::Keeping {
                stage: name.to_string(),
            })
        })?;
        Ok((model, masks))
    }

    fn solve(
        &self,
        plan: &PruneStage,
        dense: &M,
        teacher: &M,
        name: &str,
    ) -> Result<(M, Masks), RecipeError> {
        // A group has to fit the pattern: without what that does not divide.
        let selection = PruneStage::selection(dense, &plan.sparsity.pattern())?;
        if plan.method == PruneMethod::Layerwise {
            let pruner = plan.pruner(&selection);
            // Where the task says which outputs are logits, these alone are compared.
            let logits = self.task.logits.as_ref();
            let logits = logits.filter(|_| pruner.outputs == layerwise::Outputs::Logits);
            let forward = |model: &M, inputs: I| {
                let outputs = (self.task.forward)(model, inputs);
                match logits {
                    Some(logits) => (Some(logits(&outputs)), None),
                    None => (None, Some(outputs)),
                }
            };
            let wanted = pruner.examples + pruner.held_out;
            let mut seen = 0;
            let inputs = self.inputs(KEY).take_while(|inputs| {
                let needed = seen < wanted;
                seen += inputs.examples();
                needed
            });
            let pruned = pruner.prune(own(dense), forward, inputs)?;
            return Ok((pruned.model, pruned.masks));
        }
        let loss = |model: &M, batch: &(I, T)| self.loss(model, batch);
        let least = plan.batch_size.unwrap_or(1);
        let loader = |stage: u64| self.examples(KEY, stage, least);
        let (state, folder) = (self.state.solver(KEY), self.state.scratch());
        if plan.method == PruneMethod::Chita {
            let config = plan.chita(&selection, 0, folder).with_state(state);
            let pruned = config.prune(own(dense), loss, loader)?;
            return Ok((pruned.model, pruned.masks));
        }
        let Some(tune) = &plan.tune else {
            return Err(PruneError::Training {
                reason: "the recipe does not say how".into(),
            }
            .into());
        };
        let mut gradual = plan.gradual(&selection, 0, folder, tune);
        gradual.pruner = gradual.pruner.with_state(state);
        let mut trainer = Trainer::new(self, KEY, name, tune, Some(teacher))?;
        let mut failed = None;
        let pruned = gradual.prune(own(dense), loss, loader, |model, epoch| {
            // Each stage has numbers of its own.
            let first = (epoch.stage as u64) << 16;
            let number = first + epoch.epoch as u64;
            let of = (epoch.epoch, epoch.epochs);
            let given = model.clone();
            let trained = match epoch.restart {
                true => trainer.begin(model, first..first + epoch.epochs as u64),
                false => Ok(model),
            };
            let trained = trained
                .and_then(|model| trainer.epoch(model, number, of, |t| epoch.learning_rate(t)));
            trained.map_err(|error| {
                let rejected = PruneError::training(given, &error);
                failed = Some(error);
                rejected
            })
        });
        match (pruned, failed) {
            (Ok(pruned), _) => Ok((pruned.model, pruned.masks)),
            (Err(_), Some(error)) => Err(error),
            (Err(rejected), None) => Err(rejected.into()),
        }
    }
}
