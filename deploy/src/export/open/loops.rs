//! Loops over an axis that stays open, in recordings that are too short to show them.

use burn_lean_graph::{FewerSteps, Graph, LoopPart, Rolled};

use super::probe::Sample;

/// Steps of a loop that are tried: there are fewer than can be seen, where each takes some of the axis.
const TRIED: usize = 8;

/// What a recording shows of the rolled graph, if it is the same with fewer steps; `None` where it does something
/// else. Of no step at all it shows nothing, which is the inner `None`.
///
/// `samples` are recordings of other sizes: loops of which one has as many steps more than another in all of them,
/// have as many more here.
pub(super) fn sample_of_fewer(
    rolled: &Rolled,
    short: &Graph,
    inputs: &[Vec<usize>],
    samples: &[(usize, Sample)],
) -> Option<Option<Sample>> {
    let steps = |(_, sample): &(usize, Sample)| -> Option<Vec<usize>> {
        let counts = begun(&rolled.graph);
        counts
            .map(|count| sample.shapes.get(&count)?.first().copied())
            .collect()
    };
    let steps: Vec<Vec<usize>> = samples.iter().map(steps).collect::<Option<_>>()?;
    // How many more than the loop that has the fewest.
    let more = |steps: &Vec<usize>| -> Vec<usize> {
        let fewest = steps.iter().min().copied().unwrap_or(0);
        steps.iter().map(|count| count - fewest).collect()
    };
    let mut all = steps.iter().map(more);
    let more = all.next()?;
    if !all.all(|other| other == more) {
        return None;
    }
    let short = short.in_steps();
    (0..TRIED).find_map(|fewest| {
        let counts: Vec<usize> = more.iter().map(|more| more + fewest).collect();
        let fewer = rolled.with_steps(&counts)?;
        let seen = Sample::compare(&fewer.graph, &short, inputs).ok()?;
        match fewest {
            0 => Some(None),
            _ => shown(rolled, &fewer, seen).map(Some),
        }
    })
}

/// The tensors that count the steps of the loops.
fn begun(rolled: &Graph) -> impl Iterator<Item = burn::backend::ir::TensorId> {
    rolled
        .nodes()
        .filter_map(|node| match LoopPart::of(node.operation()) {
            Some(LoopPart::Begin { count, .. }) => Some(count.id),
            _ => None,
        })
}

/// Whether ranges take all of a tensor along the axes that are not this one.
fn are_whole_but(axis: usize, bounds: &[[usize; 2]], sizes: &[usize]) -> bool {
    let others = bounds.iter().zip(sizes).enumerate();
    let mut others = others.filter(|(other, _)| *other != axis);
    others.all(|(_, (bound, size))| *bound == [0, *size])
}

/// What was seen of a recording with fewer steps, of the rolled graph; `None` where parts are taken or put that
/// are not each step's next one.
fn shown(rolled: &Rolled, fewer: &FewerSteps, seen: Sample) -> Option<Sample> {
    let mut found = Sample {
        shapes: seen.shapes.clone(),
        counted: seen.counted,
        ..Sample::default()
    };
    for (of, like) in &fewer.alike {
        if let Some(shape) = seen.shapes.get(like) {
            found.shapes.insert(*of, shape.clone());
        }
    }
    for (of, count) in &fewer.counts {
        found.shapes.insert(*of, vec![*count]);
    }
    for repeated in &fewer.repeated {
        let mut shape = seen.shapes.get(&repeated.of)?.clone();
        shape[repeated.axis] *= repeated.times;
        found.shapes.insert(repeated.tensor, shape);
    }
    let mut starts = std::collections::HashMap::new();
    for (node, numbers) in &seen.numbers {
        if let Some((axis, is_reversed, step)) = fewer.puts.get(node) {
            let (bounds, _) = numbers.as_chunks::<2>();
            let mut inputs = fewer.graph.node(*node).operation().inputs();
            let whole = seen.shapes.get(&inputs.next()?.id)?;
            let [start, end] = bounds.get(*axis)?;
            let at = match is_reversed {
                false => step * (end - start),
                true => whole[*axis].checked_sub((step + 1) * (end - start))?,
            };
            if *start != at || !are_whole_but(*axis, bounds, whole) {
                return None;
            }
            continue;
        }
        let Some((place, step)) = fewer.places[*node] else {
            continue;
        };
        let of_rolled = rolled.graph.node(place);
        let Some(LoopPart::Take { axis, step: by, .. }) = LoopPart::of(of_rolled.operation())
        else {
            // The same in each step.
            let known = found
                .numbers
                .entry(place)
                .or_insert_with(|| numbers.clone());
            if known != numbers {
                return None;
            }
            continue;
        };
        let (bounds, _) = numbers.as_chunks::<2>();
        let mut inputs = fewer.graph.node(*node).operation().inputs();
        let whole = seen.shapes.get(&inputs.next()?.id)?;
        if !are_whole_but(axis, bounds, whole) {
            return None;
        }
        let [start, _] = bounds.get(axis)?;
        // Where the first step's starts, as this one says.
        let first = *start as isize - by * step as isize;
        if *starts.entry(place).or_insert(first) != first {
            return None;
        }
        found
            .numbers
            .insert(place, vec![usize::try_from(first).ok()?]);
    }
    for (node, scalar) in &seen.scalars {
        let Some((place, _)) = fewer.places[*node] else {
            continue;
        };
        if *found.scalars.entry(place).or_insert(*scalar) != *scalar {
            return None;
        }
    }
    Some(found)
}
