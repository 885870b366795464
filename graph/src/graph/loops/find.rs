//! Which operations are the steps of a loop, and what goes from one to the next.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::backend::ir::{TensorId, TensorIr};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::tape::{Tape, concatenated, is_reshape, ranges, sliced, status_free};

/// Steps of a loop, at least.
pub(super) const STEPS: usize = 3;
/// Lengths of a step that are looked at from one operation on, at most; and of those with the same operations
/// again and again, which the gates of a cell are, too.
const PERIODS: usize = 256;
const ALIKE: usize = 4;
/// Loops that are looked at in whole, at most: those that are none take as long.
const ATTEMPTS: usize = 512;

/// A tensor of a step: the place of the operation in the step, and its own among the results.
pub(super) type Made = (usize, usize);

/// A loop.
#[derive(Debug)]
pub(super) struct Found {
    /// Position of the first operation of the first step.
    pub(super) start: usize,
    /// Operations of a step.
    pub(super) period: usize,
    /// Steps.
    pub(super) count: usize,
    /// What the next step reads.
    pub(super) states: Vec<Made>,
    /// What is there instead before the first step.
    pub(super) initial: Vec<TensorIr>,
    /// Slices that take the next part in each step, by their place in it.
    pub(super) takes: HashMap<usize, Take>,
    /// Assignments of the next part of a result.
    pub(super) puts: BTreeMap<usize, Put>,
    /// Concatenations of what all steps make.
    pub(super) gathers: Vec<Gather>,
}

impl Found {
    /// Position of what follows the last step.
    pub(super) fn end(&self) -> usize {
        self.start + self.count * self.period
    }

    /// What a state is before the first step.
    pub(super) fn initial_of(&self, state: Made) -> Option<&TensorIr> {
        let place = self.states.iter().position(|one| *one == state)?;
        self.initial.get(place)
    }

    /// What the operation at a position of the second step puts.
    pub(super) fn put_at(&self, second: usize) -> Option<&Put> {
        let offset = second.checked_sub(self.start + self.period)?;
        self.puts.get(&offset)
    }
}

/// Each step's part of a tensor.
#[derive(Debug)]
pub(super) struct Take {
    pub(super) axis: usize,
    pub(super) start: usize,
    pub(super) step: isize,
}

/// Each step's part of a result, of which nothing is left over.
#[derive(Debug)]
pub(super) struct Put {
    pub(super) axis: usize,
    pub(super) is_reversed: bool,
    /// In the second step.
    pub(super) value: TensorIr,
}

/// What a concatenation reads of all steps.
#[derive(Debug)]
pub(super) struct Gather {
    pub(super) from: Made,
    /// Positions of the views of it that it reads, one for each step, if it does not read it itself.
    pub(super) views: Vec<usize>,
    /// Position of the concatenation.
    pub(super) by: usize,
    pub(super) is_reversed: bool,
}

impl Gather {
    /// The tensor that comes first of those that the concatenation reads.
    pub(super) fn first(&self, tape: &Tape, found: &Found) -> TensorIr {
        let step = match self.is_reversed {
            true => found.count - 1,
            false => 0,
        };
        self.part(tape, found, step)
    }

    /// The tensor of a step that it reads.
    pub(super) fn part(&self, tape: &Tape, found: &Found, step: usize) -> TensorIr {
        let view = self.views.get(step).map(|view| &tape.operations[*view]);
        match view.and_then(|view| view.outputs().next()) {
            Some(out) => status_free(out),
            None => tape.made(found, step, self.from),
        }
    }
}

/// The loops of a recording, in order.
pub(super) fn loops(tape: &Tape) -> Vec<Found> {
    let mut positions: HashMap<u64, Vec<usize>> = HashMap::default();
    for (at, kind) in tape.kinds.iter().enumerate() {
        positions.entry(*kind).or_default().push(at);
    }
    let mut found: Vec<Found> = Vec::new();
    let (mut start, mut attempts) = (0, ATTEMPTS);
    while start < tape.kinds.len() {
        let alike = &positions[&tape.kinds[start]];
        let next = alike.partition_point(|at| *at <= start);
        let periods = alike[next..].iter().map(|at| at - start).take(PERIODS);
        let periods = periods.filter(|period| steps_alike(tape, start, *period, STEPS) == STEPS);
        let mut loops = periods.take(ALIKE).filter_map(|period| {
            let steps = of(tape, start, period, STEPS);
            if attempts == 0 || steps.regular() < STEPS {
                return None;
            }
            attempts -= 1;
            longest(tape, start, period)
        });
        // What joins the steps of a loop before it is no part of another one.
        let is_apart = |one: &Found| {
            let mut joins = found.iter().flat_map(|other| &other.gathers);
            !joins.any(|gather| (one.start..one.end()).contains(&gather.by))
        };
        match loops.find(is_apart) {
            Some(one) => {
                start = one.end();
                found.push(one);
            }
            None => start += 1,
        }
    }
    found
}

fn of(tape: &Tape, start: usize, period: usize, count: usize) -> Steps<'_> {
    Steps {
        tape,
        start,
        period,
        count,
    }
}

/// How many times the same operations follow each other, up to a number.
fn steps_alike(tape: &Tape, start: usize, period: usize, most: usize) -> usize {
    let kinds = &tape.kinds[start..];
    let ends = kinds.len().min(most.saturating_mul(period));
    let is_alike = |at: &usize| kinds[*at] == kinds[at + period];
    let alike = (0..ends.saturating_sub(period)).take_while(is_alike);
    alike.count() / period + 1
}

/// The loop with steps of `period` operations from a position on, of as many steps as there are.
fn longest(tape: &Tape, start: usize, period: usize) -> Option<Found> {
    let count = steps_alike(tape, start, period, usize::MAX);
    let of = |count| of(tape, start, period, count);
    // What follows the last step may look like one: another loop, of a layer of the same size.
    let count = of(count).regular();
    let counts = (STEPS.max(count.saturating_sub(1))..=count).rev();
    counts.into_iter().find_map(|count| of(count).found())
}

/// Where an operand comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The same step.
    Step(Made),
    /// The step before.
    Before(Made),
    /// Outside of the loop.
    Outside(TensorId),
}

/// Operations that may be the steps of a loop.
struct Steps<'a> {
    tape: &'a Tape,
    start: usize,
    period: usize,
    count: usize,
}

impl Steps<'_> {
    fn span(&self) -> Range<usize> {
        self.start..self.start + self.count * self.period
    }

    fn at(&self, step: usize, offset: usize) -> usize {
        self.start + step * self.period + offset
    }

    /// `None` for what a step reads of steps before the last one, and of what comes behind.
    fn source(&self, step: usize, id: TensorId) -> Option<Source> {
        let Some((at, place)) = self.tape.makers.get(&id) else {
            return Some(Source::Outside(id));
        };
        if *at < self.start {
            return Some(Source::Outside(id));
        }
        let (of, offset) = (
            (at - self.start) / self.period,
            (at - self.start) % self.period,
        );
        match (step.checked_sub(of)?, of < self.count) {
            (0, true) => Some(Source::Step((offset, *place))),
            (1, true) => Some(Source::Before((offset, *place))),
            _ => None,
        }
    }

    /// How many steps read what the second one reads.
    fn regular(&self) -> usize {
        let sources = |step: usize| {
            let operations = &self.tape.operations[self.at(step, 0)..self.at(step + 1, 0)];
            let operands = operations.iter().flat_map(|operation| operation.inputs());
            operands.map(move |tensor| self.source(step, tensor.id))
        };
        let is_regular = |step: &usize| sources(*step).eq(sources(1));
        2 + (2..self.count).take_while(is_regular).count()
    }

    fn found(&self) -> Option<Found> {
        let mut found = Found {
            start: self.start,
            period: self.period,
            count: self.count,
            states: Vec::new(),
            initial: Vec::new(),
            takes: HashMap::default(),
            puts: BTreeMap::new(),
            gathers: Vec::new(),
        };
        // Where the results of assignments are read: by the next one alone.
        let mut read: Vec<(Made, usize)> = Vec::new();
        for offset in 0..self.period {
            self.parts(offset, &mut found)?;
            let operands = self.tape.operations[self.at(1, offset)].inputs().count();
            for operand in 0..operands {
                let (source, first) = self.operand(offset, operand)?;
                let (Source::Step(made) | Source::Before(made)) = source else {
                    continue;
                };
                let is_own = source == Source::Before((offset, 0)) && operand == 0;
                if found.puts.contains_key(&offset) && is_own {
                    continue;
                }
                read.push((made, offset));
                if let (Source::Before(made), Some(first)) = (source, first) {
                    let known = found.states.iter().position(|state| *state == made);
                    match known {
                        Some(known) if found.initial[known].id == first.id => {}
                        Some(_) => return None,
                        None => {
                            found.states.push(made);
                            found.initial.push(first);
                        }
                    }
                }
            }
        }
        let is_put = |made: &Made| found.puts.contains_key(&made.0);
        if read.iter().any(|(made, _)| is_put(made)) {
            return None;
        }
        self.outside(&mut found)?;
        let moves = found.takes.len() + found.puts.len() + found.gathers.len();
        (moves > 0).then_some(found)
    }

    /// Where an operand comes from in every step, and what it is in the first one where that is from outside.
    fn operand(&self, offset: usize, operand: usize) -> Option<(Source, Option<TensorIr>)> {
        let of = |step: usize| {
            self.tape.operations[self.at(step, offset)]
                .inputs()
                .nth(operand)
        };
        let source = self.source(1, of(1)?.id)?;
        for step in 2..self.count {
            if self.source(step, of(step)?.id)? != source {
                return None;
            }
        }
        let first = of(0)?;
        match (source, self.source(0, first.id)?) {
            (Source::Before(_), Source::Outside(_)) => Some((source, Some(status_free(first)))),
            (Source::Before(_), _) => None,
            (source, same) if source == same => Some((source, None)),
            _ => None,
        }
    }

    /// Notes what an operation takes or puts where that is another part in each step.
    fn parts(&self, offset: usize, found: &mut Found) -> Option<()> {
        let second = &self.tape.operations[self.at(1, offset)];
        let Some((whole, _)) = ranges(second) else {
            return Some(());
        };
        let sizes = whole.shape.to_vec();
        let of_step = |step: usize| -> Option<Vec<Range<usize>>> {
            let (_, ranges) = ranges(&self.tape.operations[self.at(step, offset)])?;
            let pairs = ranges.iter().zip(&sizes);
            Some(pairs.map(|(range, size)| range.to_range(*size)).collect())
        };
        let (_, of_second) = ranges(second)?;
        let all = (0..self.count).map(of_step).collect::<Option<Vec<_>>>()?;
        let [first, next, ..] = &all[..] else {
            return None;
        };
        let mut moving = (0..first.len()).filter(|axis| first[*axis] != next[*axis]);
        let Some(axis) = moving.next() else {
            return all.iter().all(|one| one == first).then_some(());
        };
        let length = first[axis].len();
        let start = |one: &[Range<usize>]| one[axis].start as isize;
        let step = start(next) - start(first);
        let is_regular = all.iter().enumerate().all(|(at, one)| {
            let others = one.iter().zip(&sizes).enumerate();
            let mut others = others.filter(|(other, _)| *other != axis);
            start(one) == start(first) + at as isize * step
                && one[axis].len() == length
                && others.all(|(_, (range, size))| *range == (0..*size))
        });
        let steps_by_one = of_second.iter().all(|range| range.step == 1);
        // Ranges that are left out take all.
        if !is_regular || !steps_by_one || step == 0 {
            return None;
        }
        let made = self.tape.operations[self.at(1, offset)].inputs().next()?.id;
        if sliced(second).is_some() {
            // One part of what a step makes is the same part of it in each step.
            if !matches!(self.source(1, made)?, Source::Outside(_)) {
                return None;
            }
            let start = start(first) as usize;
            found.takes.insert(offset, Take { axis, start, step });
            return Some(());
        }
        let is_next = self.source(1, made)? == Source::Before((offset, 0));
        let covers = step.unsigned_abs() == length && length * self.count == sizes[axis];
        if !is_next || !covers {
            return None;
        }
        let value = status_free(second.inputs().nth(1)?);
        let is_reversed = step < 0;
        let put = Put {
            axis,
            is_reversed,
            value,
        };
        found.puts.insert(offset, put);
        Some(())
    }

    /// Notes what is read outside: of the last step its states and what was put together, of all steps what is
    /// concatenated.
    fn outside(&self, found: &mut Found) -> Option<()> {
        let span = self.span();
        let mut gathered: HashSet<(Made, usize, bool)> = HashSet::default();
        for step in 0..self.count {
            for offset in 0..self.period {
                let outputs = self.tape.operations[self.at(step, offset)].outputs();
                for (place, tensor) in outputs.enumerate() {
                    let made = (offset, place);
                    let is_last = step + 1 == self.count;
                    let is_given = is_last
                        && (found.puts.contains_key(&offset) || found.states.contains(&made));
                    if is_given {
                        continue;
                    }
                    if self.tape.results.contains(&tensor.id) {
                        return None;
                    }
                    for by in self.readers(tensor.id).filter(|by| !span.contains(by)) {
                        let (by, is_viewed) = self.joined(by);
                        if !gathered.insert((made, by, is_viewed)) {
                            continue;
                        }
                        let (is_reversed, views) = self.gathered(made, by, is_viewed)?;
                        found.gathers.push(Gather {
                            from: made,
                            views,
                            by,
                            is_reversed,
                        });
                    }
                }
            }
        }
        found.gathers.sort_by_key(|gather| (gather.by, gather.from));
        Some(())
    }

    fn readers(&self, id: TensorId) -> impl Iterator<Item = usize> {
        self.tape.readers.get(&id).into_iter().flatten().copied()
    }

    /// Of a view that one operation alone reads, this one.
    fn joined(&self, by: usize) -> (usize, bool) {
        let operation = &self.tape.operations[by];
        let Some(out) = operation.outputs().next().filter(|_| is_reshape(operation)) else {
            return (by, false);
        };
        let mut readers = self.readers(out.id);
        match (
            readers.next(),
            readers.next(),
            self.tape.results.contains(&out.id),
        ) {
            (Some(reader), None, false) => (reader, true),
            _ => (by, false),
        }
    }

    /// Whether a concatenation reads of all steps, or of views of them, from the last to the first, and those
    /// views; `None` where it does not read them one after the other, once.
    fn gathered(&self, made: Made, by: usize, is_viewed: bool) -> Option<(bool, Vec<usize>)> {
        let (operands, ..) = concatenated(&self.tape.operations[by])?;
        let of_step = |step: usize| {
            let operation = &self.tape.operations[self.at(step, made.0)];
            operation.outputs().nth(made.1).map(|tensor| tensor.id)
        };
        let mut steps: Vec<TensorId> = (0..self.count).map(of_step).collect::<Option<_>>()?;
        let mut views = Vec::new();
        if is_viewed {
            let read = |id: TensorId| operands.iter().any(|operand| operand.id == id);
            for id in &mut steps {
                let view = self.readers(*id).find_map(|view| {
                    let operation = &self.tape.operations[view];
                    let out = operation
                        .outputs()
                        .next()
                        .filter(|_| is_reshape(operation))?;
                    read(out.id).then_some((view, out.id))
                });
                let (view, out) = view?;
                *id = out;
                views.push(view);
            }
            let shape = |view: &usize| {
                let mut outputs = self.tape.operations[*view].outputs();
                outputs.next().map(|out| out.shape.to_vec())
            };
            if views.iter().any(|view| shape(view) != shape(&views[0])) {
                return None;
            }
        }
        let read: Vec<TensorId> = operands.iter().map(|one| one.id).collect();
        let all: HashSet<TensorId> = steps.iter().copied().collect();
        if read.iter().filter(|id| all.contains(id)).count() != self.count {
            return None;
        }
        let is_there = |steps: &[TensorId]| read.windows(self.count).any(|some| some == steps);
        let back: Vec<TensorId> = steps.iter().rev().copied().collect();
        match (is_there(&steps), is_there(&back)) {
            (true, _) => Some((false, views)),
            (false, true) => Some((true, views)),
            _ => None,
        }
    }
}
