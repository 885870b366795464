//! Which of the ways to run a model is the fastest here.

use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn_lean_graph::{GraphError, Recording, Tensors};
use burn_lean_kernels::Storage;
use burn_lean_reparam::catch_quietly;
use rten::Value;

use super::example::Example;
use super::integers::check_integers;
use super::measure::{Samples, pick, sample};
use super::own::{Keep, Runner};
use super::pools::Pools;
use super::program::Program;
use super::report::{SparseLayer, SparseOutcome, Timed};
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

/// What was chosen.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) best: Candidate,
    /// For other sizes of the batch, where the best takes one alone.
    pub(super) other: Option<Candidate>,
    pub(super) times: Vec<Timed>,
    /// Weights of which half is zero.
    pub(super) sparse: Vec<SparseLayer>,
}

impl Candidate {
    fn new(backend: Backend, exported: &Exported, way: Way, note: &'static str) -> Self {
        let resident_bytes = match &way {
            Way::Own(runner) => runner.resident_bytes(),
            Way::Rten(_) | Way::Burn(_) => exported.model.constant_bytes(),
        };
        Self {
            backend,
            exported: exported.without_constants(),
            way,
            note,
            sparse: Vec::new(),
            resident_bytes,
        }
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

    /// How many layers are computed in integers.
    fn integers(&self) -> usize {
        let layers = self.exported.layers.iter();
        layers.filter(|layer| is_integer(layer)).count()
    }

    fn name(&self) -> String {
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
    fn run<O: Tensors>(
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

fn is_integer(layer: &LayerReport) -> bool {
    matches!(
        layer.execution,
        Execution::Integer | Execution::WeightsInteger
    )
}

fn nothing() -> DeployError {
    DeployError::Load {
        reason: "nothing that the configuration allows runs the model: allow another backend, or \
                 `Arithmetic::Fastest`"
            .into(),
    }
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

/// A way to run the model in which it was measured before, and that is not Burn's.
pub(super) fn again<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pools: &Pools,
    kind: Kind,
) -> Result<Candidate, DeployError> {
    let all = candidates(export, config, pools)?.all.into_iter();
    let mut open: Vec<Candidate> = all
        .filter_map(Result::ok)
        .filter(|one| !matches!(one.way, Way::Burn(_)))
        .collect();
    // Which zeros are left out is measured anew: there may be none.
    let same = open.iter().position(|one| one.kind() == kind);
    match open.is_empty() {
        true => Err(nothing()),
        false => Ok(open.swap_remove(same.unwrap_or(0))),
    }
}

/// Everything that can run the model, as the configuration allows, and the fastest of it.
pub(super) fn choose<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pools: &Pools,
) -> Result<Chosen, DeployError> {
    let Candidates {
        all,
        mut example,
        zeros,
    } = candidates(export, config, pools)?;
    let mut first_error = None;
    let mut running = Vec::new();
    for candidate in all {
        match candidate {
            Ok(candidate) => running.push(candidate),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    if running.len() <= 1 {
        let best = running.pop();
        return Ok(Chosen {
            best: best.ok_or_else(|| first_error.unwrap_or_else(nothing))?,
            other: None,
            times: Vec::new(),
            sparse: zeros,
        });
    }
    let mut runs = Vec::new();
    // Integers may be indices, for which 0 will do, or divisors, for which it will not.
    for integer in [0, 1] {
        if integer > 0 {
            example = Example::of(export, &running[0].exported.model.inputs, integer)?;
        }
        let mut failed = Vec::new();
        for candidate in running {
            // The first run packs and allocates, and shows whether it runs at all; the second one how
            // long a sample must be.
            let timed = || -> Result<Duration, DeployError> {
                candidate.run(&export.recording, &example)?;
                let start = Instant::now();
                candidate.run(&export.recording, &example)?;
                Ok(start.elapsed())
            };
            match timed() {
                Ok(time) => runs.push((time, candidate)),
                Err(error) => {
                    first_error = first_error.or(Some(error));
                    failed.push(candidate);
                }
            }
        }
        if !runs.is_empty() {
            break;
        }
        running = failed;
    }
    if config.arithmetic == Arithmetic::Integer {
        // Wherever there is a kernel: the fastest of those that have the most layers so.
        let most = runs.iter().map(|(_, one)| one.integers()).max();
        runs.retain(|(_, one)| Some(one.integers()) == most);
    }
    let (samples, runs): (Vec<Duration>, Vec<Candidate>) = runs.into_iter().unzip();
    let samples: Vec<Samples> = sample(&samples, |index| {
        runs[index].run(&export.recording, &example)
    })?;
    let burn = runs.iter().position(|one| matches!(one.way, Way::Burn(_)));
    let Some(chosen) = pick(&samples, burn, |index| runs[index].is_integer()) else {
        return Err(first_error.unwrap_or_else(nothing));
    };
    let mut order: Vec<(usize, Duration)> = samples.iter().map(Samples::time).enumerate().collect();
    order.sort_by_key(|(_, time)| *time);
    let timed = |(index, time): &(usize, Duration)| Timed {
        way: runs[*index].name(),
        time: *time,
    };
    let times: Vec<Timed> = order.iter().map(timed).collect();
    let open = |index: &usize| !matches!(runs[*index].way, Way::Burn(_));
    let other = match open(&chosen) {
        true => None,
        false => order.iter().map(|(index, _)| *index).find(open),
    };
    // The one with the most layers in integers; of as many, the fastest.
    let integer = order
        .iter()
        .rev()
        .max_by_key(|(index, _)| runs[*index].integers());
    let integer = integer.filter(|(index, _)| runs[*index].is_integer());
    let integer = integer.map(|(index, time)| (runs[*index].exported.layers.clone(), *time));
    let best_time = samples[chosen].time();
    let mut runs: Vec<Option<Candidate>> = runs.into_iter().map(Some).collect();
    let Some(mut best) = runs[chosen].take() else {
        return Err(nothing());
    };
    if let Some((layers, time)) = integer
        && !best.is_integer()
    {
        explain(&mut best.exported.layers, &layers, best_time, time);
    }
    let sparse = best.zeros(zeros);
    Ok(Chosen {
        best,
        other: other.and_then(|index| runs[index].take()),
        times,
        sparse,
    })
}

impl Candidate {
    /// What became of weights with many zeros, where this one runs the model.
    fn zeros(&mut self, mut zeros: Vec<SparseLayer>) -> Vec<SparseLayer> {
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

/// Says of layers that could be integers why they are not.
fn explain(layers: &mut [LayerReport], integer: &[LayerReport], best: Duration, time: Duration) {
    for (layer, other) in layers.iter_mut().zip(integer) {
        layer.reason = match is_integer(other) {
            true => Some(format!(
                "the model takes {best:.1?} in floats, {time:.1?} with integers"
            )),
            false => other.reason.clone(),
        };
    }
}

struct Candidates {
    /// What the configuration allows; an error in the place of what cannot run the model.
    all: Vec<Result<Candidate, DeployError>>,
    example: Example,
    /// Float weights of which half is zero.
    zeros: Vec<SparseLayer>,
}

fn candidates<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pools: &Pools,
) -> Result<Candidates, DeployError> {
    let allowed = |backend| config.backend.is_none_or(|one| one == backend);
    let weights = export.weights()?;
    let own = Limits {
        no_volumes: true,
        ..Limits::default()
    };
    let mut float = export.write(&weights, Form::Float, own)?;
    let mut integer = None;
    if config.arithmetic != Arithmetic::Float {
        let written = export.write(&weights, Form::Integer, own)?;
        match written.layers.iter().any(is_integer) {
            true => integer = Some(written),
            // The same model, with the reasons why.
            false => float.layers = written.layers,
        }
    }
    let floats = config.arithmetic != Arithmetic::Integer || integer.is_none();
    if config.backend != Some(Backend::Burn) {
        check_integers(&float.model)?;
    }
    // Burn's threads are those of the pool that calls.
    let has_threads = config.threads == 0 || config.backend.is_some();
    let burn = floats && allowed(Backend::Burn) && has_threads;
    if !burn && config.backend != Some(Backend::Burn) {
        check_volumes(&float.model)?;
    }
    let mut all = Vec::new();
    let mut zeros = Vec::new();
    let example = Example::of(export, &float.model.inputs, 0)?;
    if allowed(Backend::Own) {
        let own = |exported: &Exported, keep, note| {
            let runner = Runner::new(&exported.model, keep, pools)?;
            let way = Way::Own(Box::new(runner));
            Ok(Candidate::new(Backend::Own, exported, way, note))
        };
        let (storage, note) = match config.weights {
            FloatStorage::F32 => (Storage::F32, ""),
            FloatStorage::F16 => (Storage::F16, "weights in F16"),
            FloatStorage::BF16 => (Storage::BF16, "weights in BF16"),
        };
        let keep = Keep {
            floats: storage,
            ..Keep::default()
        };
        if let Some(integer) = &integer {
            all.push(own(integer, keep, "integers"));
            let many_rows = Keep {
                many_rows: true,
                ..keep
            };
            if let Ok(runner) = Runner::new(&integer.model, many_rows, pools)
                && runner.has_many_rows()
            {
                let way = Way::Own(Box::new(runner));
                let note = "integers, for many rows";
                all.push(Ok(Candidate::new(Backend::Own, integer, way, note)));
            }
        }
        if floats {
            all.push(own(&float, keep, note));
            if storage != Storage::F32 && config.backend.is_none() {
                all.push(own(&float, Keep::default(), ""));
            }
            let sparse = Keep {
                sparse: true,
                ..keep
            };
            if let Ok(mut runner) = Runner::new(&float.model, sparse, pools)
                && let Ok(Ok(layers)) = catch_quietly(|| runner.settle(example.values.clone()))
            {
                if layers.iter().any(SparseLayer::is_left_out) {
                    let way = Way::Own(Box::new(runner));
                    let mut one = Candidate::new(Backend::Own, &float, way, "sparse");
                    one.sparse = layers.clone();
                    all.push(Ok(one));
                }
                zeros = layers;
            }
        }
    }
    if allowed(Backend::Rten) {
        let load = |exported: &Exported, note| {
            let program = Program::load(&exported.model, pools.rten())?;
            Ok(Candidate::new(
                Backend::Rten,
                exported,
                Way::Rten(Box::new(program)),
                note,
            ))
        };
        let kernels = integer_kernels();
        let limits = Limits {
            narrow_products: kernels.products_saturate,
            no_convolutions: !kernels.exact_convolutions,
            no_volumes: true,
            narrow_blocks: true,
        };
        let forced = config.backend.is_some();
        // Where its products are exact as they are; elsewhere they were never faster.
        if integer.is_some() && (forced || !kernels.products_saturate) {
            let written = export.write(&weights, Form::Integer, limits)?;
            // Weights alone it dequantizes in every run.
            let pays = |layer: &LayerReport| match forced {
                true => is_integer(layer),
                false => matches!(layer.execution, Execution::Integer),
            };
            match written.layers.iter().any(pays) {
                true => all.push(load(&written, "integers")),
                false if !floats => all.push(Err(no_kernel(&written.layers))),
                false => {}
            }
        }
        if floats && (!forced || all.is_empty() || config.arithmetic == Arithmetic::Fastest) {
            all.push(load(&float, ""));
        }
    }
    if burn {
        let way = Way::Burn(export.rounded_parameters()?);
        all.push(Ok(Candidate::new(Backend::Burn, &float, way, "")));
    }
    Ok(Candidates {
        all,
        example,
        zeros,
    })
}
