//! What is remembered of forward passes between steps.

mod change;
mod last_used;
mod parts;

use std::any::{Any, TypeId};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::ir::TensorId;
use burn::module::{Flag, Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Device, Int, Tensor};

use crate::graph::Uploaded;
use crate::hooks::Carried;
use crate::record::{Seeks, Walked, record_with};
use crate::tensors::{Given, input_device};
use crate::{Form, Graph, GraphError, Halves, Recording, Tensors, Verified, hooks};
use change::change;
use last_used::LastUsed;
use parts::parts;

/// A forward pass: a closure at a place in the user's program, with the types and ranks that it uses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pass {
    caller: &'static Location<'static>,
    /// Model, input, result and closure: two closures that go through one function are two.
    types: TypeId,
    variant: u64,
    trains: bool,
    /// Which parameters have gradients: another model of the type may stop others.
    trained: u64,
    /// How many hooks the model carries: they may have parameters of their own.
    hooks: usize,
    /// Ranks and dtypes of the inputs, and which of them have gradients.
    inputs: Vec<(usize, DType, bool)>,
    /// Gradients of a batch without examples say nothing of those of another.
    empty: Empty,
    kind: u64,
}

/// Which inputs have no elements. Not one by one: lists of what an image shows are empty in ever other places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Empty {
    None,
    Some,
    All,
}

impl Empty {
    fn of(signature: &[(Vec<usize>, DType)]) -> Self {
        let is_empty = |(shape, _): &&(Vec<usize>, DType)| shape.contains(&0);
        match signature.iter().filter(is_empty).count() {
            0 => Self::None,
            count if count == signature.len() => Self::All,
            _ => Self::Some,
        }
    }
}

/// What is known of a forward pass.
#[derive(Debug, Clone)]
struct Known {
    /// Which results have gradients.
    tracked: Vec<bool>,
    /// To which results something that trains has led: of the others, constants so far, nobody knows.
    reached: Vec<bool>,
    /// Whether another step may have more or fewer results, of a `Vec` say.
    varies: bool,
    /// Whether the gradients are those of the model.
    is_verified: bool,
    /// What the recordings had whose gradients were compared, or so often not finite that they are no longer tried
    /// in each step; `None` where Burn cannot record them.
    compared: Option<Arc<HashSet<u64>>>,
    /// How often gradients were not finite since they were compared.
    not_finite: u32,
    /// Whether a recording had more than that: the next one that has is compared, too.
    watches: bool,
    /// How often it was asked for.
    uses: u64,
    /// From which use on gradients are compared again, with inputs of no more elements than these, for which memory
    /// was enough; eight times as late with others.
    again: (u64, usize),
}

/// From which use on a look is repeated, at each doubling.
const AGAIN: u64 = 8;

/// The same of whether a recording that is kept still holds.
const AGAIN_KEPT: u64 = 2;

/// How often gradients are tried in one step after the other, where they are not finite: weights that make them so
/// move away, a derivative at infinity stays.
const TRIES: u32 = 4;

impl Known {
    /// Which results something that trains leads to for the first time.
    fn appearing(&self, reached: &[bool]) -> Vec<bool> {
        let both = reached.iter().zip(&self.reached);
        both.map(|(now, before)| *now && !before).collect()
    }

    /// What is known with another recording: of what is a constant in that, as before.
    fn joined(&self, tracked: &[bool], reached: &[bool]) -> (Vec<bool>, Vec<bool>) {
        let before = self
            .tracked
            .iter()
            .copied()
            .zip(self.reached.iter().copied());
        let now = tracked.iter().copied().zip(reached.iter().copied());
        let both = before.zip(now);
        both.map(|(before, now)| if now.1 { now } else { before })
            .unzip()
    }
}

/// What a kept recording is used for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Kept {
    pass: Pass,
    shapes: Vec<Vec<usize>>,
    values: u64,
    /// Default dtypes are the device's, and what it supports.
    device: String,
    model: u64,
    /// Whether its gradients were to be compared, and what half precision was taken for: clones may differ
    /// in that.
    verifies: bool,
    halves: Halves,
}

/// How many recordings are kept.
const KEPT: usize = 64;

/// Of how many of them, those that were used last, the constants stay on their device.
const ON_DEVICE: usize = 8;

/// Of how many forward passes something is remembered: models that are made anew are others.
const PASSES: usize = 256;

/// A recording that is kept.
#[derive(Debug)]
struct Entry {
    recording: Box<dyn Any + Send>,
    /// What it keeps on its device.
    uploaded: Uploaded,
    uses: u64,
}

#[derive(Debug, Default)]
struct Memory {
    passes: Mutex<LastUsed<Pass, Known>>,
    recordings: Mutex<LastUsed<Kept, Entry>>,
    /// Forward passes whose numbers change from step to step: of them no recording is kept.
    changing: Mutex<LastUsed<Pass, ()>>,
}

/// Recordings of forward passes, for whoever runs one in each step.
///
/// The gradients of a forward pass are compared once, at its first training step; a recording is
/// made anew in each step, or kept. A forward pass is known by the closure and the place in the program
/// that asks, by the types and ranks that it uses, by which inputs have no elements, so that a batch without examples
/// stands for no other, by the parameters that have gradients, so that each model is looked at, and by how many hooks
/// it carries; a recording that is kept also by shapes, by what inputs [say of
/// themselves](Tensors::describe), and by which parameters the model has, in which shapes and dtypes.
/// Functions behind one pointer, or boxed, are one closure, whose recordings are never kept. Clones share
/// what they remember.
///
/// Where a later step has operations that those before it lacked, or a number of another order of
/// magnitude (the weight of a term of the loss that begins at 0), gradients are compared once more, in
/// the step after it; and in any case at the 8th step, the 16th, the 32nd and so on, since a share of the gradients that is
/// small at first may grow. A step whose inputs have more elements than any that was compared, for which memory may
/// not be enough, leaves that to the next one that has no more. Gradients that are not finite are tried again in the
/// next step, after four times at those steps alone. What a forward pass detaches may depend on a `bool` or a variant of an input, each of
/// which is compared, but not on a number or on what the closure captures where the operations are the
/// same: that is seen at those steps alone, as what depends on a field of the model that no visitor sees (a `bool`
/// that is skipped) and that changes while it trains. The 256 forward passes that were looked at last are remembered.
///
/// At such uses, and at the second and fourth, a recording that is kept is made once more: where numbers of the forward pass, or plain
/// tensors of the model, are no longer those that were recorded, a warning of [`tracing`] says so, and this forward pass
/// is recorded in every step from then on.
///
/// From its second execution on, a recording that is kept has its constants on the device, plain tensors of the model too:
/// each of the 8 that were used last.
#[derive(Debug, Clone)]
pub struct Recordings {
    memory: Arc<Memory>,
    /// Whether a recording is kept for the shapes of its inputs, the 64 that were used last. Default: no.
    pub caches: bool,
    /// Whether gradients are compared with those of the model, as
    /// [`Recording::verify_gradients`] does. Default: yes.
    ///
    /// Where they cannot be compared, a warning of [`tracing`] says so: once where Burn cannot record the
    /// backward pass, at each attempt where they are not finite. Where the backward pass of a batch without examples
    /// panics there are none to compare.
    pub verifies: bool,
    /// What tensors in half precision are taken for. Default: half.
    pub halves: Halves,
}

impl Default for Recordings {
    fn default() -> Self {
        Self {
            memory: Arc::default(),
            caches: false,
            verifies: true,
            halves: Halves::AsStored,
        }
    }
}

impl Recordings {
    /// A recording of `forward`; `caller` is the place that asks for it, and `variant` tells apart
    /// what else a recording depends on.
    ///
    /// # Errors
    ///
    /// As [`record`](crate::record()) and [`Recording::verify_gradients`].
    pub fn recording<M, I, O, F>(
        &self,
        model: &M,
        input: &I,
        forward: F,
        caller: &'static Location<'static>,
        variant: u64,
    ) -> Result<Arc<Recording<O>>, GraphError>
    where
        M: Module,
        I: Tensors,
        O: Tensors + Send + Sync + 'static,
        F: FnOnce(&M, I) -> O,
    {
        let mut given = Given::default();
        let _ = input.map_tensors(&mut given);
        let (kind, values) = Form::of(input);
        let walked = Walked::of(model);
        let has_gradients = walked.device.as_ref().is_some_and(Device::is_autodiff);
        let state = State::of(model);
        let inputs = given.signature.iter().zip(&given.tracked);
        let pass = Pass {
            caller,
            types: typeid::of::<(M, I, O, F)>(),
            variant,
            trains: given.autodiff || has_gradients,
            trained: state.trained.finish(),
            hooks: walked.hooks.len(),
            inputs: inputs
                .map(|((shape, dtype), tracked)| (shape.len(), *dtype, *tracked))
                .collect(),
            empty: Empty::of(&given.signature),
            kind,
        };
        let verifies = self.verifies && (has_gradients || given.tracked.contains(&true));
        let elements = given.signature.iter();
        let elements = elements.map(|(shape, _)| shape.iter().product::<usize>());
        let elements = elements.sum::<usize>();
        let (is_due, again) = self.is_due(&pass, verifies, elements);
        let looks = (verifies, again, elements);
        let keeps = self.caches
            && !is_behind_a_pointer::<F>()
            && lock(&self.memory.changing).get(&pass).is_none();
        if !keeps {
            let sources = (&state.sources, &given.tracked[..]);
            let recording = self.record(walked, input, forward, pass, looks, sources)?;
            return Ok(Arc::new(recording));
        }
        let kept = Kept {
            pass: pass.clone(),
            shapes: given
                .signature
                .into_iter()
                .map(|(shape, _)| shape)
                .collect(),
            values,
            device: format!(
                "{:?}",
                walked.device.clone().or_else(|| input_device(input))
            ),
            model: state.all.finish(),
            verifies,
            halves: self.halves,
        };
        let known = self.kept::<O>(&kept, &walked.hooks);
        if let Some((known, uses)) = &known
            && !is_due
            && !(*uses >= AGAIN_KEPT && uses.is_power_of_two())
        {
            return Ok(known.clone());
        }
        let sources = (&state.sources, &given.tracked[..]);
        let recording = self.record(walked, input, forward, pass, looks, sources)?;
        let recording = Arc::new(recording);
        let change = known.and_then(|(known, _)| change(&known.graph, &recording.graph));
        match change {
            Some(what) => {
                tracing::warn!(
                    place = %kept.pass.caller,
                    "{what} changes from step to step, and a kept recording has it as it was: this forward pass is \
                     recorded in every step from here on, without `cached`"
                );
                // Those of other shapes, too. Dropped without the lock: there may be much in them.
                let _given_up =
                    lock(&self.memory.recordings).take_where(|other| other.pass == kept.pass);
                lock(&self.memory.changing).insert(kept.pass, (), PASSES);
            }
            None => {
                let mut recordings = lock(&self.memory.recordings);
                let entry = Entry {
                    uses: recordings.get(&kept).map_or(1, |entry| entry.uses),
                    recording: Box::new(recording.clone()),
                    uploaded: recording.graph.uploaded.shared(),
                };
                recordings.insert(kept, entry, KEPT);
            }
        }
        Ok(recording)
    }

    /// Counts a use of a forward pass. Whether gradients are to be compared in this step, and whether for
    /// that alone that it has been a while.
    fn is_due(&self, pass: &Pass, verifies: bool, elements: usize) -> (bool, bool) {
        let mut passes = lock(&self.memory.passes);
        let Some(known) = passes.get(pass) else {
            return (false, false);
        };
        known.uses += 1;
        let (from, most) = known.again;
        // Inputs that only grow have their turn, too.
        let is_time = known.uses >= from && (elements <= most || known.uses >= 8 * from);
        let again = verifies && known.compared.is_some() && is_time;
        let is_due = known.watches || verifies && (again || !known.is_verified);
        (is_due, again)
    }

    /// The kept recording, if it is of a model that carries the same hooks.
    fn kept<O: Send + Sync + 'static>(
        &self,
        kept: &Kept,
        carried: &[Carried],
    ) -> Option<(Arc<Recording<O>>, u64)> {
        let mut recordings = lock(&self.memory.recordings);
        let entry = recordings.get(kept)?;
        entry.uses += 1;
        let known = entry.recording.downcast_ref::<Arc<Recording<O>>>()?.clone();
        let uses = entry.uses;
        let older = recordings.older(ON_DEVICE);
        let let_go: Vec<_> = older.filter_map(|one| one.uploaded.let_go()).collect();
        drop(recordings);
        // Without the lock: there may be much in them.
        drop(let_go);
        let fits = known.graph.check_hooks(carried).is_ok();
        fits.then_some((known, uses))
    }

    fn record<M: Module, I: Tensors, O: Tensors>(
        &self,
        walked: Walked<'_, M>,
        input: &I,
        forward: impl FnOnce(&M, I) -> O,
        pass: Pass,
        (verifies, again, elements): (bool, bool, usize),
        sources: (&HashSet<ParamId>, &[bool]),
    ) -> Result<Recording<O>, GraphError> {
        let known = lock(&self.memory.passes).get(&pass).cloned();
        let is_verified = known.as_ref().is_some_and(|known| known.is_verified);
        let watches = known.as_ref().is_some_and(|known| known.watches);
        let seeks = match &known {
            _ if !pass.trains => Seeks::Nothing(&[]),
            _ if verifies && (watches || again || !is_verified) => Seeks::Backward,
            Some(known) if !known.varies && !watches => Seeks::Nothing(&known.tracked),
            _ => Seeks::Results,
        };
        let model = walked.model;
        let mut recording = record_with(walked, input, forward, self.halves, seeks)?;
        if !pass.trains {
            return Ok(recording);
        }
        let compared = known.as_ref().and_then(|known| known.compared.clone());
        let reached = reached(&recording.graph, sources);
        let fixed = known.as_ref().filter(|known| !known.varies);
        // A result that was a constant so far, a term of the loss that begins later say.
        let appears = fixed.map_or(Vec::new(), |known| known.appearing(&reached));
        let is_new = appears.contains(&true)
            || verifies
                && compared
                    .as_ref()
                    .is_some_and(|seen| parts(&recording.graph).any(|part| !seen.contains(&part)));
        if matches!(seeks, Seeks::Nothing(_)) {
            for (tracked, appears) in recording.tracked.iter_mut().zip(&appears) {
                *tracked |= appears;
            }
            if !is_new {
                return Ok(recording);
            }
        }
        let (tracked, reached) = match (fixed, seeks) {
            (Some(known), Seeks::Nothing(_)) => (known.tracked.clone(), known.reached.clone()),
            (Some(known), _) => known.joined(&recording.tracked, &reached),
            (None, _) => (recording.tracked.clone(), reached),
        };
        let mut now = Known {
            tracked,
            reached,
            varies: Form::of(&recording.form).0 != Form::of(&()).0,
            is_verified,
            compared,
            not_finite: known.as_ref().map_or(0, |known| known.not_finite),
            uses: known.as_ref().map_or(1, |known| known.uses),
            again: known.as_ref().map_or((AGAIN, 0), |known| known.again),
            watches: match seeks {
                Seeks::Results => watches && !is_new,
                Seeks::Nothing(_) | Seeks::Backward => watches || is_new,
            },
        };
        if matches!(seeks, Seeks::Backward) {
            if !is_verified || is_new || again {
                let verified = recording.verify_gradients(model, input)?;
                warn_of(verified, &pass);
                let is_finite = !matches!(verified, Verified::NotFinite | Verified::NoElements);
                now.not_finite = if is_finite { 0 } else { now.not_finite + 1 };
                // One that was compared before stays so.
                let is_open = !is_finite && (is_new || !is_verified) && now.not_finite < TRIES;
                now.is_verified = !is_open;
                let next = (now.uses + 1).next_power_of_two().max(AGAIN);
                now.again = (next, now.again.1.max(elements));
                now.watches = false;
                let is_known = match verified {
                    Verified::Same => true,
                    Verified::NotFinite => !is_open,
                    Verified::NotRecorded | Verified::NoElements => false,
                };
                if is_known {
                    let seen = now.compared.iter().flat_map(|seen| seen.iter().copied());
                    now.compared = Some(Arc::new(seen.chain(parts(&recording.graph)).collect()));
                }
            }
            recording.forget_backward();
        }
        lock(&self.memory.passes).insert(pass, now, PASSES);
        Ok(recording)
    }
}

/// Whether values of one closure type may be several functions.
fn is_behind_a_pointer<F>() -> bool {
    let name = std::any::type_name::<F>();
    let is_function = ["fn(", "for<", "unsafe ", "extern "];
    is_function.iter().any(|start| name.starts_with(start)) || name.contains("dyn ")
}

/// To which results something that has a gradient leads.
fn reached(graph: &Graph, (trained, tracked): (&HashSet<ParamId>, &[bool])) -> Vec<bool> {
    let parameters = graph.parameters.iter();
    let parameters = parameters.filter(|one| trained.contains(&one.id));
    let inputs = graph.inputs.iter().zip(tracked).filter(|(_, is)| **is);
    let sources = parameters.map(|one| one.tensor);
    let mut leads: HashSet<TensorId> = sources.chain(inputs.map(|(id, _)| *id)).collect();
    for node in graph.nodes() {
        // A hook may have parameters of its own.
        if node.hook().is_some() || node.operands().any(|one| leads.contains(&one.id)) {
            let made = node.operation().outputs();
            leads.extend(made.filter(|one| one.dtype.is_float()).map(|one| one.id));
        }
    }
    graph.outputs.iter().map(|id| leads.contains(id)).collect()
}

fn warn_of(verified: Verified, pass: &Pass) {
    let place = pass.caller;
    match verified {
        Verified::Same | Verified::NoElements => {}
        Verified::NotRecorded => tracing::warn!(
            %place,
            "Burn cannot record the backward pass of this forward pass: nobody knows whether it stops \
             gradients (`detach`), which an execution does not"
        ),
        Verified::NotFinite => tracing::warn!(
            %place,
            "some gradients of this forward pass are infinite or NaN in F32: they cannot be compared with \
             those of the model, which is tried again later"
        ),
    }
}

/// What a recording of a model depends on besides its type.
#[derive(Default)]
struct State {
    /// Which parameters it has, of which shapes and dtypes, which of them have gradients, and where
    /// training behaviour is on.
    all: DefaultHasher,
    /// Which of its parameters have gradients.
    trained: DefaultHasher,
    /// Those.
    sources: HashSet<ParamId>,
}

impl State {
    fn of<M: Module>(model: &M) -> Self {
        let mut state = Self::default();
        hooks::sharing(|| model.visit(&mut state));
        state
    }

    fn note(&mut self, id: ParamId, state: impl Hash) {
        (id, state).hash(&mut self.all);
    }
}

impl ModuleVisitor for State {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let has_gradient = param.is_tracked();
        // A frozen one may be another in each step, as an average of weights is.
        let id = has_gradient.then_some(param.id);
        id.hash(&mut self.trained);
        self.sources.extend(has_gradient.then_some(param.id));
        let value = param.base();
        self.note(param.id, (has_gradient, value.dims(), value.dtype()));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let value = param.val();
        self.note(param.id, (value.dims(), value.dtype()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let value = param.val();
        self.note(param.id, (value.dims(), value.dtype()));
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.note(flag.id, flag.is_enabled());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_look_again_waits_for_inputs_of_a_size_that_was_compared() {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(3, 4).init(&device);
        let recordings = Recordings::default();
        let place = Location::caller();
        let mut refused = None;
        for step in 1..=10 {
            let rows = if (2..10).contains(&step) { 3 } else { 2 };
            let x = Tensor::<2>::ones([rows, 3], &device);
            let forward = |model: &Linear, x: Tensor<2>| {
                let y = model.forward(x);
                let target = match step < 5 {
                    true => y.clone(),
                    false => y.clone().detach(),
                };
                (y * target).sum()
            };
            let found = recordings.recording(&model, &x, forward, place, 0);
            if matches!(found, Err(GraphError::StopsGradients { .. })) {
                refused = Some(step);
                break;
            }
            found.unwrap();
        }
        // The 8th step and the 9th would take more memory than the first.
        assert_eq!(refused, Some(10));
    }
}
