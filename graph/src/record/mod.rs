//! A forward pass as a list of operations.

pub(crate) mod placeholders;

use std::collections::HashMap;

use burn::backend::ir::{OperationIr, TensorId};
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Module;
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor, TensorData};

use burn_lean_reparam::{catch_quietly, with_capture_device_like};

use crate::capture::{self, as_autodiff, autodiff_primitive, id, placeholder};
use crate::hooks::Noted;
use crate::interpret::name;
use crate::passes::{self, Hooked};
use crate::tensors::Given;
use crate::{Graph, GraphError, HookInfo, Parameter, Site, TensorMapper, Tensors, hooks};
use placeholders::{Mode, Placeholders};

/// A recorded forward pass, with the shape of its result.
#[derive(Debug, Clone)]
pub struct Recording<O> {
    pub(crate) graph: Graph,
    /// The result on the capture device: a form to fill with values.
    pub(crate) form: O,
    pub(crate) inputs: Vec<(Vec<usize>, DType)>,
    /// The recorded backward pass, if it was asked for.
    pub(crate) backward: Option<Backward>,
}

/// The gradient of each parameter that could have one; `None` where it has none.
type Gradients = Vec<(Parameter, Option<TensorId>)>;

/// A recorded backward pass of the sum of all results.
#[derive(Debug, Clone)]
pub(crate) struct Backward {
    /// All operations, forward and backward.
    pub(crate) operations: Vec<OperationIr>,
    /// The sum of all results.
    pub(crate) total: TensorId,
    /// The gradient of each parameter that could have one; `None` where it has none.
    pub(crate) gradients: Gradients,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) constants: HashMap<TensorId, TensorData>,
}

/// Records what `forward` does with `model` and `inputs`. Nothing is computed, and no weight is
/// copied.
///
/// The recording is of a training pass if the model or an input is on an autodiff device, and of
/// an evaluation otherwise. `forward` runs once, on tensors that have shapes and dtypes and no
/// values.
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
/// itself, [`GraphError::ForeignOutput`] where its result comes from elsewhere.
pub fn record<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    inputs: &I,
    forward: impl FnOnce(&M, I) -> O,
) -> Result<Recording<O>, GraphError> {
    record_with(model, inputs, forward, false)
}

pub(crate) fn record_with<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    inputs: &I,
    forward: impl FnOnce(&M, I) -> O,
    backward: bool,
) -> Result<Recording<O>, GraphError> {
    let mut given = Given::default();
    let _ = inputs.map_tensors(&mut given);
    let like = model.devices().into_iter().next().or(given.device.clone());
    let like = like.ok_or(GraphError::NoDevice)?;
    with_capture_device_like(&like, |device| {
        record_on(device, given, model, inputs, forward, backward)
    })
}

fn record_on<M: Module, I: Tensors, O: Tensors>(
    device: &Device,
    given: Given,
    model: &M,
    inputs: &I,
    forward: impl FnOnce(&M, I) -> O,
    backward: bool,
) -> Result<Recording<O>, GraphError> {
    let trains = given.autodiff || model.devices().iter().any(Device::is_autodiff);
    let mode = match (trains, backward) {
        (false, _) => Mode::Evaluate,
        (true, false) => Mode::Train,
        (true, true) => Mode::TrainWithBackward,
    };
    let mut recorder = Recorder::new(device);
    let carried = hooks::offered(model);
    let mut hooks: Vec<HookInfo> = carried.iter().map(info).collect();
    let mut noted = Noted::default();
    // The first tensor after the forward pass.
    let mut backward_from = None;
    let mut result = None;
    let captured = device.capture_scope(|scope| {
        let done = catch_quietly(|| {
            let model = hooks::sharing(|| recorder.with_placeholders(model, mode));
            let inputs = inputs.map_tensors(&mut recorder);
            let (form, made) = hooks::recording(carried, || forward(&model, inputs));
            noted = made;
            let mut results = Results::default();
            let _ = form.map_tensors(&mut results);
            (form, results)
        });
        match done {
            Ok((form, results)) => {
                let backward = (mode == Mode::TrainWithBackward)
                    .then(|| {
                        let mark = placeholder(Shape::new([1]), DType::F32, device);
                        backward_from = id(&mark);
                        recorder.backward(&results.tensors)
                    })
                    .flatten();
                let completed = scope.complete([], []);
                result = Some(Ok((form, results, backward)));
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
    let (form, results, total) = match result.expect("the scope ran") {
        Ok(recorded) => recorded,
        Err(reason) => {
            return Err(GraphError::Forward {
                reason,
                after: last(&captured.graph.operations, &recorder.parameters),
            });
        }
    };
    let mut outputs = Vec::with_capacity(results.tensors.len());
    for (index, tensor) in results.tensors.iter().enumerate() {
        outputs.push(id(tensor).ok_or(GraphError::ForeignOutput { index })?);
    }
    let constants: HashMap<_, _> = captured.values.into_iter().collect();
    let backward = total.map(|(total, gradients)| Backward {
        operations: captured.graph.operations.clone(),
        total,
        gradients,
        parameters: recorder.parameters.clone(),
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
    let graph = passes::simplify(
        operations,
        constants,
        recorder.parameters,
        recorder.inputs,
        outputs,
        Hooked { hooks, noted },
    );
    Ok(Recording {
        graph,
        form,
        inputs: given.signature,
        backward,
    })
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
        is_called: false,
    }
}

impl<O> Recording<O> {
    /// The operations.
    pub fn graph(&self) -> &Graph {
        &self.graph
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
    parameters: Vec<Parameter>,
    leaves: HashMap<TensorId, DispatchTensor>,
    inputs: Vec<TensorId>,
}

impl<'a> Recorder<'a> {
    fn new(device: &'a Device) -> Self {
        Self {
            device,
            parameters: Vec::new(),
            leaves: HashMap::new(),
            inputs: Vec::new(),
        }
    }

    /// The model on the capture device, without the values of its parameters.
    fn with_placeholders<M: Module>(&mut self, model: &M, mode: Mode) -> M {
        // `valid` copies running statistics, which its clones would share.
        let model = model.valid();
        // First without values, so that the move copies only what no visitor sees: plain tensors
        // in modules, which become constants.
        let mut empty = Placeholders::new(self.device, Mode::Evaluate);
        let model = model.map(&mut empty).to_device(self.device);
        let mut placeholders = Placeholders::new(self.device, mode);
        let model = model.map(&mut placeholders);
        self.parameters = placeholders.found;
        if mode == Mode::TrainWithBackward {
            let values = placeholders::Values::of(&model);
            for parameter in &self.parameters {
                if let Some(value) = values.get(parameter) {
                    self.leaves.insert(parameter.tensor, value.clone());
                }
            }
        }
        model
    }

    fn input(&mut self, tensor: &DispatchTensor, autodiff: bool) -> DispatchTensor {
        let stand_in = placeholder(tensor.shape(), tensor.dtype(), self.device);
        self.inputs
            .push(id(&stand_in).expect("the placeholder is on the capture device"));
        match autodiff {
            true => as_autodiff(stand_in),
            false => stand_in,
        }
    }

    /// Records the backward pass of the sum of all results; `None` where Burn cannot record it, or
    /// no result depends on a parameter.
    fn backward(&self, results: &[DispatchTensor]) -> Option<(TensorId, Gradients)> {
        catch_quietly(|| {
            let total = results
                .iter()
                .filter(|tensor| autodiff_primitive(tensor).is_some_and(|t| t.is_tracked()))
                .map(|tensor| sum(tensor.clone()))
                .reduce(|a, b| a + b)?
                .into_dispatch();
            let grads = autodiff_primitive(&total)?.backward();
            let mut gradients = Vec::new();
            for parameter in &self.parameters {
                let leaf = self.leaves.get(&parameter.tensor);
                let Some(leaf) = leaf.and_then(autodiff_primitive) else {
                    continue;
                };
                let grad = leaf.grad(&grads).map(capture::from_primitive);
                gradients.push((parameter.clone(), grad.as_ref().and_then(id)));
            }
            Some((id(&total)?, gradients))
        })
        .ok()
        .flatten()
    }
}

/// The sum of a tensor whose rank is not known to the compiler.
fn sum(tensor: DispatchTensor) -> Tensor<1> {
    match tensor.shape().num_dims() {
        1 => Tensor::<1>::from_dispatch(tensor).sum(),
        2 => Tensor::<2>::from_dispatch(tensor).sum(),
        3 => Tensor::<3>::from_dispatch(tensor).sum(),
        4 => Tensor::<4>::from_dispatch(tensor).sum(),
        5 => Tensor::<5>::from_dispatch(tensor).sum(),
        _ => Tensor::<6>::from_dispatch(tensor).sum(),
    }
}

impl TensorMapper for Recorder<'_> {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        let autodiff = tensor.is_autodiff();
        Tensor::from_dispatch(self.input(&tensor.clone().into_dispatch(), autodiff))
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        Tensor::from_dispatch(self.input(&tensor.clone().into_dispatch(), false))
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        Tensor::from_dispatch(self.input(&tensor.clone().into_dispatch(), false))
    }
}

/// The tensors of a result.
#[derive(Default)]
struct Results {
    tensors: Vec<DispatchTensor>,
}

impl TensorMapper for Results {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        self.tensors.push(tensor.clone().into_dispatch());
        tensor.clone()
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        self.tensors.push(tensor.clone().into_dispatch());
        tensor.clone()
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.tensors.push(tensor.clone().into_dispatch());
        tensor.clone()
    }
}
