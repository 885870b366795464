//! Running states, from an execution back into the model.

use std::collections::{HashMap, VecDeque};
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

/// Running states by their identity.
type States = HashMap<ParamId, DispatchTensor>;

/// Of how many executions of a thread what they replaced is kept.
const KEPT: usize = 32;

/// Of how many executions in all: threads that have ended leave theirs behind.
const KEPT_OF_ALL: usize = 32 * KEPT;

/// What the last executions have replaced, of each model and thread that of its last one. Not a value
/// of each thread: those are dropped when it ends, which Burn's tensors do not allow on every device.
static REPLACED: Mutex<VecDeque<(ThreadId, States)>> = Mutex::new(VecDeque::new());

fn replaced() -> MutexGuard<'static, VecDeque<(ThreadId, States)>> {
    REPLACED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The running states that the last execution on this thread has updated, as they were before, of those
/// whose identities are asked for. They are given away: a second call has none.
///
/// For whoever takes a step back, after a batch with NaN say: an execution stores the next values at
/// once. Those of the models that were executed last on this thread are there, up to 32 of them.
pub fn take_replaced_states(wanted: impl Fn(&ParamId) -> bool) -> HashMap<ParamId, DispatchTensor> {
    let mut found = States::new();
    let mut replaced = replaced();
    for (of, states) in replaced.iter_mut() {
        if *of == thread::current().id() {
            found.extend(states.extract_if(|id, _| wanted(id)));
        }
    }
    replaced.retain(|(_, states)| !states.is_empty());
    found
}

fn note(states: States) {
    // Dropped after the lock is released.
    let _before = take_replaced_states(|id| states.contains_key(id));
    let this = thread::current().id();
    let mut replaced = replaced();
    replaced.push_back((this, states));
    let of_this = replaced.iter().filter(|(of, _)| *of == this).count();
    let oldest = match of_this > KEPT {
        true => replaced.iter().position(|(of, _)| *of == this),
        false => (replaced.len() > KEPT_OF_ALL).then_some(0),
    };
    let _oldest = oldest.and_then(|oldest| replaced.remove(oldest));
    drop(replaced);
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
        if let Some(replaced) = &mut self.replaced {
            replaced.insert(id, old.clone().into_dispatch());
        }
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
        Param::from_mapped_value(id, value, mapper)
    }

    burn_lean_reparam::map_kinds!(int, bool: |self, at, param| {
        self.places.meet(at);
        param
    });
}
