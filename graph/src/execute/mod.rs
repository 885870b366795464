//! Running a graph on a device, under rules.

mod constants;
mod lean;
mod observe;
mod plan;
mod random;
mod recompute;
mod rounding_error;
mod storage;
mod tensors;
mod write_back;

use std::any::type_name_of_val;

use burn::backend::ir::TensorId;
use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_reparam::catch_quietly;

use crate::capture::signature;
use crate::hooks::{self, Carried, ForwardPass, HookedAt};
use crate::interpret::{Operands, run};
use crate::record::placeholders::Values;
use crate::rules::is_castable;
use crate::tensors::Given;
use crate::{Graph, GraphError, Node, Recording, Rules, TensorMapper, Tensors, model_device};
pub use observe::{Observed, Observer};
use plan::Plan;
use random::instead_of_random;
pub use storage::HalfStorage;
use tensors::Alive;

pub(crate) use tensors::upload;
pub(crate) use write_back::store;
pub use write_back::{ReplacedState, replaced_states};

impl<O: Tensors> Recording<O> {
    /// Executes the recording with these values of parameters and inputs, on the device of
    /// `model`.
    ///
    /// Autodiff takes part as it does in the model's own pass: gradients arrive at the parameters
    /// of `model`, and what the closure detaches is detached as far as the recording knows of it.
    /// Running states of `model`, the statistics of a BatchNorm say, are updated as its own pass
    /// would, at once.
    ///
    /// # Errors
    ///
    /// [`GraphError::Mismatch`] where model or inputs are not shaped as the recorded ones,
    /// [`GraphError::SeveralDevices`], [`GraphError::Operation`] for an operation that cannot be executed,
    /// [`GraphError::Panics`] where Burn panics in one.
    pub fn execute<M: Module, I: Tensors>(
        &self,
        model: &M,
        inputs: &I,
        rules: &impl Rules,
    ) -> Result<O, GraphError> {
        self.execute_observed(model, inputs, rules, &mut ())
    }

    /// [`execute`](Self::execute), with somebody who looks at each operation.
    ///
    /// # Errors
    ///
    /// As [`execute`](Self::execute).
    pub fn execute_observed<M: Module, I: Tensors>(
        &self,
        model: &M,
        inputs: &I,
        rules: &impl Rules,
        observer: &mut impl Observer,
    ) -> Result<O, GraphError> {
        let mut given = Given::default();
        let _ = inputs.map_tensors(&mut given);
        if given.signature != self.inputs {
            return Err(GraphError::Mismatch {
                recorded: format!("inputs {:?}", self.inputs),
                found: format!("{:?}", given.signature),
            });
        }
        let results = self.graph.execute(model, &given.tensors, rules, observer)?;
        Ok(self.filled(results))
    }

    /// The result with these tensors, detached where the forward pass detaches them.
    fn filled(&self, results: Vec<DispatchTensor>) -> O {
        let results = results.into_iter().enumerate();
        let results = results.map(|(index, tensor)| match self.tracked.get(index) {
            Some(false) if tensor.dtype().is_float() => Dispatch::float_detach(tensor),
            _ => tensor,
        });
        fill(&self.form, results.collect())
    }
}

/// A result of this form with these tensors.
pub(crate) fn fill<O: Tensors>(form: &O, tensors: Vec<DispatchTensor>) -> O {
    struct Fill(std::vec::IntoIter<DispatchTensor>);
    impl Fill {
        fn next(&mut self) -> DispatchTensor {
            self.0
                .next()
                .expect("a form shows as many tensors each time that it is walked")
        }
    }
    impl TensorMapper for Fill {
        crate::every_kind!(|self, _| Tensor::from_dispatch(self.next()));
    }
    form.map_tensors(&mut Fill(tensors.into_iter()))
}

/// Runs an operation; a failure says of which module.
pub(crate) fn compute(node: Node<'_>, operands: &mut impl Operands) -> Result<(), GraphError> {
    let module = || match node.module() {
        "?" => "a module that is not known".into(),
        module => format!("`{module}`"),
    };
    match catch_quietly(|| run(node.operation(), operands)) {
        Ok(done) => done.map_err(|unsupported| GraphError::Operation {
            operation: unsupported.name,
            module: module(),
            why: unsupported.why.into(),
        }),
        Err(reason) => Err(GraphError::Panics {
            operation: node.name(),
            module: module(),
            reason,
        }),
    }
}

impl Graph {
    /// The results, in order.
    fn execute<M: Module>(
        &self,
        model: &M,
        inputs: &[DispatchTensor],
        rules: &impl Rules,
        observer: &mut impl Observer,
    ) -> Result<Vec<DispatchTensor>, GraphError> {
        let device = device_of(model, inputs)?;
        if self.parameters.iter().any(|parameter| parameter.running) {
            // Takes in what passes without a recording have left in running states: Burn would do so
            // later, over what this one leaves.
            hooks::sharing(|| drop(model.valid()));
        }
        let (values, carried) = (Values::of(model), hooks::offered(model));
        self.check_hooks(&carried)?;
        let given = values_of(&values, self)?;
        let alive = self.run(&given, inputs, device, rules, Some(&carried), observer)?;
        hooks::sharing(|| write_back::write_back(model, &self.parameters, &alive))?;
        let results = rules.results();
        self.outputs
            .iter()
            .map(|id| {
                let tensor = alive.output(*id)?;
                Ok(match results {
                    Some(dtype) => cast(tensor, dtype),
                    None => tensor,
                })
            })
            .collect()
    }

    /// Whether these are the hooks of the recorded model.
    pub(crate) fn check_hooks(&self, carried: &[Carried]) -> Result<(), GraphError> {
        let recorded = self.hooks.iter().map(|hook| hook.path.as_str());
        match recorded.eq(carried.iter().map(|one| one.path.as_str())) {
            true => Ok(()),
            false => Err(GraphError::Mismatch {
                recorded: format!(
                    "a model with {} quantizers or other hooks",
                    self.hooks.len()
                ),
                found: format!("one with {} at other paths", carried.len()),
            }),
        }
    }

    /// All operations, with these values of parameters and inputs; what is alive afterwards.
    ///
    /// Without hooks they let their operands pass, and the same numbers are put in the place of
    /// random ones each time: for a comparison of two executions.
    pub(crate) fn run<'a>(
        &'a self,
        parameters: &[DispatchTensor],
        inputs: &[DispatchTensor],
        device: DispatchDevice,
        rules: &impl Rules,
        hooks: Option<&[Carried]>,
        observer: &mut impl Observer,
    ) -> Result<Alive<'a>, GraphError> {
        self.check_devices(parameters, inputs, &device)?;
        let _pass = hooks.map(|_| ForwardPass::alone());
        let mut alive = Alive::new(self, parameters, inputs, device, rules);
        let key = rules.key().map(|key| (type_name_of_val(rules), key));
        let plan = self.kept.of(key, || Plan::new(self, rules));
        let Plan { assignments, steps } = &*plan;
        for (node, (assignment, step)) in self.nodes().zip(assignments.iter().zip(steps)) {
            alive.begin(node.index(), *assignment, *step);
            observer.before(&node, &Observed(&mut alive));
            let operation = node.operation();
            let carried = step.hook.and_then(|position| hooks?.get(position));
            if hooks.is_none()
                && let Some(value) = instead_of_random(operation, &alive.device())
                && let Some(out) = operation.outputs().next()
            {
                alive.set(out, value);
            } else if let Some(carried) = carried {
                self.call(carried, node, &mut alive)?;
            } else if let Some(norm) = self.batch_norm(operation) {
                let [x, gamma, beta] =
                    [&norm.x, &norm.gamma, &norm.beta].map(|tensor| alive.float(tensor));
                let epsilon = norm.epsilon.elem();
                let result = Dispatch::batch_norm_train(x, gamma, beta, epsilon);
                alive.set(&norm.out, result.output);
                alive.set(&norm.mean, result.mean);
                alive.set(&norm.variance, result.variance);
            } else if !alive.compute_lean(self, node, assignments) {
                compute(node, &mut alive)?;
            }
            observer.after(&node, &mut Observed(&mut alive));
            alive.end(node.index());
        }
        Ok(alive)
    }

    /// Refuses a parameter or an input that is elsewhere and that an operation reads.
    pub(crate) fn check_devices(
        &self,
        parameters: &[DispatchTensor],
        inputs: &[DispatchTensor],
        device: &DispatchDevice,
    ) -> Result<(), GraphError> {
        let plain = |device: DispatchDevice| match Device::new(device) {
            device if device.is_autodiff() => device.inner(),
            device => device,
        };
        let here = plain(device.clone());
        let is_read = |id: TensorId| {
            let mut nodes = self.nodes();
            nodes.any(|node| node.operation().inputs().any(|read| read.id == id))
        };
        let of_parameters = self.parameters.iter().map(|parameter| parameter.tensor);
        let of_parameters = parameters.iter().zip(of_parameters);
        let of_inputs = inputs.iter().zip(self.inputs.iter().copied());
        let elsewhere = of_parameters.chain(of_inputs).enumerate();
        let elsewhere =
            elsewhere.map(|(position, (tensor, id))| (position, plain(tensor.device()), id));
        let mut elsewhere = elsewhere.filter(|(_, found, id)| *found != here && is_read(*id));
        let Some((position, found, _)) = elsewhere.next() else {
            return Ok(());
        };
        Err(GraphError::SeveralDevices {
            what: match position.checked_sub(parameters.len()) {
                None => format!("`{}`", self.parameters[position].path),
                Some(index) => format!("tensor {index} of the input"),
            },
            found: format!("{found:?}"),
            device: format!("{here:?}"),
        })
    }

    /// Has a hook of the model compute its node.
    fn call(
        &self,
        carried: &Carried,
        node: Node<'_>,
        alive: &mut Alive<'_>,
    ) -> Result<(), GraphError> {
        let operation = node.operation();
        let (Some(input), Some(output)) = (operation.inputs().next(), operation.outputs().next())
        else {
            return Ok(());
        };
        let value = alive.stored(input);
        let at = HookedAt {
            node,
            device: Device::new(alive.device()),
        };
        let made = carried.hook.apply(value, &at);
        let made = made.map_err(|why| GraphError::Hook {
            path: carried.path.clone(),
            why,
        })?;
        alive.set(output, made);
        Ok(())
    }
}

/// Where a model or, without one, its inputs are.
pub(crate) fn device_of<M: Module>(
    model: &M,
    inputs: &[DispatchTensor],
) -> Result<DispatchDevice, GraphError> {
    model_device(model)
        .map(|device| device.as_dispatch().clone())
        .or_else(|| inputs.first().map(TensorMetadata::device))
        .ok_or(GraphError::NoDevice)
}

/// The values that a model has for the parameters of a graph, in their order.
pub(crate) fn values_of(values: &Values, graph: &Graph) -> Result<Vec<DispatchTensor>, GraphError> {
    let of = |parameter| {
        let value: Option<&DispatchTensor> = values.get(parameter);
        value.cloned().ok_or_else(|| GraphError::Mismatch {
            recorded: format!("`{}` of shape {:?}", parameter.path, parameter.shape),
            found: "a model without it".into(),
        })
    };
    graph.parameters.iter().map(of).collect()
}

/// A cast that is recorded only where it changes something.
pub(crate) fn cast(tensor: DispatchTensor, dtype: FloatDType) -> DispatchTensor {
    let (_, from) = signature(&tensor);
    match is_castable(from) && from != dtype.into() {
        true => Dispatch::float_cast(tensor, dtype),
        false => tensor,
    }
}
