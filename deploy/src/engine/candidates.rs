//! The ways in which a model can be run here.

use burn::backend::DispatchTensor;
use burn_lean_graph::{GraphError, Recording, Tensors};
use burn_lean_kernels::Storage;
use burn_lean_reparam::catch_quietly;
use rten::Value;

use super::example::Example;
use super::integers::check_integers;
use super::own::{Keep, Runner};
use super::pools::Pools;
use super::program::Program;
use super::report::{SparseLayer, SparseOutcome};
use super::values::{given, results};
use super::{Arithmetic, Backend, EngineConfig, FloatStorage, integer_kernels};
use crate::export::Limits;
use crate::{DeployError, Execution, Export, Exported, Form, LayerReport, OnnxModel};

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
    sparse: Vec<SparseLayer>,
    resident_bytes: usize,
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
    fn own(exported: &Exported, runner: Runner, note: &'static str) -> Self {
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
    fn rten(exported: Exported, pools: &Pools, note: &'static str) -> Result<Self, DeployError> {
        let resident_bytes = exported.model.constant_bytes();
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
        layers.filter(|layer| is_integer(layer)).count()
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

/// What is known when all ways were made.
pub(super) struct Made {
    pub(super) example: Example,
    /// Float weights of which half is zero.
    pub(super) zeros: Vec<SparseLayer>,
}

/// Makes what a configuration allows, one way after another, each for `take`; an error for what cannot run
/// the model. What `take` drops has gone before the next one is made.
pub(super) fn each<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pools: &Pools,
    mut take: impl FnMut(Result<Candidate, DeployError>, &Example),
) -> Result<Made, DeployError> {
    let allowed = |backend| config.backend.is_none_or(|one| one == backend);
    let forced = config.backend.is_some();
    let weights = export.weights()?;
    let own = Limits {
        no_volumes: true,
        engine_operators: true,
        wide_integers: true,
        ..Limits::default()
    };
    let mut integer = None;
    let mut reasons = None;
    if config.arithmetic != Arithmetic::Float {
        let written = export.write(&weights, Form::Integer, own)?;
        match written.layers.iter().any(is_integer) {
            true => integer = Some(written),
            // The same model, with the reasons why.
            false => reasons = Some(written.layers),
        }
    }
    let floats = config.arithmetic != Arithmetic::Integer || integer.is_none();
    let float = || -> Result<Exported, DeployError> {
        let mut float = export.write(&weights, Form::Float, own)?;
        if let Some(layers) = &reasons {
            float.layers.clone_from(layers);
        }
        Ok(float)
    };
    // Made once it is needed: it is the largest.
    let mut early = None;
    let model = match &integer {
        Some(integer) => &integer.model,
        None => &early.insert(float()?).model,
    };
    if config.backend != Some(Backend::Burn) {
        check_integers(model)?;
    }
    // Burn's threads are those of the pool that calls.
    let burn = floats && allowed(Backend::Burn) && (config.threads == 0 || forced);
    if !burn && config.backend != Some(Backend::Burn) {
        check_volumes(model)?;
    }
    let example = Example::of(export, &model.inputs, 0)?;
    let (storage, note) = match config.weights {
        FloatStorage::F32 => (Storage::F32, ""),
        FloatStorage::F16 => (Storage::F16, "weights in F16"),
        FloatStorage::BF16 => (Storage::BF16, "weights in BF16"),
    };
    let keep = Keep {
        floats: storage,
        ..Keep::default()
    };
    let packed = |exported: &Exported, keep, note| {
        let runner = Runner::new(&exported.model, keep, pools)?;
        Ok(Candidate::own(exported, runner, note))
    };
    let mut is_loaded = false;
    if let Some(integer) = integer {
        if allowed(Backend::Own) {
            take(packed(&integer, keep, "integers"), &example);
            let many_rows = Keep {
                many_rows: true,
                ..keep
            };
            if let Ok(runner) = Runner::new(&integer.model, many_rows, pools)
                && runner.has_many_rows()
            {
                let one = Candidate::own(&integer, runner, "integers, for many rows");
                take(Ok(one), &example);
            }
        }
        drop(integer);
        let kernels = integer_kernels();
        // Where its products are exact as they are; elsewhere they were never faster.
        if allowed(Backend::Rten) && (forced || !kernels.products_saturate) {
            let limits = Limits {
                narrow_products: kernels.products_saturate,
                no_convolutions: !kernels.exact_convolutions,
                no_volumes: true,
                narrow_blocks: true,
                no_zero_points: true,
                engine_operators: false,
                wide_integers: true,
            };
            let written = export.write(&weights, Form::Integer, limits)?;
            // Weights alone it dequantizes in every run.
            let pays = |layer: &LayerReport| match forced {
                true => is_integer(layer),
                false => matches!(layer.execution, Execution::Integer),
            };
            match written.layers.iter().any(pays) {
                true => {
                    is_loaded = true;
                    take(Candidate::rten(written, pools, "integers"), &example);
                }
                false if !floats => take(Err(no_kernel(&written.layers)), &example),
                false => {}
            }
        }
    }
    let mut zeros = Vec::new();
    if !floats {
        return Ok(Made { example, zeros });
    }
    let float = match early {
        Some(float) => float,
        None => float()?,
    };
    drop(weights);
    if allowed(Backend::Own) {
        take(packed(&float, keep, note), &example);
        if storage != Storage::F32 && !forced {
            take(packed(&float, Keep::default(), ""), &example);
        }
        let sparse = Keep {
            sparse: true,
            ..keep
        };
        if let Ok(mut runner) = Runner::new(&float.model, sparse, pools)
            && let Ok(Ok(layers)) = catch_quietly(|| runner.settle(example.values.clone()))
        {
            if layers.iter().any(SparseLayer::is_left_out) {
                let mut one = Candidate::own(&float, runner, "sparse");
                one.sparse = layers.clone();
                take(Ok(one), &example);
            }
            zeros = layers;
        }
    }
    let bare = float.without_constants();
    let constant_bytes = float.model.constant_bytes();
    let loads = !forced || !is_loaded || config.arithmetic == Arithmetic::Fastest;
    if allowed(Backend::Rten) && loads {
        take(Candidate::rten(float, pools, ""), &example);
    }
    if burn {
        let one = Candidate {
            backend: Backend::Burn,
            exported: bare,
            way: Way::Burn(export.rounded_parameters()?),
            note: "",
            sparse: Vec::new(),
            resident_bytes: constant_bytes,
        };
        take(Ok(one), &example);
    }
    Ok(Made { example, zeros })
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

/// rten reads convolutions along three axes, and does not run them.
fn check_volumes(model: &OnnxModel) -> Result<(), DeployError> {
    let weights = model.initializers.iter().filter(|one| one.shape.len() == 5);
    let volumes: Vec<&str> = weights.map(|one| one.name.as_str()).collect();
    let mut nodes = model.nodes.iter();
    let found = nodes.find_map(|node| {
        let is_convolution = matches!(node.operator(), "Conv" | "ConvTranspose");
        let weight = node.inputs.get(1).filter(|_| is_convolution)?;
        volumes.contains(&weight.as_str()).then_some(weight)
    });
    match found {
        None => Ok(()),
        Some(weight) => Err(DeployError::Load {
            reason: format!(
                "`{weight}` is of a convolution along three axes, which Burn alone runs"
            ),
        }),
    }
}

pub(super) fn is_integer(layer: &LayerReport) -> bool {
    matches!(
        layer.execution,
        Execution::Integer | Execution::WeightsInteger
    )
}

/// Of layers with codes, none of which rten computes in integers.
fn no_kernel(layers: &[LayerReport]) -> DeployError {
    // Most share a reason.
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for layer in layers {
        let Some(reason) = &layer.reason else {
            continue;
        };
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, paths)) => paths.push(&layer.path),
            None => reasons.push((reason, vec![&layer.path])),
        }
    }
    let said = reasons.iter().map(|(reason, paths)| match &paths[..] {
        [path] => format!("`{path}`: {reason}"),
        paths => format!("`{}` and {} more: {reason}", paths[0], paths.len() - 1),
    });
    DeployError::Load {
        reason: format!(
            "rten computes none of its layers in integers: allow another backend, or \
             `Arithmetic::Fastest` ({})",
            said.collect::<Vec<_>>().join("; ")
        ),
    }
}
