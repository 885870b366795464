//! The operations that a recording has where its loops have fewer steps.

use burn::backend::ir::TensorId;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::find::Found;
use super::tape::{self, Tape};
use crate::graph::Graph;
use crate::graph::describe::{describe, rename};

/// A recording with so many steps of each loop, and what of a [`Rolled`](super::Rolled) graph it shows.
#[derive(Debug)]
pub struct FewerSteps {
    /// The operations.
    pub graph: Graph,
    /// For each of them its place in the rolled graph, and the number of its step.
    pub places: Vec<Option<(usize, usize)>>,
    /// Of those that write a part of a result: the axis, whether the last step's part comes first, and the
    /// number of the step.
    pub puts: HashMap<usize, (usize, bool, usize)>,
    /// Tensors of the rolled graph, and one that has the same shape here.
    pub alike: Vec<(TensorId, TensorId)>,
    /// What each loop counts, and how many steps it has.
    pub counts: Vec<(TensorId, usize)>,
    /// Tensors of the rolled graph that are as large as some here in a row.
    pub repeated: Vec<Repeated>,
}

/// A tensor that is as large as several of another one in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repeated {
    /// It.
    pub tensor: TensorId,
    /// The other one.
    pub of: TensorId,
    /// The axis along which they are.
    pub axis: usize,
    /// How many.
    pub times: usize,
}

/// A loop, with the tensors that the rolled graph has for it alone.
#[derive(Debug)]
pub(super) struct Rolling {
    pub(super) found: Found,
    pub(super) count: TensorId,
    /// What it collects where a concatenation has other operands, too.
    pub(super) collected: Vec<Option<TensorId>>,
}

/// With `counts` steps of the loops, no more than were recorded.
pub(super) fn fewer(
    graph: &Graph,
    tape: &Tape,
    loops: &[Rolling],
    indices: &HashMap<usize, usize>,
    counts: &[usize],
) -> Option<FewerSteps> {
    let fits = |(one, count): (&Rolling, &usize)| *count <= one.found.count;
    if counts.len() != loops.len() || !loops.iter().zip(counts).all(fits) {
        return None;
    }
    let mut gone: HashSet<usize> = HashSet::default();
    let mut parts: HashSet<TensorId> = HashSet::default();
    let mut last: HashMap<TensorId, TensorId> = HashMap::default();
    // Of positions in the tape: that of the second step, and the number of the step.
    let mut steps: HashMap<usize, (usize, usize)> = HashMap::default();
    let mut found = FewerSteps {
        graph: graph.clone(),
        places: Vec::new(),
        puts: HashMap::default(),
        alike: Vec::new(),
        counts: Vec::new(),
        repeated: Vec::new(),
    };
    for (
        Rolling {
            found: one,
            count: of,
            collected,
        },
        count,
    ) in loops.iter().zip(counts)
    {
        let at = |step: usize, offset: usize| one.start + step * one.period + offset;
        found.counts.push((*of, *count));
        for offset in 0..one.period {
            for step in 0..one.count {
                steps.insert(at(step, offset), (at(1, offset), step));
                if step >= *count {
                    gone.insert(at(step, offset));
                }
            }
            let made = tape.operations[at(0, offset)].outputs().count();
            for place in 0..made {
                let made = |step: usize| tape.made(one, step, (offset, place)).id;
                let Some(before) = count.checked_sub(1) else {
                    // What was there before the first step.
                    let initial = match one.puts.contains_key(&offset) {
                        true => tape.operations[at(0, offset)]
                            .inputs()
                            .next()
                            .map(|of| of.id),
                        false => one.initial_of((offset, place)).map(|of| of.id),
                    };
                    last.extend(initial.map(|initial| (made(one.count - 1), initial)));
                    found
                        .alike
                        .extend(initial.map(|initial| (made(one.count - 1), initial)));
                    continue;
                };
                last.insert(made(one.count - 1), made(before));
                if one.puts.contains_key(&offset) {
                    found.alike.push((made(one.count - 1), made(before)));
                    continue;
                }
                for step in [0, 1, one.count - 1] {
                    found.alike.push((made(step), made(0)));
                }
            }
        }
        for (gather, collected) in one.gathers.iter().zip(collected) {
            for step in *count..one.count {
                parts.insert(gather.part(tape, one, step).id);
                gone.extend(gather.views.get(step));
            }
            let part = gather.part(tape, one, 0).id;
            found.alike.push((gather.part(tape, one, 1).id, part));
            let (_, axis, _) = tape::concatenated(&tape.operations[gather.by])?;
            if let Some(collected) = collected {
                found.repeated.push(Repeated {
                    tensor: *collected,
                    of: part,
                    axis,
                    times: *count,
                });
            }
        }
    }
    let mut operations = Vec::with_capacity(tape.operations.len());
    for (at, operation) in tape.operations.iter().enumerate() {
        if gone.contains(&at) {
            continue;
        }
        let mut operation = operation.clone();
        if let Some((operands, ..)) = tape::concatenated(&operation) {
            let stays = |one: &&burn::backend::ir::TensorIr| !parts.contains(&one.id);
            let operands: Vec<_> = operands.iter().filter(stays).cloned().collect();
            operation = tape::with_parts(&operation, &operands);
        }
        // A step of the same loop reads its own.
        let own = |id: &TensorId| {
            let maker = tape
                .makers
                .get(id)
                .and_then(|(maker, _)| loop_of(loops, *maker));
            maker.is_some() && maker == loop_of(loops, at)
        };
        let inputs = operation.inputs().map(|tensor| tensor.id);
        let names: HashMap<TensorId, TensorId> = inputs
            .filter(|id| !own(id))
            .filter_map(|id| Some((id, *last.get(&id)?)))
            .collect();
        if !names.is_empty() {
            rename(&mut operation, &names);
        }
        let place = match steps.get(&at) {
            Some((second, step)) => indices.get(second).map(|index| (*index, *step)),
            None => indices.get(&at).map(|index| (*index, 0)),
        };
        if let Some((second, step)) = steps.get(&at)
            && let Some(one) = loop_of(loops, at)
            && let Some(put) = loops[one].found.put_at(*second)
        {
            let put = (put.axis, put.is_reversed, *step);
            found.puts.insert(operations.len(), put);
        }
        operations.push(operation);
        found.places.push(place);
    }
    for output in &mut found.graph.outputs {
        if let Some(id) = last.get(output) {
            *output = *id;
        }
    }
    found.graph.operations = operations;
    describe(&mut found.graph);
    Some(found)
}

/// Which loop a position of the tape is in.
fn loop_of(loops: &[Rolling], at: usize) -> Option<usize> {
    let is_in = |one: &Rolling| (one.found.start..one.found.end()).contains(&at);
    loops.iter().position(is_in)
}

/// The same operations as they are compared with those of [`fewer`].
pub(super) fn ordered(graph: &Graph) -> Graph {
    let tape = Tape::of(graph);
    let mut ordered = graph.clone();
    ordered.operations = tape.operations;
    describe(&mut ordered);
    ordered
}
