//! What happens to a model after each optimizer step under Burn's `Learner`.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleDisplay};
use burn::optim::{GradientsParams, ModuleOptimizer, MultiGradientsParams};
use burn::train::{InferenceStep, TrainOutput, TrainStep};

use super::step::{as_trained, resumable, stepped};
use crate::scaler::changed;

type Function<M> = Mutex<Box<dyn FnMut(M) -> M + Send>>;

/// A function of the model, shared by all clones; nothing by default.
///
/// Burn's derive takes no type parameter in both a module and a skipped field, so that of the model
/// is erased.
#[derive(Clone, Default)]
pub(crate) struct Hook(Option<Arc<dyn Any + Send + Sync>>);

impl Hook {
    pub(crate) fn new<M: 'static>(function: impl FnMut(M) -> M + Send + 'static) -> Self {
        let function: Function<M> = Mutex::new(Box::new(function));
        Self(Some(Arc::new(function)))
    }

    /// Calls the function, which is one of this type of model.
    pub(crate) fn call<M: Module + 'static>(&self, model: M) -> M {
        match self.0.as_ref().and_then(|function| function.downcast_ref()) {
            Some(function) => {
                let function: &Function<M> = function;
                // What a panic of the function left behind is the function's own.
                let mut function = function.lock().unwrap_or_else(PoisonError::into_inner);
                changed(model, &mut *function)
            }
            None => model,
        }
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(_) => "Hook(..)",
            None => "Hook(none)",
        })
    }
}

/// A model under Burn's `Learner` with a function that is called after each optimizer step.
///
/// Burn's Learner has no such place but the model's own `TrainStep::optimize`. This wraps a model
/// that implements `TrainStep` and `InferenceStep` instead: to advance the quantizers of a model in
/// quantization-aware training, to replace pruning masks by a schedule, to clip weights.
/// [`Amp::with_after_step`](crate::Amp::with_after_step) is the same in mixed precision.
///
/// What is in several places of the model stays one parameter, as by
/// [`join_copies`](burn_lean_reparam::join_copies); freeze a copy that is to stay as it is (`no_grad`), before or
/// behind the one that trains.
///
/// The model's own steps run as they are: quantizers of activations act, and observe, where the steps call them
/// (`forward_q`), and otherwise not at all. An unedited model is trained with all of its quantizers by
/// [`Amp`](crate::Amp) over [`OwnSteps`](crate::OwnSteps), also in F32 without a loss scale.
///
/// Paths in optimizer and learning-rate groups are those of the inner model; paths in records start
/// with `model.`. All clones and replicas share the function; what it captures is in no checkpoint.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn::train::{InferenceStep, Learner, TrainOutput, TrainStep};
/// use burn_lean_amp::AfterStep;
///
/// #[derive(Module, Debug)]
/// struct Model {
///     linear: Linear,
/// }
///
/// impl TrainStep for Model {
///     type Input = Tensor<2>;
///     type Output = ();
///
///     fn step(&self, x: Tensor<2>) -> TrainOutput<()> {
///         TrainOutput::new(self, self.linear.forward(x).mean().backward(), ())
///     }
/// }
///
/// impl InferenceStep for Model {
///     type Input = Tensor<2>;
///     type Output = ();
///
///     fn step(&self, _x: Tensor<2>) {}
/// }
///
/// let device = Device::flex().autodiff();
/// let model = Model { linear: LinearConfig::new(2, 1).init(&device) };
/// let mut steps = 0;
/// let model = AfterStep::new(model, move |model| {
///     steps += 1;
///     println!("{steps} steps taken");
///     model
/// });
/// let mut learner = Learner::new(model, SgdConfig::new().init(), 0.1);
/// let step = learner.train_step(Tensor::ones([4, 2], &device));
/// learner.optimizer_step(step.grads);
/// ```
#[derive(Module, Debug)]
pub struct AfterStep<M> {
    model: M,
    #[module(skip)]
    after_step: Hook,
}

impl<M: Module + 'static> AfterStep<M> {
    /// Wraps a model; `after_step` gets it after each step, and training goes on with what it
    /// returns.
    pub fn new(model: M, after_step: impl FnMut(M) -> M + Send + 'static) -> Self {
        Self {
            model: resumable(model),
            after_step: Hook::new(after_step),
        }
    }

    /// The inner model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The inner model.
    pub fn into_model(self) -> M {
        self.model
    }
}

impl<M: Module + ModuleDisplay + TrainStep + 'static> TrainStep for AfterStep<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: M::Input) -> TrainOutput<M::Output> {
        let trained = as_trained(&self.model);
        trained.as_ref().unwrap_or(&self.model).step(item)
    }

    fn optimize(
        mut self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        self.model = stepped(self.model, |model| model.optimize(optim, lr, grads));
        self.model = self.after_step.call(self.model);
        self
    }

    fn optimize_multi(
        mut self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: MultiGradientsParams,
    ) -> Self {
        self.model = stepped(self.model, |model| model.optimize_multi(optim, lr, grads));
        self.model = self.after_step.call(self.model);
        self
    }
}

impl<M: Module + ModuleDisplay + InferenceStep> InferenceStep for AfterStep<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: M::Input) -> M::Output {
        self.model.step(item)
    }
}
