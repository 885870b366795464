//! Which layers compute in integers: where they can, and where that is faster.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_lean_graph::Tensors;
use rten::{ThreadPool, Value};

use super::program::Program;
use super::{Arithmetic, integer_kernels};
use crate::export::{Limits, Weights};
use crate::{DeployError, Dimension, ElementType, Execution, Export, Exported, Form, LayerReport};

/// The model with the form of each layer chosen.
pub(crate) fn choose<O: Tensors>(
    export: &Export<O>,
    arithmetic: Arithmetic,
    pool: &Arc<ThreadPool>,
) -> Result<Exported, DeployError> {
    let weights = export.weights()?;
    let kernels = integer_kernels();
    let limits = Limits {
        narrow_products: kernels.products_saturate,
        no_convolutions: !kernels.exact_convolutions,
    };
    let float = |_: usize| Form::Float;
    if arithmetic == Arithmetic::Float {
        return export.write(&weights, &float, limits);
    }
    let integer = export.write(&weights, &|_| Form::Integer, limits)?;
    let candidates: Vec<&LayerReport> = integer.layers.iter().filter(|l| is_integer(l)).collect();
    if arithmetic == Arithmetic::Integer || candidates.is_empty() {
        return Ok(integer);
    }
    let refused = integer.layers.iter().filter(|layer| !is_integer(layer));
    let mut refused: HashMap<usize, String> = refused
        .filter_map(|layer| Some((layer.node, layer.reason.clone()?)))
        .collect();
    let mut slower: HashMap<usize, String> = HashMap::new();
    let mut known: HashMap<String, Option<String>> = HashMap::new();
    for layer in &candidates {
        // Layers of one kind and shape take as long.
        let key = shape_of(export, layer);
        let reason = match known.get(&key) {
            Some(reason) => reason.clone(),
            None => is_slower(export, &weights, layer.node, limits, pool)?,
        };
        known.insert(key, reason.clone());
        if let Some(reason) = reason {
            slower.insert(layer.node, reason);
        }
    }
    let faster: HashSet<usize> = candidates
        .iter()
        .map(|layer| layer.node)
        .filter(|node| !slower.contains_key(node))
        .collect();
    let form = |node: usize| match faster.contains(&node) {
        true => Form::Integer,
        false => Form::Float,
    };
    let mut mixed = export.write(&weights, &form, limits)?;
    for layer in &mut mixed.layers {
        let refused = refused.remove(&layer.node);
        layer.reason = slower.remove(&layer.node).or(refused);
    }
    if !mixed.layers.iter().any(is_integer) {
        return Ok(mixed);
    }
    // Layers alone do not tell what comes between them.
    let mut all_float = export.write(&weights, &float, limits)?;
    let shape = export.inputs.first().map(|(shape, _)| shape.as_slice());
    let batch = shape.and_then(|shape| shape.first().copied()).unwrap_or(1);
    let [mixed_time, float_time] = times([&mixed, &all_float], batch, pool)?;
    if mixed_time < float_time {
        return Ok(mixed);
    }
    for (layer, other) in all_float.layers.iter_mut().zip(mixed.layers) {
        layer.reason = other.reason.or_else(|| {
            is_integer_execution(other.execution).then(|| {
                format!(
                    "the model takes {float_time:.1?} in floats, {mixed_time:.1?} with integers"
                )
            })
        });
    }
    Ok(all_float)
}

fn is_integer(layer: &LayerReport) -> bool {
    is_integer_execution(layer.execution)
}

fn is_integer_execution(execution: Execution) -> bool {
    matches!(execution, Execution::Integer | Execution::WeightsInteger)
}

/// What makes a layer as fast as another.
fn shape_of<O: Tensors>(export: &Export<O>, layer: &LayerReport) -> String {
    let Some(node) = export.graph().nodes().nth(layer.node) else {
        return String::new();
    };
    let tensors = node.operation().inputs().chain(node.operation().outputs());
    let shapes: Vec<_> = tensors.map(|tensor| tensor.shape.to_vec()).collect();
    format!("{} {shapes:?} {:?}", node.name(), layer.execution)
}

/// Why a layer is not faster in integers; `None` where it is.
fn is_slower<O: Tensors>(
    export: &Export<O>,
    weights: &Weights,
    node: usize,
    limits: Limits,
    pool: &Arc<ThreadPool>,
) -> Result<Option<String>, DeployError> {
    let write = |form| export.write_one(weights, node, form, limits);
    let (Some(integer), Some(float)) = (write(Form::Integer)?, write(Form::Float)?) else {
        return Ok(None);
    };
    let [integer, float] = times([&integer, &float], 1, pool)?;
    Ok((integer >= float)
        .then(|| format!("it takes {float:.1?} in floats, {integer:.1?} in integers")))
}

/// The shortest of a few runs of each of two models, in turns.
fn times(
    models: [&Exported; 2],
    batch: usize,
    pool: &Arc<ThreadPool>,
) -> Result<[Duration; 2], DeployError> {
    const RUNS: usize = 9;
    const AT_MOST: Duration = Duration::from_millis(200);
    let mut programs = Vec::new();
    for exported in models {
        let program = Program::load(&exported.model, pool.clone())?;
        let inputs: Vec<Value> = exported
            .model
            .inputs
            .iter()
            .map(|info| example(info, batch))
            .collect();
        program.run(inputs.clone())?;
        programs.push((program, inputs));
    }
    let mut shortest = [Duration::MAX; 2];
    let begin = Instant::now();
    for run in 0..RUNS {
        if run >= 3 && begin.elapsed() > AT_MOST {
            break;
        }
        for (shortest, (program, inputs)) in shortest.iter_mut().zip(&programs) {
            let inputs = inputs.clone();
            let start = Instant::now();
            program.run(inputs)?;
            *shortest = start.elapsed().min(*shortest);
        }
    }
    Ok(shortest)
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
