//! Running states, from an execution back into the model.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::backend::DispatchTensor;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{FloatDType, Tensor};
use burn_lean_reparam::{PathMapper, Trail, map_with_path};

use super::tensors::Alive;
use crate::graph::ParamPlace;
use crate::record::places::Places;
use crate::{GraphError, Parameter};

/// A running state that an execution has updated.
#[derive(Debug, Clone)]
pub struct ReplacedState {
    /// What it was.
    pub before: DispatchTensor,
    /// What was stored in its place.
    pub written: DispatchTensor,
}

/// Running states by their identity.
type States = HashMap<ParamId, ReplacedState>;

/// Of how many executions of a thread what they replaced is kept.
const KEPT: usize = 64;

/// Of how many executions in all: threads that have ended leave theirs behind.
const KEPT_OF_ALL: usize = 16 * KEPT;

/// What the last executions have replaced, of each identity and thread in the last two. Not a value
/// of each thread: those are dropped when it ends, which Burn's tensors do not allow on every device.
static REPLACED: Mutex<VecDeque<(ThreadId, States)>> = Mutex::new(VecDeque::new());

fn replaced() -> MutexGuard<'static, VecDeque<(ThreadId, States)>> {
    REPLACED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The running states that the last executions on this thread have updated, of those whose identities are
/// asked for: in the last two of each, the latest at the end.
///
/// For whoever takes a step back, after a batch with NaN say: an execution stores the next values at
/// once. Those of the models that were executed last on this thread are there, of 32 models at least. A copy
/// of a model has its identities, so that an update may be the copy's: what was written tells.
pub fn replaced_states(wanted: impl Fn(&ParamId) -> bool) -> HashMap<ParamId, Vec<ReplacedState>> {
    let mut found: HashMap<ParamId, Vec<ReplacedState>> = HashMap::new();
    let this = thread::current().id();
    let replaced = replaced();
    for (_, states) in replaced.iter().filter(|(of, _)| *of == this) {
        for (id, state) in states.iter().filter(|(id, _)| wanted(id)) {
            found.entry(*id).or_default().push(state.clone());
        }
    }
    found
}

fn note(states: States) {
    let this = thread::current().id();
    // Dropped after the lock is released.
    let mut older = Vec::new();
    let mut replaced = replaced();
    let mut seen = HashSet::new();
    for (_, known) in replaced.iter_mut().rev().filter(|(of, _)| *of == this) {
        older.extend(known.extract_if(|id, _| states.contains_key(id) && !seen.insert(*id)));
    }
    replaced.retain(|(_, states)| !states.is_empty());
    replaced.push_back((this, states));
    let of_this = replaced.iter().filter(|(of, _)| *of == this).count();
    let oldest = match of_this > KEPT {
        true => replaced.iter().position(|(of, _)| *of == this),
        false => (replaced.len() > KEPT_OF_ALL).then_some(0),
    };
    let oldest = oldest.and_then(|oldest| replaced.remove(oldest));
    drop(replaced);
    drop((older, oldest));
}

/// Stores the next values of running states.
///
/// Clones of a model share its states, so they are reached through one. Two threads that train
/// the same model each store theirs, and the last one stays; Burn's own pass averages them.
pub(crate) fn write_back<M: Module>(
    model: &M,
    parameters: &[Parameter],
    alive: &Alive<'_>,
) -> Result<(), GraphError> {
    let mut updates = HashMap::new();
    for parameter in parameters {
        if let Some(update) = parameter.update {
            updates.insert(parameter.place(), alive.output(update)?);
        }
    }
    if !updates.is_empty() {
        let mut write = WriteBack::new(updates);
        write.replaced = Some(States::new());
        let _ = map_with_path(model.clone(), &mut write);
        note(write.replaced.unwrap_or_default());
    }
    Ok(())
}

/// The model with these values of parameters; the rest of it stays.
pub(crate) fn store<'a, M: Module>(
    model: M,
    values: impl IntoIterator<Item = (&'a Parameter, DispatchTensor)>,
) -> M {
    let updates = values
        .into_iter()
        .map(|(parameter, value)| (parameter.place(), value))
        .collect();
    map_with_path(model, &mut WriteBack::new(updates))
}

struct WriteBack {
    places: Places,
    updates: HashMap<ParamPlace, DispatchTensor>,
    /// What was there, if it is wanted.
    replaced: Option<States>,
}

impl WriteBack {
    fn new(updates: HashMap<ParamPlace, DispatchTensor>) -> Self {
        Self {
            places: Places::default(),
            updates,
            replaced: None,
        }
    }
}

impl PathMapper for WriteBack {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.updates.remove(&self.places.meet(at)) else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let value = Tensor::<D>::from_dispatch(value);
        let value = match value.dtype() == old.dtype() {
            true => value.detach(),
            false => value.cast(FloatDType::from(old.dtype())).detach(),
        };
        let value = match old.is_autodiff() && !value.is_autodiff() {
            true => Tensor::from_inner(value),
            false => value,
        };
        let value = value.set_require_grad(old.is_require_grad());
        if let Some(replaced) = &mut self.replaced {
            let state = ReplacedState {
                before: old.into_dispatch(),
                written: value.clone().into_dispatch(),
            };
            replaced.insert(id, state);
        }
        Param::from_mapped_value(id, value, mapper)
    }

    burn_lean_reparam::map_kinds!(int, bool: |self, at, param| {
        self.places.meet(at);
        param
    });
}
