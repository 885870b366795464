//! Whether gradients through a recording are those of the model.
//!
//! A recording does not show where a forward pass stops gradients. Burn's autodiff on the capture
//! device does: the backward pass that it records is that of the model. Both backward passes run
//! once, on the same numbers, and are compared.

mod compare;

use burn::backend::ir::{OperationIr, TensorId};
use burn::backend::ops::{BoolTensorOps, FloatTensorOps};
use burn::backend::{
    AutodiffBackend, Dispatch, DispatchAutodiffContext, DispatchDevice, DispatchTensor,
    TensorMetadata,
};
use burn::module::Module;
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Shape, Tensor, TensorData};
use burn_lean_reparam::{catch_quietly, reductions};

use crate::execute::device_of;
use crate::hooks::Noted;
use crate::interpret::{noise, noise_of};
use crate::record::placeholders::Values;
use crate::record::{Backward, Halves, Leaf, Seeks, Walked, record_with};
use crate::tensors::Given;
use crate::{AsRecorded, Graph, GraphError, Node, Observed, Observer, Recording, Tensors, passes};
use compare::compare;

/// Relative distance of gradients, in the L2 norm, from which on something is wrong.
///
/// Both passes compute the same formulas in F32 in another order, which is off by 1e-7 to 1e-4; a
/// gradient that is stopped is off by the share of its path.
const TOLERANCE: f64 = 3e-3;

/// The same in roundings of half, where these are more.
const ROUNDINGS: f64 = 8.0;

/// What [`Recording::verify_gradients`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verified {
    /// The gradients are those of the model.
    Same,
    /// Burn cannot record the backward pass of this model: nothing was compared.
    NotRecorded,
    /// Some gradients are infinite or NaN, with the weights moved a little: those were not compared.
    NotFinite,
    /// An input has no elements, a batch without examples say, and the backward pass over it panics, as that of Burn
    /// may where the forward pass does not: nothing was compared.
    NoElements,
}

/// Records as [`record`](crate::record()) does, and the backward pass with it, for
/// [`Recording::verify_gradients`].
///
/// # Errors
///
/// As [`record`](crate::record()).
pub fn record_with_backward<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    inputs: &I,
    forward: impl FnOnce(&M, I) -> O,
) -> Result<Recording<O>, GraphError> {
    let walked = Walked::of(model);
    record_with(walked, inputs, forward, Halves::AsStored, Seeks::Backward)
}

impl<O: Tensors> Recording<O> {
    /// Gives up the recorded backward pass, once it was compared.
    pub(crate) fn forget_backward(&mut self) {
        self.backward = None;
    }

    /// Compares the gradients of an execution with those of the recorded backward pass, on these
    /// values.
    ///
    /// Compared are those of the parameters that train and of the inputs that are tracked.
    ///
    /// Each is measured by its own size, and by how far it moves where operations round more: below 0.3 % it is
    /// the same, where something is computed in F16 below 0.8 %, in BF16 below 6 %.
    /// Before gradients are called different, the recorded backward pass runs once more, one operation
    /// after the other: Burn's kernel fusion may get its numbers wrong. No training runs it.
    ///
    /// Takes the time of two training steps in F32, once for each kind of forward pass, of three where some
    /// gradient is zero but for rounding, as that of a bias before a BatchNorm; and the memory of one, with a
    /// copy of the weights on the device and two or three sets of gradients on the host. Weights are moved for
    /// it by up to a twentieth, those that are zero too, so that none hides a difference and none changes its
    /// sign; a float input or constant that is zero everywhere, a mask of no example say, is 0.5 for it, and of a bool
    /// input that is the same everywhere every second element is the other, unless gradients are not finite then; of
    /// what is frozen no gradient is compared. The model is not touched, and no random numbers of the device are used up.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_graph::{GraphError, record_with_backward};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(4, 2).init(&device);
    /// let x = Tensor::<2>::ones([3, 4], &device);
    /// let recording = record_with_backward(&model, &x, |model, x| {
    ///     let y = model.forward(x);
    ///     (y.clone() * y.detach()).sum()
    /// })?;
    /// let error = recording.verify_gradients(&model, &x).unwrap_err();
    /// assert!(matches!(error, GraphError::StopsGradients { .. }));
    /// # Ok::<(), GraphError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`GraphError::StopsGradients`] with the parameter or input whose gradient differs most,
    /// [`GraphError::Panics`] where Burn panics in one of the passes, unless an input has no elements.
    pub fn verify_gradients<M: Module, I: Tensors>(
        &self,
        model: &M,
        inputs: &I,
    ) -> Result<Verified, GraphError> {
        let Some(backward) = &self.backward else {
            // No result has a gradient, in an execution neither.
            let is_detached = !self.tracked.is_empty() && !self.tracked.contains(&true);
            return Ok(match is_detached {
                true => Verified::Same,
                false => Verified::NotRecorded,
            });
        };
        if backward.gradients.is_empty() {
            // All parameters are frozen; a hook may have parameters.
            return Ok(Verified::Same);
        }
        let mut given = Given::default();
        let _ = inputs.map_tensors(&mut given);
        let device = device_of(model, &given.tensors)?;
        let inputs = given.tensors.into_iter().zip(&self.graph.inputs);
        let inputs: Vec<_> = inputs
            .map(|(value, id)| self.graph.as_recorded(without_autodiff(value), *id))
            .collect();
        let shown: Vec<_> = inputs.iter().cloned().map(visible).collect();
        let values = Values::of(model);
        let weights: Option<Vec<_>> = backward
            .parameters
            .iter()
            .map(|parameter| {
                let value = without_autodiff(values.get(parameter)?.clone());
                let value = self.graph.as_recorded(value, parameter.tensor);
                Some(match value.dtype().is_float() && !parameter.running {
                    true => moved(value),
                    false => value,
                })
            })
            .collect();
        let Some(weights) = weights else {
            return Err(GraphError::Mismatch {
                recorded: "another model".into(),
                found: "parameters of other shapes".into(),
            });
        };
        let found = backward.shown().compare_on(self, &weights, &shown, &device);
        let found = match found {
            // Perhaps for what was changed to be seen.
            Ok(Verified::NotFinite) => backward.compare_on(self, &weights, &inputs, &device),
            found => found,
        };
        let is_empty = |input: &DispatchTensor| input.shape().num_elements() == 0;
        match found {
            Err(GraphError::Panics {
                operation: "backward",
                ..
            }) if inputs.iter().any(is_empty) => Ok(Verified::NoElements),
            found => found,
        }
    }
}

impl Backward {
    /// With numbers in the place of constants that are zero everywhere, so that they hide nothing.
    fn shown(&self) -> Self {
        let is_zero = |data: &TensorData| {
            data.dtype().is_float() && data.iter::<f32>().all(|number| number == 0.0)
        };
        let shown = |data: &TensorData| match is_zero(data) {
            true => {
                let halves = vec![0.5f32; data.num_elements()];
                TensorData::new(halves, data.shape().clone()).convert_dtype(data.dtype())
            }
            false => data.clone(),
        };
        let constants = self.constants.iter();
        Self {
            constants: constants.map(|(id, data)| (*id, shown(data))).collect(),
            ..self.clone()
        }
    }

    /// Both backward passes, on these values.
    fn compare_on<O: Tensors>(
        &self,
        recording: &Recording<O>,
        weights: &[DispatchTensor],
        inputs: &[DispatchTensor],
        device: &DispatchDevice,
    ) -> Result<Verified, GraphError> {
        let plain = device.clone().inner();
        // Whatever the checkpointing strategy of the model: that of its leaves is none.
        let autodiff = Device::new(plain.clone()).autodiff();
        let autodiff = autodiff.as_dispatch().clone();
        let executed = self.executed_gradients(recording, weights, inputs, autodiff)?;
        let recorded = |look: &mut dyn FnMut(&Node<'_>, &mut Observed<'_, '_>)| {
            self.recorded_gradients(recording, weights, inputs, plain.clone(), Looks(look))
        };
        let is_stopped =
            |found: &Result<_, _>| matches!(found, Err(GraphError::StopsGradients { .. }));
        let (gradients, tolerance) = (&self.gradients, self.tolerance());
        let first = recorded(&mut |_, _| {})?;
        let found = compare(gradients, &first, &executed, None, tolerance);
        if !is_stopped(&found) {
            return found;
        }
        // What is zero but for rounding is off by all of its size: how much is rounding?
        let noisy = recorded(&mut perturb)?;
        let found = compare(gradients, &first, &executed, Some(&noisy), tolerance);
        if !is_stopped(&found) {
            return found;
        }
        // Kernel fusion has nothing to join where each operation waits for the device.
        let device = Device::new(plain.clone());
        let alone = recorded(&mut |_, _| {
            // What has failed says so where the gradients are read.
            let _ = device.sync();
        })?;
        compare(gradients, &alone, &executed, Some(&noisy), tolerance)
    }
}

impl Graph {
    /// A value of a parameter or an input in the dtype in which it was recorded.
    fn as_recorded(&self, value: DispatchTensor, id: TensorId) -> DispatchTensor {
        match self.stored.contains_key(&id) {
            true => Dispatch::float_cast(value, FloatDType::F32),
            false => value,
        }
    }
}

/// Looks at each operation of the recorded backward pass.
struct Looks<'a>(&'a mut dyn FnMut(&Node<'_>, &mut Observed<'_, '_>));

impl Observer for Looks<'_> {
    fn after(&mut self, node: &Node<'_>, tensors: &mut Observed<'_, '_>) {
        (self.0)(node, tensors);
    }
}

/// Operations that do not round.
const EXACT: [&str; 9] = [
    "max", "min", "abs", "neg", "clamp", "sign", "relu", "arg", "zeros",
];

/// Moves what an operation that rounds has computed by some roundings.
fn perturb(node: &Node<'_>, tensors: &mut Observed<'_, '_>) {
    let operation = node.operation();
    let rounds = matches!(
        operation,
        OperationIr::NumericFloat(..)
            | OperationIr::Float(..)
            | OperationIr::Activation(_)
            | OperationIr::Module(_)
    );
    if !rounds || EXACT.iter().any(|name| node.name().starts_with(name)) {
        return;
    }
    for output in operation.outputs() {
        if let Some(float) = output.dtype.finfo() {
            let share = roundings(output.dtype) * float.epsilon;
            let draw = node.index() as u64;
            tensors.replace(output.id, |value| off_by(value, share, draw));
        }
    }
}

/// By how many epsilons of its dtype a result is moved: of half by what it rounds, among more of which what is
/// stopped would be lost.
fn roundings(dtype: DType) -> f64 {
    match is_fine(dtype) {
        true => 16.0,
        false => 0.5,
    }
}

/// Whether it rounds little enough to be moved by much of it.
fn is_fine(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32)
}

/// Each number moved by up to so much of itself. In half, each operation otherwise: what moves in the same way a hundred times
/// adds up to more than rounding does.
fn off_by(tensor: DispatchTensor, share: f64, draw: u64) -> DispatchTensor {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    if shape.num_elements() == 0 {
        return tensor;
    }
    let (flat, device) = (Shape::new([shape.num_elements()]), tensor.device());
    let (noise, wide) = match is_fine(dtype) {
        true => (noise(flat, &device), FloatDType::from(dtype)),
        false => (noise_of(draw, flat, &device), FloatDType::F32),
    };
    // Of F64 roundings are nothing in F32, and half knows no number this close to 1.
    let noise = Tensor::<1>::from_dispatch(noise).cast(wide) * share + 1.0;
    let noise = Dispatch::float_reshape(noise.into_dispatch(), shape);
    let moved = Dispatch::float_mul(Dispatch::float_cast(tensor, wide), noise);
    Dispatch::float_cast(moved, FloatDType::from(dtype))
}

impl Backward {
    fn is_leaf(&self, id: TensorId) -> bool {
        self.gradients.iter().any(|(leaf, _)| leaf.tensor == id)
    }

    /// From where on gradients are different, by the coarsest dtype that something is computed in.
    fn tolerance(&self) -> f64 {
        let outputs = self.operations.iter().flat_map(|one| one.outputs());
        let floats = outputs.filter_map(|output| output.dtype.finfo());
        let rounding = floats.fold(0.0, |most: f64, float| most.max(float.epsilon));
        TOLERANCE.max(ROUNDINGS * rounding)
    }

    /// The gradients by the recorded backward pass: no autodiff.
    fn recorded_gradients<O>(
        &self,
        recording: &Recording<O>,
        weights: &[DispatchTensor],
        inputs: &[DispatchTensor],
        device: DispatchDevice,
        mut look: Looks<'_>,
    ) -> Result<Vec<Vec<f32>>, GraphError> {
        let outputs = self.gradients.iter().filter_map(|(_, id)| *id).collect();
        let graph = passes::as_recorded(
            self.operations.clone(),
            self.constants.clone(),
            self.parameters.clone(),
            recording.graph.inputs.clone(),
            outputs,
        );
        let alive = graph.run(
            &select(&graph, self, weights),
            inputs,
            device,
            &AsRecorded,
            None,
            &mut look,
        )?;
        self.gradients
            .iter()
            .map(|(leaf, id)| {
                Ok(match id {
                    Some(id) => host(alive.output(*id)?),
                    None => vec![0.0; leaf.elements],
                })
            })
            .collect()
    }

    /// The gradients by autodiff through an execution.
    fn executed_gradients<O>(
        &self,
        recording: &Recording<O>,
        weights: &[DispatchTensor],
        inputs: &[DispatchTensor],
        device: DispatchDevice,
    ) -> Result<Vec<Vec<f32>>, GraphError> {
        let graph = passes::simplify(
            self.operations.clone(),
            self.constants.clone(),
            self.parameters.clone(),
            recording.graph.inputs.clone(),
            vec![self.total],
            passes::Hooked {
                noted: Noted {
                    stopped: recording.graph.stopped.iter().copied().collect(),
                    ..Noted::default()
                },
                ..passes::Hooked::default()
            },
        );
        let with_gradient = |value: &DispatchTensor| {
            let leaf = <Dispatch as AutodiffBackend>::from_inner(value.clone());
            Dispatch::float_set_require_grad(leaf, true)
        };
        let leaves: Vec<_> = weights
            .iter()
            .zip(&self.parameters)
            .map(
                |(weight, parameter)| match weight.dtype().is_float() && !parameter.running {
                    true => with_gradient(weight),
                    false => weight.clone(),
                },
            )
            .collect();
        let ids = &recording.graph.inputs;
        let inputs: Vec<_> = inputs
            .iter()
            .zip(ids)
            .map(|(input, id)| match self.is_leaf(*id) {
                true => with_gradient(input),
                false => input.clone(),
            })
            .collect();
        let alive = graph.run(
            &select(&graph, self, &leaves),
            &inputs,
            device,
            &AsRecorded,
            None,
            &mut (),
        )?;
        let total = alive.output(*graph.outputs.first().unwrap_or(&self.total))?;
        // The backward pass of a batch without examples, or of more than the memory holds.
        let gradients = catch_quietly(|| {
            let grads = <Dispatch as AutodiffBackend>::backward(total);
            let of = |(leaf, _): &(Leaf, Option<TensorId>)| {
                let input = ids.iter().position(|id| *id == leaf.tensor);
                let value = match input {
                    Some(input) => &inputs[input],
                    None => &leaves[position(self, leaf.tensor)],
                };
                match <Dispatch as AutodiffBackend>::grad(value, &grads) {
                    Some(grad) => host(grad),
                    None => vec![0.0; leaf.elements],
                }
            };
            self.gradients.iter().map(of).collect()
        });
        gradients.map_err(|reason| GraphError::Panics {
            operation: "backward",
            module: "the forward pass".into(),
            reason,
        })
    }
}

fn position(backward: &Backward, parameter: TensorId) -> usize {
    backward
        .parameters
        .iter()
        .position(|other| other.tensor == parameter)
        .expect("gradients are of recorded parameters and inputs")
}

/// The values of the parameters that the graph has kept.
fn select(graph: &Graph, backward: &Backward, values: &[DispatchTensor]) -> Vec<DispatchTensor> {
    graph
        .parameters
        .iter()
        .map(|parameter| values[position(backward, parameter.tensor)].clone())
        .collect()
}

fn without_autodiff(tensor: DispatchTensor) -> DispatchTensor {
    if tensor.autodiff == DispatchAutodiffContext::Disabled {
        return tensor;
    }
    let dtype = tensor.dtype();
    if dtype.is_float() {
        <Dispatch as AutodiffBackend>::inner(tensor)
    } else if dtype.is_bool() {
        <Dispatch as AutodiffBackend>::bool_inner(tensor)
    } else {
        <Dispatch as AutodiffBackend>::int_inner(tensor)
    }
}

fn host(tensor: DispatchTensor) -> Vec<f32> {
    let count = tensor.shape().num_elements();
    let flat = Dispatch::float_reshape(without_autodiff(tensor), Shape::new([count]));
    Tensor::<1>::from_dispatch(flat)
        .into_data()
        .iter::<f32>()
        .collect()
}

/// An input that is zero everywhere hides what it is a factor of.
fn visible(input: DispatchTensor) -> DispatchTensor {
    let shape = input.shape();
    if shape.num_elements() == 0 {
        return input;
    }
    let flat = Shape::new([shape.num_elements()]);
    if input.dtype().is_bool() {
        let values = Tensor::<1, Bool>::from_dispatch(Dispatch::bool_reshape(input.clone(), flat));
        let [any, all] = [
            reductions::any(values.clone()),
            reductions::all(values.clone()),
        ];
        if any.into_scalar::<bool>() != all.into_scalar::<bool>() {
            return input;
        }
        let elements = shape.num_elements() as i64;
        let places = Tensor::<1, Int>::arange(0..elements, &values.device());
        let other = values.not_equal(places.remainder_scalar(2).equal_elem(0));
        return Dispatch::bool_reshape(other.into_dispatch(), shape);
    }
    if !input.dtype().is_float() {
        return input;
    }
    let dtype = FloatDType::from(input.dtype());
    let values = Tensor::<1>::from_dispatch(Dispatch::float_reshape(input.clone(), flat));
    let largest = reductions::max(values.clone().abs()).cast(FloatDType::F32);
    match largest.into_scalar::<f32>() == 0.0 {
        true => {
            let filled = values.full_like(0.5).cast(dtype);
            Dispatch::float_reshape(filled.into_dispatch(), shape)
        }
        false => input,
    }
}

/// A weight that is moved by up to a twentieth of each of its numbers, and of 1 where one is zero.
fn moved(weight: DispatchTensor) -> DispatchTensor {
    let (shape, dtype) = (weight.shape(), weight.dtype());
    // GPU backends have no kernel over no elements.
    if shape.num_elements() == 0 {
        return weight;
    }
    let flat = Shape::new([shape.num_elements()]);
    let noise = noise(flat.clone(), &weight.device());
    let noise = Tensor::<1>::from_dispatch(noise).mul_scalar(0.05);
    let weight = Tensor::<1>::from_dispatch(Dispatch::float_reshape(weight, flat));
    let is_zero = weight.clone().equal_elem(0.0);
    let size = weight.clone().mask_fill(is_zero, 1.0);
    let moved = weight + noise.cast(FloatDType::from(dtype)) * size;
    Dispatch::float_reshape(moved.into_dispatch(), shape)
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};

    use super::*;
    use crate::record;

    #[test]
    fn results_are_moved_by_some_roundings_of_their_dtype() {
        let device = Device::flex();
        let model: Linear = LinearConfig::new(1, 1).init(&device);
        for dtype in [
            FloatDType::F64,
            FloatDType::F32,
            FloatDType::F16,
            FloatDType::BF16,
        ] {
            let x = Tensor::<1>::from_floats([0.3, -1.7, 5.0, 100.0], &device).cast(dtype);
            let recording = record(&model, &x, |_, x: Tensor<1>| x * 1.5).unwrap();
            let run = |look: &mut dyn FnMut(&Node<'_>, &mut Observed<'_, '_>)| -> Vec<f64> {
                let y = recording.execute_observed(&model, &x, &AsRecorded, &mut Looks(look));
                y.unwrap().into_data().iter::<f64>().collect()
            };
            let (exact, moved) = (run(&mut |_, _| {}), run(&mut perturb));
            let off = exact.iter().zip(&moved).map(|(a, b)| ((a - b) / a).abs());
            let off = off.fold(0.0, f64::max) / dtype.finfo().epsilon;
            let most = roundings(dtype.into());
            // The factor and the product are rounded, too.
            assert!(off >= 0.5 && off < most + 2.0, "{dtype:?}: {off}");
        }
    }
}
