//! Batches in parts, where a part gives what the whole batch gives for it.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::DType;
use burn_lean_graph::{TensorMapper, Tensors};
use burn_lean_reparam::catch_quietly;

use crate::PruneError;
use crate::layerwise::given::{Given, Numbers, given};

/// Examples of a step, at most, where batches can be divided.
const STEP: usize = 64;
/// One of so many examples of the only batch judges.
const JUDGES: usize = 4;

/// The examples that layers are fitted to, and the last ones, which judge, of the only batch there is;
/// `None` where they are too few, or where the parts do not give what the whole gives.
pub(crate) fn to_fit_and_to_judge<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    forward: &impl Fn(&M, I) -> O,
    inputs: &I,
) -> Result<Option<[I; 2]>, PruneError> {
    let Some(all) = first_dimension(inputs) else {
        return Ok(None);
    };
    let whole = inputs.map_tensors(&mut Part {
        examples: None,
        trains: false,
    });
    // What is wrong with it, the recording says.
    let Ok(dense) = catch_quietly(|| given(&forward(model, whole))) else {
        return Ok(None);
    };
    let dense = dense?;
    // One row to fit to would be none: it is its own mean.
    let has_rows = all > 2 || all == 2 && dense[0].places() > all;
    if !has_rows || !counts(&dense, all) {
        return Ok(None);
    }
    let first = all - (all / JUDGES).max(1);
    let parts = [0..first, first..all];
    if !divides(model, forward, inputs, &dense, &parts) {
        return Ok(None);
    }
    Ok(Some(parts.map(|part| {
        inputs.map_tensors(&mut Part {
            examples: Some(part),
            trains: false,
        })
    })))
}

/// The steps of a pass over `batches`, of which the dense network `model` gives `dense`: a batch is cut
/// where it gives the same for the parts. That first axes are equally long says little: they may
/// count nodes of a graph, or places of a sequence.
pub(crate) fn steps<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    forward: &impl Fn(&M, I) -> O,
    batches: &[I],
    dense: &[Given],
) -> Vec<(usize, Range<usize>)> {
    let mut known: HashMap<Vec<Vec<usize>>, bool> = HashMap::new();
    let mut steps = Vec::new();
    for (batch, (inputs, dense)) in batches.iter().zip(dense).enumerate() {
        let mut parts = parts(inputs, dense);
        if parts.len() > 1 {
            let shapes = burn_lean_graph::shapes(inputs);
            let divides = match known.get(&shapes).copied() {
                Some(divides) => divides,
                None => divides(model, forward, inputs, dense, &parts),
            };
            known.insert(shapes, divides);
            if !divides {
                let end = parts.last().map_or(0, |last| last.end);
                parts = std::iter::once(0..end).collect();
            }
        }
        steps.extend(parts.into_iter().map(|part| (batch, part)));
    }
    steps
}

/// Whether the parts of a batch give what all of it gives.
fn divides<M: Module, I: Tensors, O: Tensors>(
    model: &M,
    forward: &impl Fn(&M, I) -> O,
    inputs: &I,
    dense: &[Numbers],
    parts: &[Range<usize>],
) -> bool {
    let all = parts.last().map_or(0, |last| last.end);
    parts.iter().all(|part| {
        let found = catch_quietly(|| {
            let inputs = inputs.map_tensors(&mut Part {
                examples: Some(part.clone()),
                trains: false,
            });
            given(&forward(model, inputs))
        });
        let Ok(Ok(found)) = found else {
            return false;
        };
        let mut pairs = found.iter().zip(dense);
        found.len() == dense.len()
            && pairs.all(|(found, dense)| {
                let expected = dense.of_examples(part, all);
                let tolerance = match dense.dtype() {
                    DType::F32 | DType::F64 => 1e-3,
                    _ => 2e-2,
                };
                found.width() == dense.width()
                    && found.values().len() == expected.len()
                    && agree(found.values(), expected, tolerance)
            })
    })
}

/// Whether numbers are the same to rounding, a fraction of the largest one.
fn agree(given: &[f32], expected: &[f32], tolerance: f32) -> bool {
    let finite = expected.iter().filter(|value| value.is_finite());
    let largest = finite.fold(0.0, |most: f32, value| most.max(value.abs()));
    let mut pairs = given.iter().zip(expected);
    pairs.all(|(a, b)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance * largest)
}

/// Whether all outputs have as many places for each of so many examples.
fn counts(dense: &[Numbers], all: usize) -> bool {
    let mut places = dense.iter().map(Numbers::places);
    places.all(|places| places.is_multiple_of(all.max(1)))
}

/// The examples of a batch, in parts: all at once where not all of its tensors count them.
fn parts(inputs: &impl Tensors, dense: &[Numbers]) -> Vec<Range<usize>> {
    let (all, step) = match first_dimension(inputs) {
        Some(all) if counts(dense, all) => (all, all.div_ceil(all.div_ceil(STEP).max(1))),
        Some(all) => (all, all),
        None => (1, 1),
    };
    let starts = (0..all).step_by(step.max(1));
    starts.map(|start| start..(start + step).min(all)).collect()
}

/// The first dimension, where all tensors share it.
pub(crate) fn first_dimension(inputs: &impl Tensors) -> Option<usize> {
    let shapes = burn_lean_graph::shapes(inputs);
    let first = *shapes.first()?.first()?;
    let same = shapes.iter().all(|shape| shape.first() == Some(&first));
    (same && first > 0).then_some(first)
}

/// Some examples, or all; on the autodiff device where they train.
pub(crate) struct Part {
    pub(crate) examples: Option<Range<usize>>,
    pub(crate) trains: bool,
}

impl TensorMapper for Part {
    burn_lean_graph::every_kind!(|self, tensor| {
        let tensor = match self.trains {
            true => tensor.clone().autodiff(),
            false => tensor.clone(),
        };
        match &self.examples {
            Some(examples) => tensor.slice([examples.clone()]),
            None => tensor,
        }
    });
}
