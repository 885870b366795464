//! An ONNX model, loaded.

use std::fmt;
use std::sync::Arc;

use rten::{Model, ModelOptions, NodeId, RunOptions, ThreadPool, Value, ValueOrView};

use crate::onnx::part;
use crate::{DeployError, Initializer, OnnxModel, OnnxNode};

/// A loaded model.
pub(crate) struct Program {
    model: Model,
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
    pool: Arc<ThreadPool>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Program")
    }
}

impl Program {
    /// From the bytes of a model, by the names of its inputs and outputs.
    pub(crate) fn load(
        bytes: Vec<u8>,
        onnx: &OnnxModel,
        pool: Arc<ThreadPool>,
    ) -> Result<Self, DeployError> {
        let inputs: Vec<_> = onnx.inputs.iter().map(|one| &one.name[..]).collect();
        let outputs: Vec<_> = onnx.outputs.iter().map(|one| &one.name[..]).collect();
        Self::named(bytes, &inputs, &outputs, pool)
    }

    /// Some nodes of a model.
    pub(crate) fn part(
        nodes: &[OnnxNode],
        initializers: &[Initializer],
        inputs: &[&str],
        outputs: &[&str],
        pool: Arc<ThreadPool>,
    ) -> Result<Self, DeployError> {
        let bytes = part(nodes, initializers, inputs, outputs);
        Self::named(bytes, inputs, outputs, pool)
    }

    fn named(
        bytes: Vec<u8>,
        inputs: &[&str],
        outputs: &[&str],
        pool: Arc<ThreadPool>,
    ) -> Result<Self, DeployError> {
        let model = open(bytes)?;
        let find = |names: &[&str]| -> Result<Vec<NodeId>, DeployError> {
            let ids = names.iter().map(|name| model.node_id(name));
            ids.map(|id| id.map_err(failed)).collect()
        };
        Ok(Self {
            inputs: find(inputs)?,
            outputs: find(outputs)?,
            model,
            pool,
        })
    }

    /// A model with the inputs and outputs that its file names.
    pub(crate) fn from_bytes(bytes: Vec<u8>, pool: Arc<ThreadPool>) -> Result<Self, DeployError> {
        let model = open(bytes)?;
        Ok(Self {
            inputs: model.input_ids().to_vec(),
            outputs: model.output_ids().to_vec(),
            model,
            pool,
        })
    }

    pub(crate) fn input_count(&self) -> usize {
        self.inputs.len()
    }

    /// Its outputs for values, which are its own or lent.
    pub(crate) fn run<'a>(
        &self,
        values: Vec<impl Into<ValueOrView<'a>>>,
    ) -> Result<Vec<Value>, DeployError> {
        let inputs = self.inputs.iter().copied();
        let inputs = inputs
            .zip(values)
            .map(|(id, value)| (id, value.into()))
            .collect();
        let options = RunOptions::default().with_thread_pool(Some(self.pool.clone()));
        let run = self.model.run(inputs, &self.outputs, Some(options));
        run.map_err(|error| DeployError::Run {
            reason: error.to_string(),
        })
    }
}

fn open(bytes: Vec<u8>) -> Result<Model, DeployError> {
    // Packed copies of the weights would double them, and were not faster.
    let model = ModelOptions::with_all_ops()
        .prepack_weights(false)
        .load(bytes);
    model.map_err(failed)
}

fn failed(error: impl fmt::Display) -> DeployError {
    DeployError::Load {
        reason: error.to_string(),
    }
}
