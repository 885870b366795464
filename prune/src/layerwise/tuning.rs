//! Values tuned together: gradients of the distance from the dense network's outputs, no labels.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::Instant;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_lean_graph::Tensors;
use burn_lean_reparam::{each_float, join_copies, map_with_path};

use crate::host::{bar, read};
use crate::layerwise::contest::{Best, Contest};
use crate::layerwise::divergences::{Divergences, Measure};
use crate::layerwise::division::{self, Part, first_dimension};
use crate::layerwise::given::{Given, outputs};
use crate::layerwise::shares::Shared;
use crate::layerwise::{Candidate, Outputs};
use crate::statistics::batch_norm::OnlyBatchNormTrains;
use crate::{Masks, PruneError};

/// The highest learning rate of AdamW, as a share of the root mean square of the kept weights.
const RATE: f64 = 0.01;

/// One of so many passes belongs to a trial, which says whether the others would help.
const TRIAL: usize = 4;
/// Steps that a trial needs to say anything.
const TRIAL_STEPS: usize = 24;
/// Nats from the dense network from which on their divergence is tried as the loss, too.
const FAR: f64 = 0.1;

/// What [`Tuning::tune`] needs to know.
struct Tuning<'a, M, I, O> {
    contest: &'a Contest<'a, M, I, O>,
    masks: &'a Masks,
    /// Parameters that may change; `None` for all.
    only: Option<Vec<ParamId>>,
    /// Passes over the examples.
    passes: usize,
    /// Outputs of the dense network.
    dense: &'a [Given],
    /// Paths of the BatchNorm layers that keep their statistics.
    still: &'a HashSet<String>,
    /// The steps of a pass: a batch, and which of its examples; see [`division::steps`].
    steps: Vec<(usize, Range<usize>)>,
}

/// What is made small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Half the squared distance of the outputs. Their divergence is near zero for examples that the dense
    /// network is sure of, most of those that it was trained on, and follows the few others.
    Distance,
    /// The divergence of the outputs' distributions: of a network that is far from the dense one, logits are too
    /// much to ask for.
    Divergence,
}

impl<M: Module, I: Tensors, O: Tensors> Contest<'_, M, I, O> {
    /// Tunes the values of the best candidate in so many passes, and keeps them where they diverge less; the
    /// number of steps that were taken.
    pub(crate) fn tune(
        &self,
        best: &mut Best<M>,
        masks: &Masks,
        shared: &Shared,
        passes: usize,
    ) -> Result<usize, PruneError> {
        if passes == 0 || self.is_late() {
            return Ok(0);
        }
        let begun = Instant::now();
        let (calibration, all) = (self.calibration, self.calibration.all());
        let fitted = calibration.to_fit();
        let tuning = Tuning {
            contest: self,
            masks,
            only: (self.pruner.group.as_ref()).map(|_| self.selection.ids().to_vec()),
            passes,
            dense: &best.outputs,
            still: &best.still,
            steps: division::steps(
                &calibration.dense,
                &calibration.forward,
                fitted,
                &best.outputs,
            ),
        };
        let judge = |tuned: M| {
            let walk = calibration.walk(&tuned, &all)?;
            let setting = self.setting(&shared.kept, &all);
            setting.settle(tuned, walk, &best.outputs)
        };
        let ((tuned, divergences), steps) =
            tuning.tune_while_it_helps(&best.attempt.model, best.tried.least(), judge)?;
        if best.tried.add(Candidate::Tuned, &divergences, begun) {
            best.attempt.model = tuned;
        }
        Ok(steps)
    }
}

impl<M: Module, I: Tensors, O: Tensors> Tuning<'_, M, I, O> {
    /// A copy of `model` after all passes, with how it is judged; after a quarter of them where it is
    /// behind `before` then by more than a standard error. And the number of steps that were taken.
    ///
    /// The trial is a whole course of its own, its last steps as small as any: a course that is cut off
    /// would say nothing, since its rate is still high there. Far from the dense network there is a second one,
    /// with the divergence as its loss, and the rest goes on with the loss that did better.
    fn tune_while_it_helps(
        &self,
        model: &M,
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
        let mut loss = Loss::Distance;
        let (tuned, mut steps) = self.tune(trial, loss, model)?;
        let mut first = judge(tuned)?;
        let is_distribution = self.contest.pruner.outputs == Outputs::Logits;
        let is_distribution = is_distribution && self.dense.iter().all(|one| one[0].width() > 1);
        if is_distribution && before.mean() > FAR && !self.contest.is_late() {
            let other = Loss::Divergence;
            let (tuned, taken) = self.tune(trial, other, model)?;
            steps += taken;
            let second = judge(tuned)?;
            if second.1.are_below(&first.1) {
                (first, loss) = (second, other);
            }
        }
        let (behind, error) = before.behind(&first.1);
        if trial == self.passes || behind > error || self.contest.is_late() {
            return Ok((first, steps));
        }
        let rest = self.passes - trial;
        let (tuned, taken) = self.tune(rest, loss, &first.0)?;
        steps += taken;
        let last = judge(tuned)?;
        let best = match last.1.are_below(&first.1) {
            true => last,
            false => first,
        };
        Ok((best, steps))
    }

    /// A copy of `model`, tuned in so many passes towards the dense network's outputs, and the number of steps that were taken.
    ///
    /// BatchNorm works on the statistics of the batch, where they are measured anew afterwards.
    fn tune(&self, passes: usize, loss: Loss, model: &M) -> Result<(M, usize), PruneError> {
        let (contest, pruner) = (self.contest, self.contest.pruner);
        let (batches, forward) = (contest.calibration.to_fit(), contest.calibration.forward);
        let rate = RATE * self.typical_weight(model)?;
        let mut trains = OnlyBatchNormTrains {
            except: self.still.clone(),
            none: !pruner.recalibrate,
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
        let measures = Measure::of(pruner.outputs, self.dense);
        let parts = &self.steps;
        let steps = parts.len() * passes;
        let bar = bar(Candidate::Tuned.name(), steps, pruner.progress);
        let mut done = 0;
        for pass in 0..passes {
            // Parts of other batches follow each other, in another order in each pass.
            for at in 0..parts.len() {
                if contest.is_late() {
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
                let given = outputs(&forward(&student, inputs))?;
                let dense = self.dense[*batch].iter().zip(&given);
                let target = dense.map(|(dense, given)| {
                    let device = given.device().without_autodiff();
                    dense.tensor(examples, all, &device)
                });
                let loss = loss.of_all(&measures, target.collect(), given);
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
    fn typical_weight(&self, model: &M) -> Result<f64, PruneError> {
        let weights = read(self.contest.selection.flatten(model)?)?;
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

impl Loss {
    /// The sum over all outputs.
    fn of_all(
        self,
        measures: &[Measure],
        dense: Vec<Tensor<2>>,
        pruned: Vec<Tensor<2>>,
    ) -> Tensor<1> {
        let several = dense.len() > 1;
        let each = dense.into_iter().zip(pruned).zip(measures).enumerate();
        let losses = each.map(|(at, ((dense, pruned), measure))| {
            let loss = if at == 0 { self } else { Self::Distance };
            let width = dense.dims()[1];
            match loss {
                Self::Distance if several => {
                    loss.of(dense, pruned) / measure.squares_of_numbers(width)
                }
                _ => loss.of(dense, pruned),
            }
        });
        losses
            .reduce(|sum, loss| sum + loss)
            .expect("a network has an output")
    }

    /// The mean over all outputs, or over all distributions; of equal ones, also infinite, there is none.
    fn of(self, dense: Tensor<2>, pruned: Tensor<2>) -> Tensor<1> {
        let in_f32 = |tensor: Tensor<2>| match tensor.dtype() {
            DType::F32 => tensor,
            _ => tensor.cast(FloatDType::F32),
        };
        let (dense, pruned) = (in_f32(dense), in_f32(pruned));
        match self {
            Self::Distance => {
                let dense = dense.autodiff();
                let equal = pruned.clone().equal(dense.clone());
                (pruned - dense).mask_fill(equal, 0.0).square().mean() * 0.5
            }
            Self::Divergence => {
                let width = dense.dims()[1] as f64;
                let (p, logs) = (softmax(dense.clone(), 1), log_softmax(dense, 1));
                let never = p.clone().equal_elem(0.0).autodiff();
                let (p, logs) = (p.autodiff(), logs.autodiff());
                let nats = p * (logs - log_softmax(pruned, 1));
                nats.mask_fill(never, 0.0).mean() * width
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn losses_and_their_gradients_are_the_formulas() {
        let device = Device::flex();
        let dense = Tensor::<2>::from_data([[3.0f32.ln(), 0.0], [f32::NEG_INFINITY, 2.0]], &device);
        let at = || {
            let device = device.clone().autodiff();
            let pruned = [[0.0, 0.0], [f32::NEG_INFINITY, 5.0]];
            Tensor::<2>::from_data(pruned, &device).require_grad()
        };
        let of = |loss: Loss| {
            let pruned = at();
            let value = loss.of(dense.clone(), pruned.clone());
            let gradient = pruned.grad(&value.backward()).unwrap();
            let gradient = gradient.into_data().try_to_vec::<f32>().unwrap();
            (value.into_scalar::<f32>(), gradient)
        };
        // KL of (3/4, 1/4) from (1/2, 1/2), and 0: the mean of two. Its gradient is (q − p) / 2.
        let (value, gradient) = of(Loss::Divergence);
        let expected = 0.5 * (0.75 * 1.5f32.ln() + 0.25 * 0.5f32.ln());
        assert!((value - expected).abs() < 1e-6, "{value}");
        let expected = [-0.125, 0.125, 0.0, 0.0];
        let off = gradient.iter().zip(expected).map(|(a, b)| (a - b).abs());
        assert!(off.fold(0.0, f32::max) < 1e-6, "{gradient:?}");
        // Half the squares, the mean of four; its gradient is the distance over 4.
        let (value, gradient) = of(Loss::Distance);
        let first = 3.0f32.ln();
        assert!(
            (value - (first * first + 9.0) / 8.0).abs() < 1e-6,
            "{value}"
        );
        let expected = [-first / 4.0, 0.0, 0.0, 0.75];
        let off = gradient.iter().zip(expected).map(|(a, b)| (a - b).abs());
        assert!(off.fold(0.0, f32::max) < 1e-6, "{gradient:?}");
    }
}
