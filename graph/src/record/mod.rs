//! A forward pass as a list of operations.

mod device;
pub(crate) mod placeholders;
pub(crate) mod places;
mod states;
mod walked;

use burn::backend::ir::{OperationIr, TensorId};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor, TensorData};

use burn_lean_reparam::{catch_quietly, map_with_path, with_capture_device_like};
use rustc_hash::FxHashMap as HashMap;

use crate::capture::{self, as_autodiff, as_leaf, autodiff_primitive, id, placeholder};
use crate::graph::describe::describe;
use crate::graph::rows;
use crate::hooks::Noted;
use crate::interpret::{name, noise};
use crate::passes::{self, Hooked};
use crate::rules::is_castable;
use crate::tensors::Given;
use crate::{Graph, GraphError, HookInfo, Parameter, Site, TensorMapper, Tensors, hooks};
pub(crate) use device::trains;
pub use device::{is_recorded, model_device};
use placeholders::{Mode, Placeholders, Switches, recorded};
use states::States;
pub(crate) use walked::Walked;

/// A recorded forward pass, with the shape of its result.
#[derive(Debug, Clone)]
pub struct Recording<O> {
    pub(crate) graph: Graph,
    /// The result on the capture device: a form to fill with values.
    pub(crate) form: O,
    pub(crate) inputs: Vec<(Vec<usize>, DType)>,
    /// For each tensor of the result, whether it has a gradient; empty where nobody knows.
    pub(crate) tracked: Vec<bool>,
    /// The recorded backward pass, if it was asked for.
    pub(crate) backward: Option<Backward>,
}

/// A parameter or an input that has a gradient.
#[derive(Debug, Clone)]
pub(crate) struct Leaf {
    pub(crate) tensor: TensorId,
    /// As messages name it.
    pub(crate) name: String,
    pub(crate) elements: usize,
}

/// The gradient of each that could have one; `None` where it has none.
type Gradients = Vec<(Leaf, Option<TensorId>)>;

/// A recorded backward pass of a sum over all results.
#[derive(Debug, Clone)]
pub(crate) struct Backward {
    /// All operations, forward and backward.
    pub(crate) operations: Vec<OperationIr>,
    /// The weighted sum over all results.
    pub(crate) total: TensorId,
    pub(crate) gradients: Gradients,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) constants: HashMap<TensorId, TensorData>,
}

/// What a recording of a training pass finds out about gradients.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Seeks<'a> {
    /// Nothing, which takes the least time. An earlier recording has found which results have one.
    Nothing(&'a [bool]),
    /// Which results have one.
    Results,
    /// That, and the backward pass.
    Backward,
}

/// What a recording takes tensors for that are stored in half precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Halves {
    /// Half: the forward pass has to be one that Burn runs, without two dtypes in one operation.
    #[default]
    AsStored,
    /// F32, of parameters and inputs alike: which operation gets them in which dtype is for rules to say.
    /// [`AsRecorded`](crate::AsRecorded) does not.
    AsF32,
}

/// Records what `forward` does with `model` and `inputs`. Nothing is computed, and no weight is
/// copied.
///
/// The recording is of a training pass if the model or an input is on an autodiff device, and of
/// an evaluation otherwise. `forward` runs once, on tensors that have shapes and dtypes and no
/// values.
///
/// Where the closure stops gradients (`detach`) is not seen, also not at a result:
/// [`record_with_backward`](crate::record_with_backward) and [`Recordings`](crate::Recordings) see it.
///
/// An execution has the numbers and gradients of Burn's own pass. Gradients of a softmax written by hand are the same up
/// to rounding: none goes through the maximum that it subtracts, where Burn's own pass adds what is zero but for that.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_graph::record;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 2).with_bias(false).init(&device);
/// let x = Tensor::<2>::ones([3, 4], &device);
/// let recording = record(&model, &x, |model, x| model.forward(x).mean())?;
/// let names: Vec<_> = recording.graph().nodes().map(|node| node.name()).collect();
/// assert_eq!(names, ["matmul", "mean"]);
///
/// // With values: the numbers and gradients of Burn's own pass.
/// let mean = recording.execute(&model, &x, &burn_lean_graph::AsRecorded)?;
/// assert_eq!(mean.clone().into_scalar::<f32>(), model.forward(x).mean().into_scalar::<f32>());
/// assert!(model.weight.grad(&mean.backward()).is_some());
/// # Ok::<(), burn_lean_graph::GraphError>(())
/// ```
///
/// # Errors
///
/// [`GraphError::Forward`] where `forward` looks at a value, runs a backward pass or fails by
/// itself, [`GraphError::ForeignOutput`] where its result comes from elsewhere,
/// [`GraphError::RunningState`] where what it leaves in a running state does.
pub fn record<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    inputs: &I,
    forward: impl FnOnce(&M, I) -> O,
) -> Result<Recording<O>, GraphError> {
    record_halves(model, inputs, Halves::AsStored, forward)
}

/// [`record`], with a choice of what tensors in half precision are taken for.
///
/// # Errors
///
/// As [`record`].
pub fn record_halves<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    inputs: &I,
    halves: Halves,
    forward: impl FnOnce(&M, I) -> O,
) -> Result<Recording<O>, GraphError> {
    let walked = Walked::of(model);
    record_with(walked, inputs, forward, halves, Seeks::Nothing(&[]))
}

pub(crate) fn record_with<M: Module, I: Tensors, O: Tensors>(
    walked: Walked<'_, M>,
    inputs: &I,
    forward: impl FnOnce(&M, I) -> O,
    halves: Halves,
    seeks: Seeks<'_>,
) -> Result<Recording<O>, GraphError> {
    let mut given = Given::default();
    let _ = inputs.map_tensors(&mut given);
    let device = walked.device.as_ref();
    let trains = given.autodiff || device.is_some_and(Device::is_autodiff);
    let like = device.or(given.device.as_ref()).cloned();
    let like = like.ok_or(GraphError::NoDevice)?;
    let mode = match (trains, seeks) {
        (false, _) => Mode::Evaluate,
        (true, Seeks::Nothing(_)) => Mode::Train,
        (true, _) => Mode::TrainWithGradients,
    };
    with_capture_device_like(&like, |device| {
        let recorder = Recorder::new(device, mode, halves);
        record_on(recorder, given, walked, inputs, forward, seeks)
    })
}

fn record_on<M: Module, I: Tensors, O: Tensors>(
    mut recorder: Recorder<'_>,
    given: Given,
    walked: Walked<'_, M>,
    inputs: &I,
    forward: impl FnOnce(&M, I) -> O,
    seeks: Seeks<'_>,
) -> Result<Recording<O>, GraphError> {
    let (device, mode) = (recorder.device, recorder.mode);
    let Walked {
        model,
        hooks: carried,
        ..
    } = walked;
    let hooked = !carried.is_empty();
    let mut hooks: Vec<HookInfo> = carried.iter().map(info).collect();
    let mut noted = Noted::default();
    // The first tensor after the forward pass.
    let mut backward_from = None;
    let mut result = None;
    let captured = device.capture_scope(|scope| {
        let done = catch_quietly(|| {
            let (model, states) = hooks::sharing(|| recorder.with_placeholders(model, hooked));
            let inputs = inputs.map_tensors(&mut recorder);
            let (form, made) = hooks::recording(carried, device, || forward(&model, inputs));
            noted = made;
            let mut results = Results::default();
            let form = form.map_tensors(&mut results);
            (form, results, states)
        });
        match done {
            Ok((form, results, states)) => {
                let states = states.map_or(Ok(()), |states| states.note(&mut recorder.parameters));
                let records = mode == Mode::TrainWithGradients && matches!(seeks, Seeks::Backward);
                let backward = records
                    .then(|| {
                        let mark = placeholder(Shape::new([1]), DType::F32, device);
                        backward_from = id(&mark);
                        recorder.backward(&results.tensors)
                    })
                    .flatten();
                let completed = scope.complete([], []);
                result = Some(Ok((form, results, states, backward)));
                completed
            }
            Err(reason) => {
                result = Some(Err(reason));
                scope.complete([], [])
            }
        }
    });
    let captured = captured.map_err(|error| GraphError::Capture {
        reason: error.to_string(),
    })?;
    let (form, results, states, total) = match result.expect("the scope ran") {
        Ok(recorded) => recorded,
        Err(reason) => {
            return Err(GraphError::Forward {
                reason,
                after: last(&captured.graph.operations, &recorder.parameters),
            });
        }
    };
    states?;
    let mut outputs = Vec::with_capacity(results.tensors.len());
    for (index, tensor) in results.tensors.iter().enumerate() {
        outputs.push(id(tensor).ok_or(GraphError::ForeignOutput { index })?);
    }
    let tracked = match seeks {
        Seeks::Nothing(known) if known.len() == outputs.len() => known.to_vec(),
        _ if mode == Mode::TrainWithGradients => results.tensors.iter().map(is_tracked).collect(),
        _ => Vec::new(),
    };
    let constants: HashMap<_, _> = captured.values.into_iter().collect();
    let without_update = |parameter: &Parameter| Parameter {
        update: None,
        ..parameter.clone()
    };
    let backward = total.map(|(total, gradients)| Backward {
        operations: captured.graph.operations.clone(),
        total,
        gradients,
        parameters: recorder.parameters.iter().map(without_update).collect(),
        constants: constants.clone(),
    });
    let mut operations = captured.graph.operations;
    let is_mark = |operation: &OperationIr| {
        let mut outputs = operation.outputs();
        outputs.any(|output| Some(output.id) == backward_from)
    };
    if let Some(end) = operations.iter().position(is_mark) {
        operations.truncate(end);
    }
    for (_, position) in &noted.stand_ins {
        hooks[*position].is_called = true;
    }
    let mut graph = passes::simplify(
        operations,
        constants,
        recorder.parameters,
        recorder.inputs,
        outputs,
        Hooked { hooks, noted },
    );
    graph.stored = recorder.stored;
    Ok(Recording {
        graph,
        form,
        inputs: given.signature,
        tracked,
        backward,
    })
}

fn is_tracked(tensor: &DispatchTensor) -> bool {
    autodiff_primitive(tensor).is_some_and(|tensor| tensor.is_tracked())
}

fn info(carried: &hooks::Carried) -> HookInfo {
    let of_parameter = carried.parameter.clone().zip(carried.hook.role());
    HookInfo {
        path: carried.path.clone(),
        site: of_parameter.map(|(path, (role, ordinal))| Site {
            path,
            role,
            ordinal,
        }),
        name: carried.hook.name(),
        takes_zeros: carried.hook.takes_zeros(),
        takes_parts: carried.hook.takes_parts(),
        is_called: false,
    }
}

impl<O> Recording<O> {
    /// The operations.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// With all linear layers in the form in which the leading axes of the input are folded into its rows.
    ///
    /// Burn computes a linear layer of an input with three and more axes so or with a broadcast weight, as
    /// the sizes have it, and records what it computes; likewise a product of a vector of each example, with
    /// its axes swapped. In one form, recordings of batches of different sizes have the same operations.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_graph::record;
    ///
    /// let device = Device::flex();
    /// let model = LinearConfig::new(16, 16).with_bias(false).init(&device);
    /// let names = [1, 24].map(|batch| -> Vec<_> {
    ///     let x = Tensor::<3>::ones([batch, 5, 16], &device);
    ///     let recording = record(&model, &x, |model, x| model.forward(x)).unwrap().fold_rows();
    ///     recording.graph().nodes().map(|node| node.name()).collect()
    /// });
    /// assert_eq!(names, [["reshape", "matmul", "reshape"]; 2]);
    /// ```
    #[must_use]
    pub fn fold_rows(mut self) -> Self {
        rows::fold(&mut self.graph);
        describe(&mut self.graph);
        self
    }
}

/// The last operation, with the parameters that it reads, for messages.
fn last(operations: &[OperationIr], parameters: &[Parameter]) -> String {
    let given: HashMap<TensorId, &str> = parameters
        .iter()
        .map(|parameter| (parameter.tensor, parameter.path.as_str()))
        .collect();
    let computed = operations
        .iter()
        .rev()
        .find(|operation| operation.inputs().next().is_some());
    let Some(operation) = computed else {
        return "nothing".into();
    };
    let of = operations.iter().rev().find_map(|operation| {
        operation
            .inputs()
            .find_map(|input| given.get(&input.id).copied())
    });
    match of {
        None => format!("operation `{}`", name(operation)),
        Some(path) => format!(
            "operation `{}`, the last parameter read being `{path}`",
            name(operation)
        ),
    }
}

/// Makes placeholders for a model and its inputs.
struct Recorder<'a> {
    device: &'a Device,
    mode: Mode,
    halves: Halves,
    parameters: Vec<Parameter>,
    stored: HashMap<TensorId, DType>,
    leaves: HashMap<TensorId, DispatchTensor>,
    inputs: Vec<TensorId>,
}

impl<'a> Recorder<'a> {
    fn new(device: &'a Device, mode: Mode, halves: Halves) -> Self {
        Self {
            device,
            mode,
            halves,
            parameters: Vec::new(),
            stored: HashMap::default(),
            leaves: HashMap::default(),
            inputs: Vec::new(),
        }
    }

    /// The model on the capture device, without the values of its parameters.
    fn with_placeholders<M: Module>(&mut self, model: &M, hooked: bool) -> (M, Option<States<M>>) {
        let switches = Switches::of(model, self.mode, hooked);
        let has_buffers = switches.has_buffers;
        // `valid` copies running statistics, which its clones would share, and takes in what earlier
        // passes have left in them.
        let model = model.valid();
        let before = has_buffers.then(|| model.clone());
        // First without values, so that the move copies only what no visitor sees: plain tensors
        // in modules, which become constants.
        let nothing = Switches::default();
        let mut empty = Placeholders::new(self.device, Mode::Evaluate, Halves::AsStored, nothing);
        let model = map_with_path(model, &mut empty).to_device(self.device);
        let mut placeholders = Placeholders::new(self.device, self.mode, self.halves, switches);
        let model = map_with_path(model, &mut placeholders);
        self.parameters = placeholders.found;
        self.leaves = placeholders.leaves;
        self.stored = placeholders.stored;
        let trains = self.mode != Mode::Evaluate;
        let states = before.and_then(|before| States::of(before, &self.parameters, trains));
        (model, states)
    }

    fn input(&mut self, tensor: &DispatchTensor) -> DispatchTensor {
        let dtype = tensor.dtype();
        let dtype = match is_castable(dtype) {
            true => recorded(dtype, self.halves),
            false => dtype,
        };
        let stand_in = placeholder(tensor.shape(), dtype, self.device);
        let id = id(&stand_in).expect("the placeholder is on the capture device");
        if dtype != tensor.dtype() {
            self.stored.insert(id, tensor.dtype());
        }
        self.inputs.push(id);
        stand_in
    }

    /// Records the backward pass of a sum over all results; `None` where Burn cannot record it, or
    /// no result depends on a parameter.
    fn backward(&self, results: &[DispatchTensor]) -> Option<(TensorId, Gradients)> {
        catch_quietly(|| {
            let total = results
                .iter()
                .filter(|tensor| is_tracked(tensor))
                .map(|tensor| weighted_sum(tensor.clone()))
                .reduce(|a, b| a + b)?
                .into_dispatch();
            let grads = autodiff_primitive(&total)?.backward();
            let mut gradients = Vec::new();
            let parameters = self.parameters.iter();
            let parameters = parameters.map(|parameter| (parameter.tensor, parameter.path.clone()));
            let inputs = self.inputs.iter().enumerate();
            let inputs = inputs.map(|(index, input)| (*input, format!("input {index}")));
            for (tensor, name) in parameters.chain(inputs) {
                let Some(value) = self.leaves.get(&tensor) else {
                    continue;
                };
                let Some(leaf) = autodiff_primitive(value) else {
                    continue;
                };
                let elements = value.shape().num_elements();
                let grad = leaf.grad(&grads).map(capture::from_primitive);
                let leaf = Leaf {
                    tensor,
                    name,
                    elements,
                };
                gradients.push((leaf, grad.as_ref().and_then(id)));
            }
            Some((id(&total)?, gradients))
        })
        .ok()
        .flatten()
    }
}

/// The sum of a tensor in F32, with weights between 0.5 and 1.5: that of a softmax or a BatchNorm
/// alone is a constant, whose gradients are 0 whatever is stopped before it.
fn weighted_sum(tensor: DispatchTensor) -> Tensor<1> {
    let count = tensor.shape().num_elements();
    let flat = Tensor::<1>::from_dispatch(Dispatch::float_reshape(tensor, Shape::new([count])));
    let flat = match flat.dtype() {
        DType::F32 => flat,
        _ => flat.cast(FloatDType::F32),
    };
    let noise = noise(Shape::new([count]), flat.device().as_dispatch());
    (flat * (Tensor::from_dispatch(noise) * 0.5 + 1.0)).sum()
}

impl TensorMapper for Recorder<'_> {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        let stand_in = self.input(&tensor.clone().into_dispatch());
        Tensor::from_dispatch(match tensor.is_autodiff() {
            // A result that comes from an input alone has its gradient.
            true if tensor.is_tracked() && self.mode == Mode::TrainWithGradients => {
                let input = id(&stand_in);
                let leaf = as_leaf(stand_in);
                self.leaves.extend(input.map(|input| (input, leaf.clone())));
                leaf
            }
            true => as_autodiff(stand_in),
            false => stand_in,
        })
    }

    crate::every_kind!(int, bool: |self, tensor| {
        Tensor::from_dispatch(self.input(&tensor.clone().into_dispatch()))
    });
}

/// The tensors of a result, which becomes a form that keeps nothing of autodiff's alive.
#[derive(Default)]
struct Results {
    tensors: Vec<DispatchTensor>,
}

impl TensorMapper for Results {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        self.tensors.push(tensor.clone().into_dispatch());
        match tensor.is_tracked() {
            true => tensor.clone().detach(),
            false => tensor.clone(),
        }
    }

    crate::every_kind!(int, bool: |self, tensor| {
        self.tensors.push(tensor.clone().into_dispatch());
        tensor.clone()
    });
}
