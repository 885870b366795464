//! What a recipe acts on: forward pass, loss, data, optimizer, evaluation.

use std::fmt;

use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_lean_amp::ResumableOptimizer;
use burn_lean_graph::Tensors;
use burn_lean_quant::{QuantizedForward, quantizers};

use crate::RecipeError;
use crate::tensors::on_device;

/// Batches of inputs and targets.
pub(crate) type Batches<'a, I, T> = Box<dyn Iterator<Item = (I, T)> + 'a>;
/// The model of a stage as a function from inputs to outputs.
pub type Predict<'a, I, O> = dyn Fn(I) -> Result<O, RecipeError> + 'a;
type Forward<'a, M, I, O> = Box<dyn Fn(&M, I) -> O + 'a>;
type Evaluate<'a, I, O> = Box<dyn Fn(&Predict<'_, I, O>) -> Result<f64, RecipeError> + 'a>;
type Logits<'a, O> = Box<dyn Fn(&O) -> Tensor<2> + 'a>;
type Features<'a, O> = Box<dyn Fn(&O) -> Vec<Tensor<2>> + 'a>;
type Resize<'a, M> = Box<dyn Fn(&mut M) + 'a>;

/// What a recipe acts on, in the words of the program that has it: closures.
///
/// `forward` goes from inputs to outputs, `loss` from outputs and targets to the mean loss, `[1]`;
/// `batches` gives an epoch of batches in the order of a seed. A restart asks for the same seeds
/// again, so what `batches` gives must follow from the seed alone. Batches may be on any device. Where
/// the learning rate moves and the iterator does not say how many batches it has (`size_hint`), they are
/// counted in one more pass before the training.
///
/// ```
/// use burn::nn::{Initializer, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_recipe::{ComputeDtype, Recipe, Run, Task, TrainStage};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_data([[1.0], [2.0], [3.0]], &device);
/// let data = (x.clone(), x.mul_scalar(3.0));
/// let task = Task::new(
///     |model: &burn::nn::Linear, x: Tensor<2>| model.forward(x),
///     |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
///     |_seed| [data.clone()],
/// )
/// .with_evaluation(|predict| {
///     let (x, target) = data.clone();
///     let error = predict(x)?.to_device(&target.device()) - target;
///     let right = error.abs().lower_elem(0.3).float();
///     Ok(100.0 * right.mean().into_scalar::<f64>())
/// });
/// let recipe = Recipe::new()
///     .with_dtype(ComputeDtype::F32)
///     .with_train(TrainStage::new(1000, 0.1));
/// let model = LinearConfig::new(1, 1).with_initializer(Initializer::Zeros).init(&device);
/// let outcome = Run::new(&recipe).run(model, &task)?;
/// assert_eq!(outcome.last().row.accuracy, Some(100.0));
/// # Ok::<(), burn_lean_recipe::RecipeError>(())
/// ```
pub struct Task<'a, M, I, T, O> {
    pub(crate) forward: Forward<'a, M, I, O>,
    pub(crate) loss: Box<dyn Fn(O, T) -> Tensor<1> + 'a>,
    batches: Box<dyn Fn(u64) -> Batches<'a, I, T> + 'a>,
    pub(crate) evaluate: Option<Evaluate<'a, I, O>>,
    optimizer: Box<dyn Fn(&Device) -> ModuleOptimizer + 'a>,
    pub(crate) logits: Option<Logits<'a, O>>,
    pub(crate) features: Option<Features<'a, O>>,
    pub(crate) resize: Option<Resize<'a, M>>,
}

impl<M, I, T, O> fmt::Debug for Task<'_, M, I, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("evaluates", &self.evaluate.is_some())
            .field("has_logits", &self.logits.is_some())
            .field("has_features", &self.features.is_some())
            .field("resizes", &self.resize.is_some())
            .finish_non_exhaustive()
    }
}

impl<'a, M, I, T, O> Task<'a, M, I, T, O> {
    /// Forward pass, loss, and the batches of an epoch for a seed. The optimizer is AdamW.
    pub fn new<B>(
        forward: impl Fn(&M, I) -> O + 'a,
        loss: impl Fn(O, T) -> Tensor<1> + 'a,
        batches: impl Fn(u64) -> B + 'a,
    ) -> Self
    where
        B: IntoIterator<Item = (I, T)>,
        B::IntoIter: 'a,
    {
        Self {
            forward: Box::new(forward),
            loss: Box::new(loss),
            batches: Box::new(move |seed| Box::new(batches(seed).into_iter())),
            evaluate: None,
            optimizer: Box::new(|device| {
                ResumableOptimizer::new(AdamWConfig::new().build(), device).init()
            }),
            logits: None,
            features: None,
            resize: None,
        }
    }

    /// With what a model is worth, a larger number for a better one: accuracy [%] in rows and
    /// reports, for example.
    ///
    /// The closure gets the model of a stage as a function, as it is deployed: dropout off, the
    /// activations quantized that are. Its outputs are on the device of the model, without autodiff.
    pub fn with_evaluation(
        mut self,
        evaluate: impl Fn(&Predict<'_, I, O>) -> Result<f64, RecipeError> + 'a,
    ) -> Self {
        self.evaluate = Some(Box::new(evaluate));
        self
    }

    /// With another optimizer; each training gets a new one, for parameters on this device.
    ///
    /// Where Burn's default device is not that of the model, make it with a
    /// [`ResumableOptimizer`], so that a checkpoint loads.
    pub fn with_optimizer(mut self, optimizer: impl Fn(&Device) -> ModuleOptimizer + 'a) -> Self {
        self.optimizer = Box::new(optimizer);
        self
    }

    /// With the logits `[examples, classes]` in the outputs: for a
    /// [`Distillation`](crate::Distillation), for [`TrustConfig::compare`](crate::TrustConfig::compare), and for
    /// layerwise pruning, which compares these alone unless [`PruneStage::outputs`](crate::PruneStage::outputs) are
    /// values.
    pub fn with_logits(mut self, logits: impl Fn(&O) -> Tensor<2> + 'a) -> Self {
        self.logits = Some(Box::new(logits));
        self
    }

    /// With features in the outputs, `[examples, …]` each: for a
    /// [`Distillation`](crate::Distillation) that weighs them.
    pub fn with_features(mut self, features: impl Fn(&O) -> Vec<Tensor<2>> + 'a) -> Self {
        self.features = Some(Box::new(features));
        self
    }

    /// With what sets the numbers of a model that follow the sizes of its parameters, for
    /// [`ShrinkStage`](crate::ShrinkStage): see
    /// [`Shrink::shrink_resizing`](burn_lean_prune::Shrink::shrink_resizing).
    pub fn with_resizing(mut self, resize: impl Fn(&mut M) + 'a) -> Self {
        self.resize = Some(Box::new(resize));
        self
    }

    pub(crate) fn batches(&self, seed: u64) -> Batches<'a, I, T> {
        (self.batches)(seed)
    }

    pub(crate) fn optimizer(&self, device: &Device) -> ModuleOptimizer {
        (self.optimizer)(device)
    }
}

/// A model in evaluation mode as a function, with the quantizers that it carries. Inputs may be on any device.
pub(crate) fn predictor<M, I, T, O>(
    task: &Task<'_, M, I, T, O>,
    model: &M,
    device: &Device,
) -> impl Fn(I) -> Result<O, RecipeError>
where
    M: Module,
    I: Tensors,
    O: Tensors + Send + Sync + 'static,
{
    let quantizes = !quantizers(model).is_empty();
    let quantized = QuantizedForward::new().cached();
    move |inputs| {
        let inputs = on_device(&inputs, device);
        match quantizes {
            false => Ok((task.forward)(model, inputs)),
            true => {
                Ok(quantized.run(model, inputs, |model, inputs| (task.forward)(model, inputs))?)
            }
        }
    }
}
