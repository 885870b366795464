//! What a graph computes from its parameters alone, whatever its inputs are.

use std::collections::{HashMap, HashSet};

use burn::backend::ir::TensorId;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Module;

use super::plan::Step;
use super::tensors::Alive;
use super::{compute, fill, values_of};
use crate::capture::signature;
use crate::interpret::Operands;
use crate::record::placeholders::Values;
use crate::{AsRecorded, Graph, GraphError, Recording, Tensors};

impl<O: Tensors> Recording<O> {
    /// Executes the recording with these values of [`Graph::parameters`], in their order, and inputs, as
    /// it was recorded: without a model. Hooks let their operands pass, and random numbers are the
    /// same each time.
    ///
    /// # Errors
    ///
    /// As [`execute`](Self::execute); [`GraphError::NoDevice`] without any parameter or input.
    pub fn evaluate(
        &self,
        parameters: &[DispatchTensor],
        inputs: &[DispatchTensor],
    ) -> Result<O, GraphError> {
        let found: Vec<_> = inputs.iter().map(signature).collect();
        if found != self.inputs || parameters.len() != self.graph.parameters.len() {
            return Err(GraphError::Mismatch {
                recorded: format!(
                    "{} parameters and inputs {:?}",
                    self.graph.parameters.len(),
                    self.inputs
                ),
                found: format!("{} and {found:?}", parameters.len()),
            });
        }
        let first = parameters.first().or(inputs.first());
        let device = first.map(TensorMetadata::device);
        let device = device.ok_or(GraphError::NoDevice)?;
        let rules = &AsRecorded;
        let graph = &self.graph;
        let alive = graph.run(parameters, inputs, device, rules, None, &mut ())?;
        let results = graph.outputs.iter().map(|id| alive.output(*id));
        Ok(self.filled(results.collect::<Result<_, _>>()?))
    }

    /// A result as the forward pass gave it, with these tensors: one for each of
    /// [`Graph::outputs`], in their order, computed by whoever runs the graph elsewhere.
    ///
    /// # Panics
    ///
    /// If there are fewer tensors than outputs.
    pub fn result(&self, tensors: Vec<DispatchTensor>) -> O {
        fill(&self.form, tensors)
    }
}

impl Graph {
    /// The values of [`parameters`](Self::parameters) in `model`, in their order: the stored ones,
    /// without what reparameterizations make of them.
    ///
    /// # Errors
    ///
    /// [`GraphError::Mismatch`] for a model without one of them, or with another shape.
    pub fn parameter_values<M: Module>(
        &self,
        model: &M,
    ) -> Result<Vec<DispatchTensor>, GraphError> {
        values_of(&Values::of(model), self)
    }

    /// The values of all tensors that do not depend on an input or on chance, for these values of
    /// the parameters: the parameters themselves, constants, and what is computed from them.
    ///
    /// # Errors
    ///
    /// [`GraphError::NoDevice`] without any parameter, [`GraphError::Operation`] for an operation
    /// that cannot be executed.
    pub fn constant_values(
        &self,
        parameters: &[DispatchTensor],
    ) -> Result<HashMap<TensorId, DispatchTensor>, GraphError> {
        let mut known: HashSet<TensorId> = self.constants.keys().copied().collect();
        known.extend(self.parameters.iter().map(|parameter| parameter.tensor));
        self.values_from(parameters, known, |_| true)
    }

    /// Of [`constant_values`](Self::constant_values) the `wanted` ones that are computed from the parameters at
    /// these positions alone, by way of wanted ones, and those parameters.
    ///
    /// # Errors
    ///
    /// As [`constant_values`](Self::constant_values).
    ///
    /// # Panics
    ///
    /// If a position is none of [`parameters`](Self::parameters).
    pub fn values_of_parameters(
        &self,
        parameters: &[DispatchTensor],
        positions: &[usize],
        wanted: impl Fn(TensorId) -> bool,
    ) -> Result<HashMap<TensorId, DispatchTensor>, GraphError> {
        let tensor = |position: &usize| self.parameters[*position].tensor;
        let known = positions.iter().map(tensor).collect();
        self.values_from(parameters, known, wanted)
    }

    /// The values of what is known, and of wanted tensors that are computed from it.
    fn values_from(
        &self,
        parameters: &[DispatchTensor],
        mut known: HashSet<TensorId>,
        wanted: impl Fn(TensorId) -> bool,
    ) -> Result<HashMap<TensorId, DispatchTensor>, GraphError> {
        let device = parameters.first().map(TensorMetadata::device);
        let device = device.ok_or(GraphError::NoDevice)?;
        let mut alive = Alive::new(self, parameters, &[], device, &AsRecorded);
        let mut values = HashMap::default();
        for id in &known {
            values.insert(*id, alive.output(*id)?);
        }
        let assignments = self.assign(&AsRecorded);
        for (node, assignment) in self.nodes().zip(assignments) {
            let operation = node.operation();
            let depends = operation.inputs().any(|input| !known.contains(&input.id));
            let is_wanted = operation.outputs().all(|output| wanted(output.id));
            if depends || !is_wanted || node.is_random() {
                continue;
            }
            alive.begin(node.index(), assignment, Step::of(node));
            // An operand that was given away at its last read is put back.
            for input in operation.inputs() {
                if let Some(value) = values.get(&input.id) {
                    alive.set(input, value.clone());
                }
            }
            compute(node, &mut alive)?;
            for output in operation.outputs() {
                known.insert(output.id);
                values.insert(output.id, alive.output(output.id)?);
            }
        }
        Ok(values)
    }
}
