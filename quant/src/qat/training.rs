//! What happens to the quantizers of a model between forward passes.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_lean_graph::hooks::warn_of_step;
use burn_lean_reparam::{FloatVisitor, Rejected, visit_plain_floats};

use crate::model::batch_norm::apply_schedule;
use crate::model::unobserved::{LeftFloat, Unobserved, leave_float};
use crate::module::effective::Effective;
use crate::module::outcome::RunOutcome;
use crate::module::walk::{Located, Site, map_quantizers, quantizers, replace};
use crate::{FakeQuantize, QuantError, Schedule};

/// Moves the model's quantizers on by one training step, and freezes BatchNorm statistics when
/// their step has come.
///
/// Call it once after each step of the optimizer, in a loop or in a callback, where none of these counts the steps by
/// itself: `GradScaler::step`, `GradScaler::apply` and `Amp` of `burn-lean-amp`, for the steps that they take, and
/// [`QuantizedForward::run`](crate::QuantizedForward::run). After one of them it counts no step twice, and does the
/// rest: BatchNorms are frozen by it alone where a forward pass is not recorded. Call it in every step or in none: the
/// first call after steps that were counted without it takes the last of them for its own. Computes nothing on the
/// device, but for learned scales of weights that only replicas of the model began: here they begin, too, with
/// the weights as they are.
///
/// After the first step it warns (by `tracing`) of quantizers of activations that no value came by,
/// whose layers are called past them, and would stay float. After it, and after the first step that quantizes, it
/// warns of those that values came by, but that have no range, or no scale to learn: replicas on several devices
/// keep what they observe. `GradScaler` and `Amp` warn of the same.
pub fn advance<M: Module>(model: M) -> M {
    let model = with_weights_begun(model);
    let mut said = Vec::new();
    let model = map_quantizers(model, |located| {
        let quantizer = located.quantizer;
        if !quantizer.is_counted()
            && let Some(message) = quantizer.step_warning(true)
        {
            said.push((message, located.path));
        }
        quantizer.advanced()
    });
    warn_of_step(said);
    apply_schedule(model)
}

/// The model whose weights have the learned scales that they were to have in the step that is over: Burn's
/// strategy for several devices makes replicas anew in each step, which begin and are dropped.
fn with_weights_begun<M: Module>(model: M) -> M {
    let waiting = quantizers(&model).into_iter().filter_map(|located| {
        let waits = located.site == Site::Weight && located.quantizer.waits_to_learn();
        Some((located.parameter.clone().filter(|_| waits)?, located))
    });
    let waiting: HashMap<String, Located> = waiting.collect();
    if waiting.is_empty() {
        return model;
    }
    let mut weights = Weights {
        given: Effective::of(&model),
        waiting,
        begun: HashMap::new(),
    };
    visit_plain_floats(&model, &mut weights);
    replace(model, weights.begun)
}

/// Begins learned scales of weights.
struct Weights {
    given: Effective,
    /// By path of the weight.
    waiting: HashMap<String, Located>,
    /// By path of the quantizer.
    begun: HashMap<String, FakeQuantize>,
}

impl FloatVisitor for Weights {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let base = param.base();
        if !base.is_autodiff() || !base.dtype().is_float() {
            return;
        }
        if let Some(Located {
            path: of_quantizer,
            quantizer,
            ..
        }) = self.waiting.remove(path)
            && matches!(quantizer.begin(&self.given.given(path, base)), Ok(true))
        {
            self.begun.insert(of_quantizer, quantizer);
        }
    }
}

/// The model with another schedule, in step 0.
///
/// BatchNorms that the last schedule froze stay frozen; those of a model that was prepared anew are
/// not.
///
/// # Errors
///
/// [`QuantError::InvalidConfig`] if it contradicts itself, [`QuantError::NotPrepared`] if the
/// model has no quantizers. The model comes back in the error.
pub fn set_schedule<M: Module>(model: M, schedule: Schedule) -> Result<M, Rejected<M, QuantError>> {
    if let Err(error) = schedule.validate() {
        return Err(Rejected::new(model, error));
    }
    if quantizers(&model).is_empty() {
        return Err(Rejected::new(model, QuantError::NotPrepared));
    }
    Ok(map_quantizers(model, |located| {
        located.quantizer.with_schedule(schedule)
    }))
}

/// The model with the ranges that its quantizers observe while `run` calls it.
///
/// `run` gets a copy as it is after training ([`valid`](Module::valid)): batch normalization uses
/// its running statistics and leaves them as they are, dropout does nothing, whatever device the
/// batches are on. Nothing is quantized. What clones of that copy observe counts, too, on any thread.
///
/// What was observed before is forgotten, and learned scales start anew from the new ranges.
/// Quantizers that are switched off take no part.
///
/// # Errors
///
/// The model comes back in the error, as it was: [`QuantError::NotPrepared`] without quantizers;
/// for each quantizer that has no useful range, why, with its path (of several as
/// [`QuantError::Several`]): nothing was observed, or values that are not finite, or one value only.
pub fn calibrate<M: Module, R: RunOutcome>(
    model: M,
    run: impl FnOnce(&M) -> R,
) -> Result<M, Rejected<M, QuantError>> {
    observed(model, |_| true, run)
}

/// As [`calibrate`], for those quantizers only that have no range yet.
///
/// The others keep what they observed and learned, and quantize meanwhile; so do those that take the
/// range of the values at hand. For a model in which some layers were called past their quantizers while
/// it was trained: correct the calls, give those quantizers their ranges, and convert; nothing has to be
/// trained again.
///
/// # Errors
///
/// As [`calibrate`].
pub fn calibrate_unobserved<M: Module, R: RunOutcome>(
    model: M,
    run: impl FnOnce(&M) -> R,
) -> Result<M, Rejected<M, QuantError>> {
    let lacks_one = |quantizer: &FakeQuantize| quantizer.keeps_range() && !quantizer.has_range();
    observed(model, lacks_one, run)
}

fn observed<M: Module, R: RunOutcome>(
    model: M,
    chosen: impl Fn(&FakeQuantize) -> bool,
    run: impl FnOnce(&M) -> R,
) -> Result<M, Rejected<M, QuantError>> {
    let (unobserved, weights) = (Unobserved::Refuse, WeightRanges::Observed);
    match calibrated(&model, chosen, unobserved, weights, run) {
        Ok((calibrated, _)) => Ok(calibrated),
        Err(error) => Err(Rejected::new(model, error)),
    }
}

/// Where the ranges of weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightRanges {
    /// From what came by.
    Observed,
    /// From their values, after the calibration: it does not matter whether they came by.
    OfValues,
}

/// A calibrated copy of `model`, and what was left float of it.
pub(crate) fn calibrated<M: Module, R: RunOutcome>(
    model: &M,
    chosen: impl Fn(&FakeQuantize) -> bool,
    unobserved: Unobserved,
    weights: WeightRanges,
    run: impl FnOnce(&M) -> R,
) -> Result<(M, Vec<LeftFloat>), QuantError> {
    if quantizers(model).is_empty() {
        return Err(QuantError::NotPrepared);
    }
    // A clone would share its running statistics with `model`, and change them on an autodiff device.
    let calibrating = map_quantizers(model.valid(), |located| match chosen(&located.quantizer) {
        true => located.quantizer.calibrating(),
        false => located.quantizer,
    });
    run(&calibrating).outcome()?;
    let mut calibrated = HashMap::new();
    let mut without_range = Vec::new();
    for (located, observed) in quantizers(model).into_iter().zip(quantizers(&calibrating)) {
        if !chosen(&located.quantizer) {
            continue;
        }
        let checked = observed.quantizer.calibrated().and_then(|quantizer| {
            if !quantizer.is_enabled() || !quantizer.keeps_range() {
                return Ok(quantizer);
            }
            if !quantizer.config().observer.has_memory() {
                // Its learned scale started from the values themselves.
                return quantizer.check_finite().map(|()| quantizer);
            }
            let first = quantizer.qparams()?;
            Ok(quantizer.settled().started(first))
        });
        match checked {
            Ok(quantizer) => {
                let quantizer = located.quantizer.with_state_of(&quantizer);
                calibrated.insert(located.path, quantizer);
            }
            Err(_) if located.site == Site::Weight && weights == WeightRanges::OfValues => {}
            Err(error) => without_range.push((located, error)),
        };
    }
    let left = unobserved.judge(without_range)?;
    let model = replace(model.clone(), calibrated);
    Ok((leave_float(model, &left), left))
}

/// The model with the ranges that its replicas observed.
///
/// Replicas on other devices observe for themselves, each its share of a batch. This takes the
/// widest of their ranges, or the mean of moving averages. A replica counts if it observed; the
/// model's own range is replaced, but not scales that a weight was
/// [given](crate::rounding::set_weight_qparams).
///
/// Burn's learner makes its replicas itself, anew in each step of a multi-device training, and
/// drops what they observed: [`calibrate`] the model before, and freeze its observers from step 0
/// on. In distributed training each replica observes its own share, as in PyTorch, and begins to learn scales of
/// activations from it: calibrate before where they are to be the same.
///
/// # Errors
///
/// [`QuantError::OtherQuantizers`] if a replica has quantizers at other paths. The model comes
/// back in the error.
pub fn merge_observers<M: Module>(model: M, replicas: &[M]) -> Result<M, Rejected<M, QuantError>> {
    let mut seen: HashMap<String, Vec<_>> = HashMap::new();
    for located in replicas.iter().flat_map(quantizers) {
        let of_path = seen.entry(located.path).or_default();
        of_path.push(located.quantizer);
    }
    let mut merged = HashMap::new();
    for located in quantizers(&model) {
        let others = seen.remove(&located.path).unwrap_or_default();
        let outcome = match others.len() == replicas.len() {
            true => located.quantizer.merged(&others),
            false => Err(QuantError::OtherQuantizers {
                path: located.path.clone(),
            }),
        };
        match outcome {
            Ok(quantizer) => merged.insert(located.path, quantizer),
            Err(error) => return Err(Rejected::new(model, error)),
        };
    }
    if let Some(path) = seen.into_keys().min() {
        return Err(Rejected::new(model, QuantError::OtherQuantizers { path }));
    }
    Ok(replace(model, merged))
}
