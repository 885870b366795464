//! A way in which a model can be run here.

use burn::backend::DispatchTensor;
use burn_lean_graph::{GraphError, Recording, Tensors};
use burn_lean_reparam::catch_quietly;
use rten::Value;

use super::Backend;
use super::division;
use super::example::Example;
use super::own::Runner;
use super::pools::Pools;
use super::program::Program;
use super::report::{SparseLayer, SparseOutcome};
use super::values::{given, results};
use crate::{DeployError, Execution, Exported, OnnxModel};

/// A way to run a model.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) backend: Backend,
    /// Without operations and constants: what runs holds them itself.
    pub(super) exported: Exported,
    pub(super) way: Way,
    /// What tells it from others of the backend.
    pub(super) note: &'static str,
    /// Where zeros are left out: its weights that have many.
    pub(super) sparse: Vec<SparseLayer>,
    pub(super) resident_bytes: usize,
}

#[derive(Debug)]
pub(super) enum Way {
    /// With the parameters, of which quantized ones have the values of their codes.
    Burn(Vec<DispatchTensor>),
    Rten(Box<Program>),
    Own(Box<Runner>),
}

pub(super) type Kind = (Backend, &'static str);

impl Candidate {
    pub(super) fn own(exported: &Exported, runner: Runner, note: &'static str) -> Self {
        Self {
            backend: Backend::Own,
            exported: exported.without_constants(),
            note,
            sparse: Vec::new(),
            resident_bytes: runner.resident_bytes(),
            way: Way::Own(Box::new(runner)),
        }
    }

    /// Lets go of the constants before rten makes its own of them.
    pub(super) fn rten(
        mut exported: Exported,
        pools: &Pools,
        note: &'static str,
    ) -> Result<Self, DeployError> {
        let resident_bytes = exported.model.constant_bytes();
        let OnnxModel {
            nodes,
            initializers,
            outputs,
            ..
        } = &mut exported.model;
        let outputs: Vec<&str> = outputs.iter().map(|info| info.name.as_str()).collect();
        division::write_out(nodes, initializers, &outputs);
        let bytes = exported.model.to_bytes()?;
        let bare = exported.without_constants();
        drop(exported);
        let program = Program::load(bytes, &bare.model, pools.rten())?;
        Ok(Self {
            backend: Backend::Rten,
            exported: bare,
            way: Way::Rten(Box::new(program)),
            note,
            sparse: Vec::new(),
            resident_bytes,
        })
    }

    pub(super) fn resident_bytes(&self) -> usize {
        self.resident_bytes
    }

    /// What tells it from all others.
    pub(super) fn kind(&self) -> Kind {
        (self.backend, self.note)
    }

    pub(super) fn is_integer(&self) -> bool {
        self.integers() > 0
    }

    pub(super) fn is_burn(&self) -> bool {
        matches!(self.way, Way::Burn(_))
    }

    /// How many layers are computed in integers.
    pub(super) fn integers(&self) -> usize {
        let layers = self.exported.layers.iter();
        layers.filter(|layer| layer.is_integer()).count()
    }

    pub(super) fn name(&self) -> String {
        match self.note {
            "" => self.backend.to_string(),
            note => format!("{}, {note}", self.backend),
        }
    }

    /// The results of a way that is not Burn's; where it panics, an error.
    pub(super) fn compute(&self, values: Vec<Value>) -> Result<Vec<Value>, DeployError> {
        let made = catch_quietly(|| match &self.way {
            Way::Rten(program) => program.run(values),
            Way::Own(runner) => runner.run(values),
            Way::Burn(_) => Ok(Vec::new()),
        });
        made.map_err(|reason| DeployError::Run { reason })?
    }

    /// One run as [`Engine::run`](super::Engine::run) does it, with the result on the host: a device may
    /// compute later, and reading waits for it.
    pub(super) fn run<O: Tensors>(
        &self,
        recording: &Recording<O>,
        example: &Example,
    ) -> Result<(), DeployError> {
        if let Way::Burn(parameters) = &self.way {
            let result = evaluate(recording, parameters, &example.tensors)?;
            return given(&result).map(drop);
        }
        let made = self.compute(example.read()?)?;
        match &example.device {
            Some(device) => {
                let tensors = results(made, &self.exported.model.outputs, device)?;
                given(&recording.result(tensors)).map(drop)
            }
            None => Ok(()),
        }
    }
}

impl Candidate {
    /// What became of weights with many zeros, where this one runs the model.
    pub(super) fn zeros(&mut self, mut zeros: Vec<SparseLayer>) -> Vec<SparseLayer> {
        if !self.sparse.is_empty() {
            for layer in &mut self.exported.layers {
                let left_out = |one: &SparseLayer| one.path == layer.path && one.is_left_out();
                if self.sparse.iter().any(left_out) {
                    layer.execution = Execution::Sparse;
                }
            }
            return self.sparse.clone();
        }
        for layer in zeros.iter_mut().filter(|layer| layer.is_left_out()) {
            layer.outcome = SparseOutcome::OtherWay;
        }
        zeros
    }
}

/// What Burn makes of the recorded shapes; where it panics, an error.
pub(super) fn evaluate<O: Tensors>(
    recording: &Recording<O>,
    parameters: &[DispatchTensor],
    inputs: &[DispatchTensor],
) -> Result<O, DeployError> {
    let made = catch_quietly(|| recording.evaluate(parameters, inputs));
    let made = made.map_err(|reason| DeployError::Run { reason })?;
    made.map_err(|error| match error {
        GraphError::Panics { .. } => DeployError::Run {
            reason: error.to_string(),
        },
        error => error.into(),
    })
}
