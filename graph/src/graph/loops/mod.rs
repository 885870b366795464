//! Loops over time, of which a recording has every step.
//!
//! A recurrent layer is recorded as its steps, one after the other, as many as the sequence is long. In a
//! rolled graph one step stands for all of them, between two operations that say what goes from each step to
//! the next and what is collected of all:
//!
//! ```text
//! count, h = begin(h₀)
//! x_t      = take(x, count)          one step's part of x
//! h'       = tanh(x_t·W + h·U)
//! h_n, y   = end(count, h', h')      the last h, and all of them along an axis
//! ```
//!
//! `count` is a tensor with as many elements as there are steps. The three are custom operations; no device
//! executes them.

mod fewer;
mod find;
mod tape;

use burn::backend::ir::{CustomOpIr, OperationIr, ScalarIr, TensorId, TensorIr};
use burn::tensor::{DType, Shape};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::Graph;
use super::describe::describe;
pub use fewer::{FewerSteps, Repeated};
use fewer::{Rolling, fewer, ordered};
use find::{Found, Put};
use tape::{Tape, status_free};

const BEGIN: &str = "loop_begin";
const TAKE: &str = "loop_take";
const END: &str = "loop_end";

/// A graph in which one step stands for all steps of each loop over time.
#[derive(Debug)]
pub struct Rolled {
    /// The operations. It cannot be executed.
    pub graph: Graph,
    /// Where each of them is in the graph it was made of; of a loop's, in its second step. `None` for those
    /// that frame a loop.
    pub origins: Vec<Option<usize>>,
    /// For each operation of a step the positions of its twins in all steps, in the graph it was made of.
    pub twins: HashMap<usize, Vec<usize>>,
    tape: Tape,
    loops: Vec<Rolling>,
    /// Positions of the tape in the graph.
    indices: HashMap<usize, usize>,
}

impl Rolled {
    /// How many loops there are.
    pub fn loops(&self) -> usize {
        self.loops.len()
    }

    /// What is recorded where the loops have so many steps, in their order, no more than were recorded; `None` for
    /// others. To be compared with a recording [in this order](Graph::in_steps).
    pub fn with_steps(&self, counts: &[usize]) -> Option<FewerSteps> {
        fewer(&self.graph, &self.tape, &self.loops, &self.indices, counts)
    }
}

/// An operation that frames the step of a loop in a [`Rolled`] graph.
#[derive(Debug, Clone, PartialEq)]
pub enum LoopPart<'a> {
    /// Before the step.
    Begin {
        /// A tensor with an element for each step.
        count: &'a TensorIr,
        /// What the states are before the first step.
        initial: &'a [TensorIr],
        /// What they are in the step.
        states: &'a [TensorIr],
    },
    /// One step's part of a tensor from outside.
    Take {
        /// The tensor.
        from: &'a TensorIr,
        /// The part of it.
        part: &'a TensorIr,
        /// The axis along which it is a part.
        axis: usize,
        /// Where the part of the first step starts.
        start: usize,
        /// From the start of one step's part to that of the next.
        step: isize,
    },
    /// After the step.
    End {
        /// A tensor with an element for each step.
        count: &'a TensorIr,
        /// What the states are in the next step.
        next: &'a [TensorIr],
        /// What they are after the last one.
        last: &'a [TensorIr],
        /// What is collected of each step.
        parts: &'a [TensorIr],
        /// All of it.
        collected: &'a [TensorIr],
        /// For each of these the axis along which the parts are, and whether the last step's comes first.
        places: Vec<(usize, bool)>,
    },
}

impl<'a> LoopPart<'a> {
    /// Of an operation of a rolled graph.
    pub fn of(operation: &'a OperationIr) -> Option<Self> {
        let OperationIr::Custom(CustomOpIr {
            id,
            inputs,
            outputs,
            scalars,
        }) = operation
        else {
            return None;
        };
        let number = |at: usize| scalars.get(at).map(|scalar| scalar.elem::<i64>());
        Some(match &**id {
            BEGIN => {
                let (count, states) = outputs.split_first()?;
                Self::Begin {
                    count,
                    initial: inputs,
                    states,
                }
            }
            TAKE => Self::Take {
                from: inputs.first()?,
                part: outputs.first()?,
                axis: number(0)? as usize,
                step: number(1)? as isize,
                start: number(2)? as usize,
            },
            END => {
                let states = number(0)? as usize;
                let (count, given) = inputs.split_first()?;
                let (next, parts) = given.split_at_checked(states)?;
                let (last, collected) = outputs.split_at_checked(states)?;
                let places = (0..collected.len()).map(|at| {
                    let (axis, is_reversed) = (number(1 + 2 * at)?, number(2 + 2 * at)?);
                    Some((axis as usize, is_reversed != 0))
                });
                Self::End {
                    count,
                    next,
                    last,
                    parts,
                    collected,
                    places: places.collect::<Option<_>>()?,
                }
            }
            _ => return None,
        })
    }

    /// Sets where the first step's part starts, in an operation that takes parts.
    pub fn start_at(operation: &mut OperationIr, start: usize) {
        if let OperationIr::Custom(custom) = operation
            && custom.id == TAKE
        {
            custom.scalars[2] = ScalarIr::Int(start as i64);
        }
    }
}

impl Graph {
    /// With one step in place of all steps of each loop over time; `None` where there is no loop.
    ///
    /// Steps are told by what they do, wherever they come from: Burn's recurrent layers, a user's own cell in
    /// a `for` loop, one direction or both, several layers. There have to be at least three; each takes the
    /// next part of a tensor from outside or writes the next part of a result, and reads of the steps before
    /// it the last one alone.
    ///
    /// ```
    /// use burn::nn::{Lstm, LstmConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_graph::{LoopPart, record};
    ///
    /// let device = Device::flex();
    /// let lstm = LstmConfig::new(4, 8, true).init(&device);
    /// let sizes = [5, 9].map(|steps| {
    ///     let x = Tensor::<3>::ones([2, steps, 4], &device);
    ///     let forward = |lstm: &Lstm, x| lstm.forward(x, None).0;
    ///     let recording = record(&lstm, &x, forward).unwrap().fold_rows();
    ///     let rolled = recording.graph().rolled().unwrap();
    ///     let is_begin = |part: &LoopPart<'_>| matches!(part, LoopPart::Begin { .. });
    ///     let parts = rolled.graph.nodes().filter_map(|node| LoopPart::of(node.operation()));
    ///     assert_eq!(parts.filter(is_begin).count(), 1);
    ///     rolled.graph.nodes().len()
    /// });
    /// // As many operations for 9 steps as for 5.
    /// assert_eq!(sizes[0], sizes[1]);
    /// ```
    pub fn rolled(&self) -> Option<Rolled> {
        let tape = Tape::of(self);
        let found = find::loops(&tape);
        (!found.is_empty()).then(|| roll(self, tape, found))
    }

    /// The same operations in the order of a [`Rolled`] graph, with every step.
    pub fn in_steps(&self) -> Graph {
        ordered(self)
    }
}

/// The operations of the rolled graph.
fn roll(graph: &Graph, tape: Tape, found: Vec<Found>) -> Rolled {
    let mut rolled = operations(graph, &tape, &found);
    rolled.leave_out_unread(graph);
    let mut twins = HashMap::default();
    for found in &found {
        for offset in 0..found.period {
            let of_step = |step| tape.origins[found.start + step * found.period + offset];
            let all = (0..found.count).map(of_step).collect();
            twins.insert(of_step(1), all);
        }
    }
    let mut graph = graph.clone();
    graph.operations = std::mem::take(&mut rolled.operations);
    // One of equal constants is read.
    let read = graph
        .operations
        .iter()
        .flat_map(|operation| operation.inputs());
    let read = read
        .map(|tensor| tensor.id)
        .chain(graph.outputs.iter().copied());
    let read: HashSet<TensorId> = read.collect();
    graph.constants.retain(|id, _| read.contains(id));
    describe(&mut graph);
    let named = found.into_iter().zip(rolled.named);
    let loops = named.map(|(found, (count, collected))| Rolling {
        found,
        count,
        collected,
    });
    Rolled {
        graph,
        origins: rolled.origins,
        twins,
        loops: loops.collect(),
        indices: rolled.indices,
        tape,
    }
}

/// The operations of the rolled graph, and the tensors that it has besides those that were recorded.
fn operations(graph: &Graph, tape: &Tape, found: &[Found]) -> Operations {
    let mut next = graph.unused_id();
    let mut fresh = |shape: Vec<usize>, dtype: DType| {
        next += 1;
        TensorIr {
            id: TensorId::new(next - 1),
            shape: Shape::from(shape),
            status: burn::backend::ir::TensorStatus::ReadOnly,
            dtype,
        }
    };
    let mut rolled = Operations::default();
    // Views of what steps make that loops collect; that of the last step may have other readers.
    let gathers = found.iter().flat_map(|found| &found.gathers);
    let mut viewed: HashSet<usize> = gathers.flat_map(|gather| gather.views.clone()).collect();
    viewed.retain(|view| {
        let mut outputs = tape.operations[*view].outputs();
        outputs.all(|out| {
            let readers = tape.readers.get(&out.id).map_or(0, Vec::len);
            readers == 1 && !tape.results.contains(&out.id)
        })
    });
    // What is read instead of the parts of steps: position of a concatenation, and its operands.
    let mut joined: HashMap<usize, Vec<TensorIr>> = HashMap::default();
    let mut loops = found.iter().peekable();
    let mut at = 0;
    while at < tape.operations.len() {
        if viewed.contains(&at) {
            at += 1;
            continue;
        }
        let Some(found) = loops.next_if(|found| found.start == at) else {
            let operation = match (joined.get(&at), &tape.operations[at]) {
                // All of it is collected by the loop.
                (Some(parts), _) if parts.len() == 1 => None,
                (Some(parts), operation) => Some(tape::with_parts(operation, parts)),
                (None, operation) => Some(operation.clone()),
            };
            if let Some(operation) = operation {
                rolled.indices.insert(at, rolled.operations.len());
                rolled.push(operation, Some(tape.origins[at]));
            }
            at += 1;
            continue;
        };
        let count = fresh(vec![found.count], DType::I64);
        let states = found.states.iter();
        let states: Vec<TensorIr> = states.map(|state| tape.made(found, 0, *state)).collect();
        let begin = [vec![count.clone()], states].concat();
        let begin = custom(BEGIN, found.initial.clone(), begin, Vec::new());
        rolled.push(begin, None);
        rolled.step(tape, found, &count);
        let mut of_loop = Vec::new();
        let (mut parts, mut collected, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut collect = |part: TensorIr, all: TensorIr, axis: usize, is_reversed: bool| {
            parts.push(part);
            collected.push(all);
            places.extend([axis as i64, i64::from(is_reversed)].map(ScalarIr::Int));
        };
        for (offset, put) in &found.puts {
            let last = tape.made(found, found.count - 1, (*offset, 0));
            let Put {
                axis,
                is_reversed,
                value,
            } = put;
            collect(value.clone(), last, *axis, *is_reversed);
        }
        for gather in &found.gathers {
            let part = gather.part(tape, found, 1);
            if let Some(view) = gather.views.get(1) {
                let view = (tape.operations[*view].clone(), tape.origins[*view]);
                rolled
                    .indices
                    .insert(gather.views[1], rolled.operations.len());
                rolled.push(view.0, Some(view.1));
            }
            let (operands, axis, out) =
                tape::concatenated(&tape.operations[gather.by]).expect("found as a concatenation");
            let operands = joined.entry(gather.by).or_insert_with(|| operands.to_vec());
            let first = gather.first(tape, found).id;
            let place = operands.iter().position(|one| one.id == first);
            let place = place.expect("found among the operands");
            let all = match operands.len() == found.count {
                true => out.clone(),
                false => {
                    let mut shape = part.shape.to_vec();
                    shape[axis] *= found.count;
                    fresh(shape, part.dtype)
                }
            };
            of_loop.push((all.id != out.id).then_some(all.id));
            operands.splice(place..place + found.count, [all.clone()]);
            collect(part, all, axis, gather.is_reversed);
        }
        let of_step = |step| {
            let states = found.states.iter();
            states.map(move |state| tape.made(found, step, *state))
        };
        let inputs = std::iter::once(count.clone())
            .chain(of_step(1))
            .chain(parts);
        let outputs = of_step(found.count - 1).chain(collected);
        let scalars = std::iter::once(ScalarIr::Int(found.states.len() as i64)).chain(places);
        let end = custom(END, inputs.collect(), outputs.collect(), scalars.collect());
        rolled.push(end, None);
        rolled.named.push((count.id, of_loop));
        at = found.end();
    }
    rolled
}

#[derive(Default)]
struct Operations {
    operations: Vec<OperationIr>,
    origins: Vec<Option<usize>>,
    /// Where operations of the tape are.
    indices: HashMap<usize, usize>,
    /// Of each loop its count, and what it collects for a part of a concatenation.
    named: Vec<(TensorId, Vec<Option<TensorId>>)>,
}

impl Operations {
    /// Without what nothing reads: what was there before parts of it were written, in each step.
    fn leave_out_unread(&mut self, graph: &Graph) {
        let mut read: HashSet<TensorId> = graph.results.clone();
        let mut stays = vec![false; self.operations.len()];
        for (at, operation) in self.operations.iter().enumerate().rev() {
            if operation.outputs().any(|out| read.contains(&out.id)) {
                stays[at] = true;
                read.extend(operation.inputs().map(|tensor| tensor.id));
            }
        }
        let mut places = Vec::with_capacity(stays.len());
        let mut next = 0;
        for stays in &stays {
            places.push(stays.then_some(next));
            next += usize::from(*stays);
        }
        let moved = self
            .indices
            .iter()
            .filter_map(|(at, index)| Some((*at, places[*index]?)));
        self.indices = moved.collect();
        let mut all = stays.iter();
        self.operations.retain(|_| all.next() == Some(&true));
        let mut all = stays.iter();
        self.origins.retain(|_| all.next() == Some(&true));
    }

    fn push(&mut self, operation: OperationIr, origin: Option<usize>) {
        self.operations.push(operation);
        self.origins.push(origin);
    }

    /// The second step, whose states are results of the first.
    fn step(&mut self, tape: &Tape, found: &Found, count: &TensorIr) {
        for offset in 0..found.period {
            let at = found.start + found.period + offset;
            if found.puts.contains_key(&offset) {
                continue;
            }
            self.indices.insert(at, self.operations.len());
            let Some(take) = found.takes.get(&offset) else {
                self.push(tape.operations[at].clone(), Some(tape.origins[at]));
                continue;
            };
            let (from, part) = tape::sliced(&tape.operations[at]).expect("found as a slice");
            let inputs = vec![status_free(from), count.clone()];
            let numbers = [take.axis as i64, take.step as i64, take.start as i64];
            let numbers = numbers.map(ScalarIr::Int).to_vec();
            let take = custom(TAKE, inputs, vec![status_free(part)], numbers);
            self.push(take, Some(tape.origins[at]));
        }
    }
}

fn custom(
    id: &'static str,
    inputs: Vec<TensorIr>,
    outputs: Vec<TensorIr>,
    scalars: Vec<ScalarIr>,
) -> OperationIr {
    OperationIr::Custom(CustomOpIr::with_scalars(id, &inputs, &outputs, scalars))
}
