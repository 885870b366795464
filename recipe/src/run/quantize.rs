//! A stage that quantizes and converts.

use burn::module::Module;
use burn_lean_prune::{Masks, SparseRecord};
use burn_lean_quant::deploy::{ConvertedWeight, Outcome};
use burn_lean_quant::{
    ConvertConfig, QuantizedForward, Unsupported, fold_for, rounding::set_weight_qparams,
};
use burn_lean_reparam::{ChainReparameterizer, attach};

use super::StageOutcome;
use super::rounded::rounded;
use super::session::{Examples, Outputs, Session, Shipped, after, load, own, seed_device, slug};
use crate::joint::scales;
use crate::tensors::on_device;
use crate::{QuantizeStage, RecipeError, RoundingMethod};

/// What the examples of Fisher samples are drawn by.
const FISHER: &str = "2-fisher";

/// What a quantized model comes from.
pub(crate) struct Source<'m, M> {
    /// The model to quantize: dense, shrunk or pruned.
    pub(crate) model: &'m M,
    pub(crate) masks: Option<&'m Masks>,
    /// What the run began with, trained: the teacher.
    pub(crate) dense: &'m M,
    /// What has been done to the model, where it is smaller than that.
    pub(crate) done: Option<&'m str>,
}

impl<M: Module, I: Examples, T: Examples, O: Outputs> Session<'_, '_, '_, M, I, T, O> {
    pub(crate) fn quantize(
        &self,
        plan: &QuantizeStage,
        source: &Source<'_, M>,
    ) -> Result<StageOutcome<M>, RecipeError> {
        let name = after(source.done, plan.name());
        let key = format!("2-{}", slug(&plan.name()));
        let outcome = self.stage(
            &key,
            &name,
            |record| {
                let folded = self.folded(plan, source.model)?;
                load(self.prepared(plan, folded, source.masks)?, record)
            },
            || {
                let folded = self.folded(plan, source.model)?;
                match &plan.train {
                    Some(train) => {
                        let prepared = self.prepared(plan, folded, source.masks)?;
                        self.trained(&key, &name, train, prepared, Some(source.dense))
                    }
                    None => self.calibrated(&key, plan, folded),
                }
            },
            |model| {
                let (model, report) = ConvertConfig::new()
                    .with_unsupported(Unsupported::KeepFakeQuantized)
                    .convert(model)?;
                warn_of_floats(&name, &report.weights);
                let model = match (&plan.train, source.masks) {
                    // Behind its mask such a float is as it was trained.
                    (Some(_), Some(_)) => rounded(model, &report.weights)?,
                    _ => model,
                };
                let file = SparseRecord::from_module(&model.valid())?.to_bytes()?;
                Ok(Shipped { model, file })
            },
        )?;
        Ok(StageOutcome {
            folded: plan.fold,
            ..outcome
        })
    }

    /// A copy with its batch normalizations folded, where the recipe says so.
    pub(super) fn folded(&self, plan: &QuantizeStage, model: &M) -> Result<M, RecipeError> {
        let model = own(model);
        if !plan.fold {
            return Ok(model);
        }
        Ok(fold_for(model, self.example()?, |model, inputs| {
            (self.task.forward)(model, inputs)
        })?)
    }

    /// With masks and quantizers on its weights, one after the other.
    fn prepared(
        &self,
        plan: &QuantizeStage,
        model: M,
        masks: Option<&Masks>,
    ) -> Result<M, RecipeError> {
        match (&plan.train, masks) {
            (None, _) | (Some(_), None) => Ok(plan.config().prepare(model)?),
            (Some(_), Some(masks)) => {
                let masks = masks.reparameterizer(&model)?;
                let quantizers = plan.qat().reparameterizer(&model)?;
                Ok(attach(model, ChainReparameterizer::new(masks, quantizers))?)
            }
        }
    }

    fn calibrated(&self, key: &str, plan: &QuantizeStage, model: M) -> Result<M, RecipeError> {
        seed_device(self, key);
        let (model, scales) = match plan.rounding {
            RoundingMethod::Fisher => {
                let joint = plan.joint(&model)?;
                let loss = |model: &M, batch: &(I, T)| self.loss(model, batch);
                let loader = |stage| self.examples(FISHER, stage, 1);
                let outcome = joint.compress(model, loss, loader)?;
                (outcome.pruned.model, Some(scales(&outcome.rounded)))
            }
            _ => (model, None),
        };
        let quantized = QuantizedForward::new();
        let batches = || {
            let inputs = self.inputs(key).take(plan.calibration_batches());
            inputs.map(|inputs| on_device(&inputs, &self.inner))
        };
        let (model, _) = plan.ptq().quantize(model, batches, |model, inputs| {
            quantized.run(model, inputs, |model, inputs| {
                (self.task.forward)(model, inputs)
            })
        })?;
        match scales {
            // Rounded weights lie on a grid of their own.
            Some(scales) => Ok(set_weight_qparams(model, &scales)?),
            None => Ok(model),
        }
    }
}

/// The record of such a weight is no smaller than before.
fn warn_of_floats(stage: &str, weights: &[ConvertedWeight]) {
    for weight in weights {
        if let Outcome::KeptFakeQuantized { reason } = &weight.outcome {
            let path = &weight.path;
            tracing::warn!(stage, path, reason, "stays a float in the record");
        }
    }
}
