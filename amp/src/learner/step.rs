//! The steps: what the user's model does, and what Burn's training loops call.

use std::collections::{HashMap, HashSet};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleDisplay, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, MultiGradientsParams};
use burn::tensor::{DType, Tensor};
use burn::train::{InferenceStep, ItemLazy, TrainOutput, TrainStep};
use burn_lean_graph::hooks::{frozen, sharing};
use burn_lean_reparam::column_layout::loadable;
use burn_lean_reparam::{has_copies, join_copies};

use super::Amp;
use crate::{AmpError, Autocast};

/// The forward pass and loss of a model under [`Amp`], in place of Burn's `TrainStep`.
pub trait AmpTrainStep {
    /// A batch.
    type Input: Send + 'static;
    /// What the metrics get.
    type Output: ItemLazy + 'static;

    /// Runs the forward pass and the loss by `autocast.run(self, item, …)`, or the forward pass in
    /// the region `autocast.forward(…)` and the loss outside of it.
    ///
    /// Returns the loss, F32 (or F64) of shape `[1]` and not scaled, with the output for the
    /// metrics. Scaling and the backward pass are [`Amp`]'s.
    fn train_step(&self, autocast: &Autocast, item: Self::Input) -> (Tensor<1>, Self::Output);

    /// The same where it can fail, which is what [`Amp`] calls: an error ends the training through its
    /// [`Monitor`](crate::learner::Monitor), with no parameter changed.
    fn try_train_step(
        &self,
        autocast: &Autocast,
        item: Self::Input,
    ) -> (Result<Tensor<1>, AmpError>, Self::Output) {
        let (loss, output) = self.train_step(autocast, item);
        (Ok(loss), output)
    }

    /// Takes a step with unscaled gradients, as Burn's `TrainStep::optimize`. Default: that of `optim`.
    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self
    where
        Self: Module + Sized,
    {
        optim.step(lr, self, grads)
    }
}

/// The validation step of a model under [`Amp`], in place of Burn's `InferenceStep`.
pub trait AmpInferenceStep {
    /// A batch.
    type Input: Send + 'static;
    /// What the metrics get.
    type Output: ItemLazy + 'static;

    /// Validates on one batch: in half precision inside the region, in F32 without it.
    fn inference_step(&self, autocast: &Autocast, item: Self::Input) -> Self::Output;
}

/// The model as Burn's learner loads a checkpoint into it: weights that were used (calibrated, evaluated) and that
/// records hold transposed load as those of a new model do. What was not used stays so: it is drawn in the order
/// of its uses.
pub(super) fn resumable<M: Module>(model: M) -> M {
    struct Used;
    impl ModuleMapper for Used {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match param.is_initialized() {
                true => loadable(param),
                false => param,
            }
        }
    }
    model.map(&mut Used)
}

/// What a training step is to be called on, where that is not `model` itself: with one tensor in all copies of a
/// parameter, which Burn's learner takes apart when it puts the model on a device, and with the BatchNorms frozen
/// that a loaded schedule says are.
pub(super) fn as_trained<M: Module>(model: &M) -> Option<M> {
    let joined = has_copies(model).then(|| sharing(|| join_copies(model.clone())));
    frozen(joined.as_ref().unwrap_or(model)).or(joined)
}

/// The model after a step, which Burn's optimizers give to the first copy of a parameter alone: all copies that
/// train have it, and no frozen one, wherever it is.
pub(super) fn stepped<M: Module>(model: M, step: impl FnOnce(M) -> M) -> M {
    let mut identities = Identities::default();
    model.visit(&mut identities);
    let model = match identities.trained.is_disjoint(&identities.frozen) {
        true => step(model),
        false => {
            let mut apart = Apart {
                trained: identities.trained,
                own: HashMap::new(),
            };
            let model = step(model.map(&mut apart));
            model.map(&mut Back(apart.own))
        }
    };
    match has_copies(&model) {
        true => join_copies(model),
        false => model,
    }
}

/// Of the parameters that train, and of those that do not.
#[derive(Default)]
struct Identities {
    trained: HashSet<ParamId>,
    frozen: HashSet<ParamId>,
}

impl ModuleVisitor for Identities {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match param.is_require_grad() {
            true => self.trained.insert(param.id),
            false => self.frozen.insert(param.id),
        };
    }
}

/// Gives frozen copies of what trains identities that have no gradient.
struct Apart {
    trained: HashSet<ParamId>,
    /// Their own, by those.
    own: HashMap<ParamId, ParamId>,
}

impl ModuleMapper for Apart {
    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.trained.contains(&param.id) && !param.is_require_grad() {
            let own = std::mem::replace(&mut param.id, ParamId::new());
            self.own.insert(param.id, own);
        }
        param
    }
}

/// Gives them back their own.
struct Back(HashMap<ParamId, ParamId>);

impl ModuleMapper for Back {
    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if let Some(own) = self.0.get(&param.id) {
            param.id = *own;
        }
        param
    }
}

impl<M: Module + ModuleDisplay + AmpTrainStep + 'static> TrainStep for Amp<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: M::Input) -> TrainOutput<M::Output> {
        if !self.is_disabled() {
            self.statistics.before_forward(&self.model);
        }
        let trained = as_trained(&self.model);
        let model = trained.as_ref().unwrap_or(&self.model);
        let (loss, output) = model.try_train_step(&self.autocast, item);
        match loss.and_then(|loss| Ok((self.scale(loss.clone())?, loss))) {
            Ok((scaled, loss)) => {
                let mut step = TrainOutput::new(model, scaled.backward(), output);
                if !self.is_disabled() {
                    let loss = loss.without_autodiff().cast(DType::F32).sum();
                    self.tell(&mut step.grads, loss);
                }
                step
            }
            Err(error) => {
                self.monitor.fail_pass(error);
                let mut grads = GradientsParams::new();
                // With such a loss no step is taken, whatever other passes and other workers add.
                let device = self.grad_scaler.scale().device();
                self.tell(
                    &mut grads,
                    Tensor::full([1], f32::NAN, (&device, DType::F32)),
                );
                TrainOutput {
                    grads,
                    item: output,
                }
            }
        }
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        self.try_optimize(optim, lr, grads)
            .unwrap_or_else(|rejected| {
                let (amp, error) = rejected.into_parts();
                amp.monitor.fail(error);
                amp
            })
    }

    fn optimize_multi(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: MultiGradientsParams,
    ) -> Self {
        let mut sum = SumOverDevices {
            grads,
            sum: GradientsParams::new(),
        };
        self.visit(&mut sum);
        let grads = sum.sum;
        self.optimize(optim, lr, grads)
    }
}

impl<M: Module + ModuleDisplay + AmpInferenceStep> InferenceStep for Amp<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: M::Input) -> M::Output {
        self.model.inference_step(&self.autocast, item)
    }
}

/// Adds the gradients of several devices up, each parameter on the device that Burn elects for it.
struct SumOverDevices {
    grads: MultiGradientsParams,
    sum: GradientsParams,
}

impl ModuleVisitor for SumOverDevices {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some((grad, _device)) = self.grads.remove::<D>(param.id) {
            self.sum.register(param.id, grad);
        }
    }
}
