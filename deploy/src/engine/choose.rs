//! Which of the ways to run a model is the fastest here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn_lean_graph::{Recording, Tensors};
use burn_lean_kernels::Storage;
use rten::{ThreadPool, Value};

use super::own::{Keep, Runner};
use super::program::Program;
use super::values::results;
use super::{Arithmetic, Backend, EngineConfig, FloatStorage, Timed, integer_kernels};
use crate::export::Limits;
use crate::{DeployError, Dimension, ElementType, Execution, Export, Exported, Form, LayerReport};

/// A way to run a model.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) backend: Backend,
    pub(super) exported: Exported,
    pub(super) way: Way,
    /// What tells it from others of the backend.
    pub(super) note: &'static str,
    resident_bytes: usize,
}

#[derive(Debug)]
pub(super) enum Way {
    /// With the parameters as they were recorded.
    Burn(Vec<DispatchTensor>),
    Rten(Box<Program>),
    Own(Box<Runner>),
}

/// What was chosen.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) best: Candidate,
    /// For other sizes of the batch, where the best takes one alone.
    pub(super) other: Option<Candidate>,
    pub(super) times: Vec<Timed>,
}

impl Candidate {
    fn new(backend: Backend, exported: Exported, way: Way, note: &'static str) -> Self {
        let resident_bytes = match &way {
            Way::Own(runner) => runner.resident_bytes(),
            Way::Rten(_) | Way::Burn(_) => exported.model.constant_bytes(),
        };
        Self {
            backend,
            exported,
            way,
            note,
            resident_bytes,
        }
    }

    pub(super) fn resident_bytes(&self) -> usize {
        self.resident_bytes
    }

    /// Lets go of the operations and constants of the file.
    pub(super) fn forget_constants(&mut self) {
        self.exported.model.nodes = Vec::new();
        self.exported.model.initializers = Vec::new();
    }

    pub(super) fn is_integer(&self) -> bool {
        self.exported.layers.iter().any(is_integer)
    }

    fn name(&self) -> String {
        match self.note {
            "" => self.backend.to_string(),
            note => format!("{}, {note}", self.backend),
        }
    }

    /// The results for values on the host.
    fn run<O: Tensors>(
        &self,
        recording: &Recording<O>,
        values: &[Value],
        tensors: &[DispatchTensor],
    ) -> Result<(), DeployError> {
        match &self.way {
            Way::Burn(parameters) => {
                let result = recording.evaluate(parameters, tensors)?;
                // A device may compute later: reading waits for it.
                super::values::given(&result).map(drop)
            }
            Way::Rten(program) => program.run(values.to_vec()).map(drop),
            Way::Own(runner) => runner.run(values.to_vec()).map(drop),
        }
    }
}

fn is_integer(layer: &LayerReport) -> bool {
    matches!(
        layer.execution,
        Execution::Integer | Execution::WeightsInteger
    )
}

/// Everything that can run the model, as the configuration allows, and the fastest of it.
pub(super) fn choose<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pool: &Arc<ThreadPool>,
) -> Result<Chosen, DeployError> {
    let candidates = candidates(export, config, pool)?;
    let mut first_error = None;
    let mut running = Vec::new();
    for candidate in candidates {
        match candidate {
            Ok(candidate) => running.push(candidate),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    let nothing = || DeployError::Load {
        reason: "nothing that the configuration allows runs the model".into(),
    };
    if running.len() <= 1 {
        let best = running.pop();
        return Ok(Chosen {
            best: best.ok_or_else(|| first_error.unwrap_or_else(nothing))?,
            other: None,
            times: Vec::new(),
        });
    }
    let (mut order, error) = times(export, &running)?;
    order.sort_by_key(|(_, time)| *time);
    let Some((first, best_time)) = order.first().copied() else {
        return Err(error.or(first_error).unwrap_or_else(nothing));
    };
    let timed = |(index, time): &(usize, Duration)| Timed {
        way: running[*index].name(),
        time: *time,
    };
    let times: Vec<Timed> = order.iter().map(timed).collect();
    // Of two that are as fast, the one that computes in integers takes less memory.
    let near = best_time.mul_f64(1.02);
    let integers = order
        .iter()
        .find(|(index, time)| running[*index].is_integer() && *time <= near);
    let chosen = integers.map_or(first, |(index, _)| *index);
    let open = |index: &usize| !matches!(running[*index].way, Way::Burn(_));
    let other = match open(&chosen) {
        true => None,
        false => order.iter().map(|(index, _)| *index).find(open),
    };
    let integer = order.iter().find(|(index, _)| running[*index].is_integer());
    let integer = integer.map(|(index, time)| (running[*index].exported.layers.clone(), *time));
    let mut running: Vec<Option<Candidate>> = running.into_iter().map(Some).collect();
    let Some(mut best) = running[chosen].take() else {
        return Err(nothing());
    };
    if let Some((layers, time)) = integer
        && !best.is_integer()
    {
        explain(&mut best.exported.layers, &layers, best_time, time);
    }
    Ok(Chosen {
        best,
        other: other.and_then(|index| running[index].take()),
        times,
    })
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

/// What the configuration allows; an error in the place of what cannot run the model.
fn candidates<O: Tensors>(
    export: &Export<O>,
    config: &EngineConfig,
    pool: &Arc<ThreadPool>,
) -> Result<Vec<Result<Candidate, DeployError>>, DeployError> {
    let allowed = |backend| config.backend.is_none_or(|one| one == backend);
    let weights = export.weights()?;
    let own = Limits::default();
    let mut float = export.write(&weights, &|_| Form::Float, own)?;
    let mut integer = None;
    if config.arithmetic != Arithmetic::Float {
        let written = export.write(&weights, &|_| Form::Integer, own)?;
        match written.layers.iter().any(is_integer) {
            true => integer = Some(written),
            // The same model, with the reasons why.
            false => float.layers = written.layers,
        }
    }
    let floats = config.arithmetic != Arithmetic::Integer || integer.is_none();
    let mut all = Vec::new();
    if allowed(Backend::Own) {
        let own = |exported: &Exported, keep, note| {
            let runner = Runner::new(&exported.model, keep, config.threads, pool)?;
            let way = Way::Own(Box::new(runner));
            Ok(Candidate::new(Backend::Own, exported.clone(), way, note))
        };
        let (storage, note) = match config.weights {
            FloatStorage::F32 => (Storage::F32, ""),
            FloatStorage::F16 => (Storage::F16, "weights in F16"),
            FloatStorage::BF16 => (Storage::BF16, "weights in BF16"),
        };
        let keep = Keep {
            floats: storage,
            sparse: false,
        };
        if let Some(integer) = &integer {
            all.push(own(integer, keep, "integers"));
        }
        if floats {
            all.push(own(&float, keep, note));
            if storage != Storage::F32 && config.backend.is_none() {
                all.push(own(&float, Keep::default(), ""));
            }
            let sparse = Keep {
                floats: storage,
                sparse: true,
            };
            let sparse: Result<Candidate, DeployError> = own(&float, sparse, "sparse");
            all.extend(sparse.ok().filter(is_sparse).map(Ok));
        }
    }
    if allowed(Backend::Rten) {
        let load = |exported: Exported, note| {
            let program = Program::load(&exported.model, pool.clone())?;
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
            narrow_blocks: true,
        };
        let forced = config.backend.is_some();
        // Where its products are exact as they are; elsewhere they were never faster.
        if integer.is_some() && (forced || !kernels.products_saturate && kernels.exact_convolutions)
        {
            let written = export.write(&weights, &|_| Form::Integer, limits)?;
            if floats || written.layers.iter().any(is_integer) {
                all.push(load(written, "integers"));
            }
        }
        if floats && (!forced || all.is_empty() || config.arithmetic == Arithmetic::Fastest) {
            all.push(load(float.clone(), ""));
        }
    }
    // Burn's threads are those of the pool that calls.
    if floats && allowed(Backend::Burn) && (config.threads == 0 || config.backend.is_some()) {
        let way = Way::Burn(export.parameters.clone());
        all.push(Ok(Candidate::new(Backend::Burn, float, way, "")));
    }
    Ok(all)
}

fn is_sparse(candidate: &Candidate) -> bool {
    matches!(&candidate.way, Way::Own(runner) if runner.is_sparse())
}

/// The shortest of a few runs of each, in turns; and what those that fail say.
#[allow(clippy::type_complexity)]
fn times<O: Tensors>(
    export: &Export<O>,
    candidates: &[Candidate],
) -> Result<(Vec<(usize, Duration)>, Option<DeployError>), DeployError> {
    const RUNS: usize = 15;
    const AT_MOST: Duration = Duration::from_millis(400);
    let shape = export.inputs.first().map(|(shape, _)| shape.as_slice());
    let batch = shape.and_then(|shape| shape.first().copied()).unwrap_or(1);
    let Some(infos) = candidates.first().map(|one| &one.exported.model.inputs) else {
        return Ok((Vec::new(), None));
    };
    let values: Vec<Value> = infos.iter().map(|info| example(info, batch)).collect();
    let device = export
        .parameters
        .first()
        .map(burn::backend::TensorMetadata::device);
    let tensors = match &device {
        Some(device) => results(values.clone(), infos, device)?,
        None => Vec::new(),
    };
    let mut error = None;
    let mut shortest: Vec<Option<Duration>> = Vec::new();
    for one in candidates {
        // The first run packs and allocates, and shows whether it runs at all.
        let found = one.run(&export.recording, &values, &tensors);
        shortest.push(found.is_ok().then_some(Duration::MAX));
        error = error.or(found.err());
    }
    let begin = Instant::now();
    for run in 0..RUNS {
        if run >= 3 && begin.elapsed() > AT_MOST {
            break;
        }
        for (shortest, one) in shortest.iter_mut().zip(candidates) {
            let Some(shortest) = shortest else {
                continue;
            };
            let start = Instant::now();
            one.run(&export.recording, &values, &tensors)?;
            *shortest = start.elapsed().min(*shortest);
        }
    }
    let order = shortest.into_iter().enumerate();
    let order = order.filter_map(|(index, time)| Some((index, time?)));
    Ok((order.collect(), error))
}

/// Numbers for an input: between -1 and 1, or 0 where they are integers, which may be indices.
fn example(info: &crate::ValueInfo, batch: usize) -> Value {
    let shape: Vec<usize> = info
        .shape
        .iter()
        .map(|dimension| match dimension {
            Dimension::Fixed(size) => *size,
            Dimension::Batch(times) => times * batch,
        })
        .collect();
    let count = shape.iter().product();
    match info.element {
        ElementType::F32 => {
            let numbers = (0..count).map(|i: usize| (i * 7919 % 2003) as f32 / 1001.5 - 1.0);
            rten_tensor::Tensor::from_data(&shape, numbers.collect::<Vec<_>>()).into()
        }
        _ => rten_tensor::Tensor::from_data(&shape, vec![0_i32; count]).into(),
    }
}
