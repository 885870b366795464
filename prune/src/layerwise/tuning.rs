//! Values tuned together: gradients of the distance from the dense network's outputs, no labels.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::Instant;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_lean_graph::Tensors;
use burn_lean_reparam::{each_float, join_copies, map_with_path};

use crate::host::{bar, read};
use crate::layerwise::candidates::{Divergences, logits};
use crate::layerwise::division::{Part, first_dimension, rows};
use crate::statistics::batch_norm::OnlyBatchNormTrains;
use crate::{Masks, PruneError, Selection, layerwise::Candidate};

/// The highest learning rate of AdamW, as a share of the root mean square of the kept weights.
const RATE: f64 = 0.01;

/// One of so many passes belongs to a trial, which says whether the others would help.
const TRIAL: usize = 4;
/// Steps that a trial needs to say anything.
const TRIAL_STEPS: usize = 24;

/// What [`Tuning::tune`] needs to know.
pub(crate) struct Tuning<'a> {
    pub(crate) selection: &'a Selection,
    pub(crate) masks: &'a Masks,
    /// Whether running statistics of BatchNorm follow.
    pub(crate) recalibrate: bool,
    /// BatchNorm layers that do no more than shift: they have none.
    pub(crate) folded: &'a HashSet<String>,
    /// Parameters that may change; `None` for all.
    pub(crate) only: Option<Vec<ParamId>>,
    /// Passes over the examples.
    pub(crate) passes: usize,
    /// Whether a bar is shown.
    pub(crate) progress: bool,
    /// When to stop.
    pub(crate) deadline: Option<Instant>,
    /// The steps of a pass: a batch, and which of its examples; see [`steps`](super::division::steps).
    pub(crate) steps: Vec<(usize, Range<usize>)>,
}

impl Tuning<'_> {
    /// A copy of `model` after all passes, with how it is judged; after a quarter of them where it is
    /// behind `before` then by more than a standard error. And the number of steps that were taken.
    ///
    /// The trial is a whole course of its own, its last steps as small as any: a course that is cut off
    /// would say nothing, since its rate is still high there.
    pub(crate) fn tune_while_it_helps<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: &M,
        forward: &impl Fn(&M, I) -> O,
        batches: &[I],
        dense: &[Tensor<2>],
        before: &Divergences,
        mut judge: impl FnMut(M) -> Result<(M, Divergences), PruneError>,
    ) -> Result<((M, Divergences), usize), PruneError> {
        let trial = self.passes.div_ceil(TRIAL);
        let trial = trial.max(TRIAL_STEPS.div_ceil(self.steps.len().max(1)));
        // One that takes half of all passes saves too little.
        let trial = if 2 * trial < self.passes {
            trial
        } else {
            self.passes
        };
        let (tuned, mut steps) = self.tune(trial, model, forward, batches, dense)?;
        let first = judge(tuned)?;
        let (behind, error) = before.behind(&first.1);
        if trial == self.passes || behind > error || self.is_late() {
            return Ok((first, steps));
        }
        let rest = self.passes - trial;
        let (tuned, taken) = self.tune(rest, &first.0, forward, batches, dense)?;
        steps += taken;
        let last = judge(tuned)?;
        let best = match last.1.are_below(&first.1) {
            true => last,
            false => first,
        };
        Ok((best, steps))
    }

    fn is_late(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// A copy of `model`, tuned in so many passes over `batches` towards the dense network's outputs for
    /// them, and the number of steps that were taken.
    ///
    /// The loss is the squared distance of the outputs: their divergence is near zero for examples that
    /// the dense network is sure of, most of those that it was trained on, and follows the few others.
    /// BatchNorm works on the statistics of the batch.
    fn tune<M: Module, I: Tensors, O: Tensors>(
        &self,
        passes: usize,
        model: &M,
        forward: &impl Fn(&M, I) -> O,
        batches: &[I],
        dense: &[Tensor<2>],
    ) -> Result<(M, usize), PruneError> {
        let rate = RATE * self.typical_weight(model)?;
        let mut trains = OnlyBatchNormTrains {
            except: self.folded.clone(),
            none: !self.recalibrate,
        };
        // Burn shares running statistics between clones, and copies them here.
        let copy = map_with_path(model.valid(), &mut trains);
        let attached = self.masks.attach(copy);
        let attached = attached.map_err(|rejected| rejected.into_error())?;
        let mut student = join_copies(attached.train());
        let (mut trainable, mut half) = (false, false);
        each_float(&student, |_, float| {
            trainable |= float.is_require_grad();
            half |= float.is_require_grad() && matches!(float.dtype(), DType::F16 | DType::BF16);
        });
        if !trainable || half {
            // The caller's network is frozen, or an optimizer's squares and epsilon would underflow.
            return Ok((model.valid(), 0));
        }
        let mut optimizer = AdamWConfig::new()
            .with_weight_decay(0.0)
            .with_epsilon(1e-8)
            .init();
        let parts = &self.steps;
        let steps = parts.len() * passes;
        let bar = bar(Candidate::Tuned.name(), steps, self.progress);
        let mut done = 0;
        for pass in 0..passes {
            // Parts of other batches follow each other, in another order in each pass.
            for at in 0..parts.len() {
                if self.is_late() {
                    break;
                }
                let (batch, examples) = &parts[(at * stride(parts.len()) + pass) % parts.len()];
                let inputs = &batches[*batch];
                let all = first_dimension(inputs).unwrap_or(examples.end);
                let whole = *examples == (0..all);
                let inputs = inputs.map_tensors(&mut Part {
                    examples: (!whole).then(|| examples.clone()),
                    trains: true,
                });
                let outputs = logits(&forward(&student, inputs))?;
                let target = rows(&dense[*batch], examples, all);
                let loss = distance(target, outputs);
                if !loss.is_tracked() {
                    // What trains is not what the forward pass reads.
                    return Ok((model.valid(), 0));
                }
                let mut gradients = loss.backward();
                let gradients = match &self.only {
                    Some(ids) => GradientsParams::from_params(&mut gradients, &student, ids),
                    None => GradientsParams::from_grads(gradients, &student),
                };
                // Up in the first tenth, then down along half a cosine.
                let progress = (done as f64 + 0.5) / steps as f64;
                let up = (progress / 0.1).min(1.0);
                let down = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
                student = join_copies(optimizer.step(rate * up * down, student, gradients));
                done += 1;
                bar.inc(1);
            }
        }
        let mut values = Values::default();
        student.valid().materialize().visit(&mut values);
        Ok((model.valid().map(&mut values), done))
    }

    /// The root mean square of the weights that are kept, over all layers.
    fn typical_weight<M: Module>(&self, model: &M) -> Result<f64, PruneError> {
        let weights = read(self.selection.flatten(model)?)?;
        let squares: f64 = weights.iter().map(|w| f64::from(*w).powi(2)).sum();
        Ok((squares / self.masks.nonzeros().max(1) as f64).sqrt())
    }
}

/// A step through the parts that has no factor with their number.
fn stride(count: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (count / 3..count.max(1))
        .find(|step| *step > 0 && gcd(*step, count) == 1)
        .unwrap_or(1)
}

/// Half the squared distance, the mean over all outputs; between equal ones, also infinite, there is none.
fn distance(dense: Tensor<2>, pruned: Tensor<2>) -> Tensor<1> {
    let in_f32 = |tensor: Tensor<2>| match tensor.dtype() {
        DType::F32 => tensor,
        _ => tensor.cast(FloatDType::F32),
    };
    let (dense, pruned) = (in_f32(dense).autodiff(), in_f32(pruned));
    let equal = pruned.clone().equal(dense.clone());
    (pruned - dense).mask_fill(equal, 0.0).square().mean() * 0.5
}

/// Values of float parameters, from one model into another.
#[derive(Default)]
pub(crate) struct Values(HashMap<ParamId, Tensor<1>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let count = value.shape().num_elements();
        // Burn's `reshape` takes an extent of 0 for the old one.
        if count > 0 {
            self.0.insert(param.id, value.reshape([count]));
        }
    }
}

impl ModuleMapper for Values {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.get(&param.id) {
            Some(value) => param.map(|old| value.clone().reshape(old.shape())),
            None => param,
        }
    }
}
