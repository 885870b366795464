//! Burn's own steps of a model, as they are, in mixed precision.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleDisplay, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, Transaction};
use burn::train::{
    ClassificationOutput, InferenceStep, ItemLazy, MultiLabelClassificationOutput,
    RegressionOutput, SequenceOutput, TrainStep,
};
use burn_lean_graph::hooks::acts_in_recordings;
use burn_lean_graph::{Tensors, cloned};
use burn_lean_reparam::{FloatVisitor, own_copy, visit_floats};

use super::{AmpInferenceStep, AmpTrainStep};
use crate::{AmpError, Autocast, gradients};

/// The loss of a step, where its output has it.
pub trait StepLoss {
    /// Of shape `[1]`: what the step goes backward from.
    fn loss(&self) -> Tensor<1>;
}

macro_rules! step_loss {
    ($($output:ty),+) => {$(
        impl StepLoss for $output {
            fn loss(&self) -> Tensor<1> {
                self.loss.clone()
            }
        }
    )+};
}

step_loss!(
    ClassificationOutput,
    MultiLabelClassificationOutput,
    RegressionOutput,
    SequenceOutput
);

/// A model with Burn's `TrainStep` and `InferenceStep`, which goes into [`Amp`](super::Amp) as it is.
///
/// A `TrainStep` goes backward by itself, which no recording can follow. What is run in mixed precision,
/// by [`Autocast::run`], is therefore the `InferenceStep` of the model in training: nearly every model has the
/// same forward pass and loss in both. Whether this one has is looked at in the first training step, the second,
/// the 4th, the 8th and so on, on each device: the gradients of its `TrainStep` are compared with those of the loss
/// of its `InferenceStep`, both in F32, which takes the time and memory of two more F32 steps. Where they differ, the
/// training stops with [`AmpError::StepsDiffer`], with nothing changed by that step: mostly the first, later
/// where a term of the training alone begins at 0 (a penalty on the way from the first weights, one that grows).
///
/// Where the steps draw random numbers (dropout), the generator of the device is set to one of its own numbers
/// before each of the two; a training from the same seed stays the same. Running statistics do not move
/// in the comparison. Its `TrainStep::optimize` is called for each step that is taken. Validation is its
/// `InferenceStep`, in F32, with all of its quantizers where the model has some.
///
/// Paths in records begin with `model.model.`; in groups of an optimizer they are those of the model.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Initializer, Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn::train::{InferenceStep, Learner, RegressionOutput, TrainOutput, TrainStep};
/// use burn_lean_amp::{Amp, Autocast, GradScalerConfig, OwnSteps};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     linear: Linear,
/// }
///
/// impl TrainStep for Model {
///     type Input = (Tensor<2>, Tensor<2>);
///     type Output = RegressionOutput;
///
///     fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
///         let item = InferenceStep::step(self, batch);
///         TrainOutput::new(self, item.loss.backward(), item)
///     }
/// }
///
/// impl InferenceStep for Model {
///     type Input = (Tensor<2>, Tensor<2>);
///     type Output = RegressionOutput;
///
///     fn step(&self, (x, y): Self::Input) -> RegressionOutput {
///         let output = self.linear.forward(x);
///         let loss = (output.clone() - y.clone()).square().mean();
///         RegressionOutput::new(loss, output, y)
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let linear = LinearConfig::new(2, 1).with_bias(false).with_initializer(Initializer::Zeros);
/// let model = Model { linear: linear.init(&device) };
/// let dtype = FloatDType::BF16;
/// let amp = Amp::from_prepared(
///     OwnSteps::new(model),
///     Autocast::new(dtype),
///     &GradScalerConfig::for_dtype(dtype),
/// )?;
/// let schedule = amp.lr_scheduler(0.05)?;
/// let mut learner = Learner::new(amp, SgdConfig::new().init(), schedule);
/// let x = Tensor::<2>::from_floats([[1., 0.], [0., 1.], [1., 1.]], &device);
/// let y = Tensor::<2>::from_floats([[1.], [2.], [3.]], &device);
/// for _ in 0..200 {
///     let step = learner.train_step((x.clone(), y.clone()));
///     learner.lr_step();
///     learner.optimizer_step(step.grads);
/// }
/// let amp = learner.model();
/// let model = amp.model().model();
/// let found: Vec<f32> = model.linear.weight.val().into_data().to_vec().unwrap();
/// assert!((found[0] - 1.0).abs() < 0.02 && (found[1] - 2.0).abs() < 0.02);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
#[derive(Module, Debug)]
pub struct OwnSteps<M> {
    model: M,
    /// How the comparisons ended, for all clones and replicas.
    #[module(skip)]
    compared: Compared,
}

#[derive(Debug, Clone, Default)]
struct Compared(Arc<Mutex<Comparisons>>);

#[derive(Debug, Default)]
struct Comparisons {
    /// Training passes on each device so far: replicas compare at the same ones. Threads are others in each epoch.
    passes: Vec<(Option<Device>, u64)>,
    /// The largest gradient of all comparisons: later ones may be little more than rounding.
    largest: f32,
    error: Option<AmpError>,
    /// Batches in a row that were validated as they are, since the model could not be recorded.
    unrecorded: u64,
    /// That was said.
    is_said: bool,
}

/// Largest difference of two gradients of a parameter, as a fraction of its largest one: far above the
/// rounding of F32 sums in another order, and below what another loss would make.
const TOLERANCE: f32 = 1e-3;
/// Comparisons before steps are different: another thread may draw numbers of the device between two that
/// begin with the same seed.
const ATTEMPTS: usize = 4;
/// A parameter's largest gradient counts as no less than this part of the largest of all: it may be
/// zero but for rounding.
const LEAST: f32 = 1e-2;

impl<M: Module + ModuleDisplay + 'static> OwnSteps<M> {
    /// With the steps of `model`.
    pub fn new(model: M) -> Self {
        Self {
            model,
            compared: Compared::default(),
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

impl<M> OwnSteps<M> {
    fn comparisons(&self) -> MutexGuard<'_, Comparisons> {
        let compared = self.compared.0.lock();
        compared.unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this batch of the validation is tried: after batches that could not be recorded, at each doubling.
    fn is_tried(&self) -> bool {
        let mut state = self.comparisons();
        let is_tried = state.unrecorded == 0 || state.unrecorded.is_power_of_two();
        state.unrecorded += u64::from(!is_tried);
        is_tried
    }

    fn was_recorded(&self) {
        self.comparisons().unrecorded = 0;
    }

    fn was_not_recorded(&self, error: &AmpError) {
        let mut state = self.comparisons();
        state.unrecorded += 1;
        if !std::mem::replace(&mut state.is_said, true) {
            tracing::warn!(
                %error,
                "validated without the quantizers of activations, as other batches where that is so"
            );
        }
    }
}

impl<M, I, O> OwnSteps<M>
where
    M: Module + TrainStep<Input = I, Output = O> + InferenceStep<Input = I, Output = O>,
    I: Tensors,
    O: StepLoss,
{
    /// Whether both steps go backward from the same loss, found out in the first pass and again at each
    /// doubling: a term of the training alone may have no gradient before something has moved.
    fn compare(&self, item: &I) -> Result<(), AmpError> {
        let device = self.model.devices().into_iter().next();
        {
            let mut compared = self.comparisons();
            if let Some(error) = &compared.error {
                return Err(error.clone());
            }
            let known = compared.passes.iter().position(|(one, _)| *one == device);
            let at = known.unwrap_or(compared.passes.len());
            if known.is_none() {
                compared.passes.push((device, 0));
            }
            let passes = &mut compared.passes[at].1;
            *passes += 1;
            if !passes.is_power_of_two() {
                return Ok(());
            }
        }
        // Without the lock, since both steps compute.
        let found = self.compare_now(item);
        if let Err(error) = &found {
            self.comparisons().error.get_or_insert(error.clone());
        }
        found
    }

    fn compare_now(&self, item: &I) -> Result<(), AmpError> {
        let copy = || own_copy(&self.model);
        let by_training = || TrainStep::step(&copy(), cloned(item)).grads;
        let by_inference = || {
            let model = copy();
            let loss = InferenceStep::step(&model, cloned(item)).loss();
            GradientsParams::from_grads(loss.backward(), &model)
        };
        let device = self.model.devices().into_iter().next();
        let differ = |seed: Option<u64>, steps: [&dyn Fn() -> GradientsParams; 2]| {
            let [one, other] = steps.map(|step| {
                if let (Some(device), Some(seed)) = (&device, seed) {
                    device.seed(seed);
                }
                step()
            });
            self.difference(&one, &other)
        };
        let mut difference = None;
        for attempt in 0..ATTEMPTS {
            // At first as they come: most steps draw no random numbers.
            let seeded = device.as_ref().filter(|_| attempt > 0);
            difference = differ(seeded.map(seed), [&by_training, &by_inference])?;
            if difference.is_none() {
                break;
            }
        }
        let Some(error) = difference else {
            return Ok(());
        };
        // Where other threads draw from the same generator, a step does not even repeat itself.
        match differ(device.as_ref().map(seed), [&by_training, &by_training])? {
            None => Err(error),
            Some(_) => {
                tracing::warn!(
                    "the gradients of `TrainStep` are others each time: they were not compared with those of \
                     `InferenceStep`"
                );
                Ok(())
            }
        }
    }

    /// The first parameter whose gradients are not the same.
    fn difference(
        &self,
        training: &GradientsParams,
        inference: &GradientsParams,
    ) -> Result<Option<AmpError>, AmpError> {
        let mut both = Both {
            training,
            inference,
            found: Vec::new(),
        };
        visit_floats(&self.model, &mut both);
        let found = both
            .found
            .into_iter()
            .map(|(path, pair)| {
                let [training, inference] = pair.map(|grad| grad.map_or(Ok(Vec::new()), numbers));
                Ok((path, training?, inference?))
            })
            .collect::<Result<Vec<_>, AmpError>>()?;
        let most = |values: &[f32]| {
            let finite = values.iter().filter(|value| value.is_finite());
            finite.fold(0.0, |most: f32, value| most.max(value.abs()))
        };
        let largest = |training: &[f32], inference: &[f32]| most(training).max(most(inference));
        let each = found.iter();
        let of_all = each.fold(0.0, |most: f32, (_, training, inference)| {
            most.max(largest(training, inference))
        });
        let of_all = {
            let largest = &mut self.comparisons().largest;
            *largest = largest.max(of_all);
            *largest
        };
        for (path, training, inference) in found {
            let size = largest(&training, &inference).max(LEAST * of_all);
            let places = training.len().max(inference.len());
            for place in 0..places {
                // One that no backward pass reached is 0.
                let of = |values: &[f32]| values.get(place).copied().unwrap_or(0.0);
                let (training, inference) = (of(&training), of(&inference));
                let same = training == inference
                    || (training - inference).abs() <= TOLERANCE * size
                    || !training.is_finite() && !inference.is_finite();
                if !same {
                    return Ok(Some(AmpError::StepsDiffer {
                        path,
                        training,
                        inference,
                    }));
                }
            }
        }
        Ok(None)
    }
}

/// Gradients by both steps, by path.
struct Both<'a> {
    training: &'a GradientsParams,
    inference: &'a GradientsParams,
    found: Vec<(String, [Option<Tensor<1>>; 2])>,
}

impl FloatVisitor for Both<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let pair = [self.training, self.inference].map(|grads| {
            let grad = grads.get::<D>(param.id)?;
            Some(grad.flatten(0, D - 1))
        });
        self.found.push((path.into(), pair));
    }
}

fn numbers(grad: Tensor<1>) -> Result<Vec<f32>, AmpError> {
    let data = gradients::read(Transaction::default().register(grad))?;
    Ok(data.iter().flat_map(|data| data.iter::<f32>()).collect())
}

/// A number of the device's own generator.
fn seed(device: &Device) -> u64 {
    let range = Distribution::Uniform(0.0, f64::from(1 << 24));
    // Not in the default of the device, which may be half: most of these numbers are infinite there.
    let on = (&device.clone().inner(), DType::F32);
    let drawn = Tensor::<1>::random([1], range, on).into_data();
    drawn.iter::<f32>().next().unwrap_or_default() as u64
}

impl<M, I, O> AmpTrainStep for OwnSteps<M>
where
    M: Module
        + ModuleDisplay
        + TrainStep<Input = I, Output = O>
        + InferenceStep<Input = I, Output = O>
        + 'static,
    I: Tensors + Send + 'static,
    O: StepLoss + Tensors + ItemLazy + Send + Sync + 'static,
{
    type Input = I;
    type Output = O;

    /// # Panics
    ///
    /// Where [`try_train_step`](AmpTrainStep::try_train_step) has an error instead of a loss.
    fn train_step(&self, autocast: &Autocast, item: I) -> (Tensor<1>, O) {
        match self.try_train_step(autocast, item) {
            (Ok(loss), output) => (loss, output),
            (Err(error), _) => panic!("{error}"),
        }
    }

    fn try_train_step(&self, autocast: &Autocast, item: I) -> (Result<Tensor<1>, AmpError>, O) {
        let again = cloned(&item);
        let output = self.compare(&item).and_then(|()| {
            autocast.run(&self.model, item, |model, item| {
                InferenceStep::step(model, item)
            })
        });
        match output {
            Ok(output) => (Ok(output.loss()), output),
            Err(error) => (Err(error), InferenceStep::step(&self.model.valid(), again)),
        }
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        Self {
            model: self.model.optimize(optim, lr, grads),
            ..self
        }
    }
}

impl<M, I, O> AmpInferenceStep for OwnSteps<M>
where
    M: Module + ModuleDisplay + InferenceStep<Input = I, Output = O>,
    I: Tensors + Send + 'static,
    O: Tensors + ItemLazy + Send + Sync + 'static,
{
    type Input = I;
    type Output = O;

    fn inference_step(&self, _autocast: &Autocast, item: I) -> O {
        if !acts_in_recordings(&self.model) {
            return InferenceStep::step(&self.model, item);
        }
        // Quantizers of activations act in a recording alone: without it, a model in quantization-aware
        // training would be validated with half of them.
        if !self.is_tried() {
            return InferenceStep::step(&self.model, item);
        }
        let again = cloned(&item);
        let recorded = Autocast::new(FloatDType::F32).without_verification().run(
            &self.model,
            item,
            |model, item| InferenceStep::step(model, item),
        );
        match recorded {
            Ok(output) => {
                self.was_recorded();
                output
            }
            Err(error) => {
                self.was_not_recorded(&error);
                InferenceStep::step(&self.model, again)
            }
        }
    }
}
