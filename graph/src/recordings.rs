//! What is remembered of forward passes between steps.

use std::any::{Any, type_name};
use std::collections::{HashMap, HashSet};
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::tensor::{DType, Device};

use crate::{GraphError, Recording, Tensors, hooks, record, record_with_backward, signature};

/// A place in the user's program with the types, ranks and shapes that it uses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Signature {
    caller: (&'static str, u32, u32),
    model: &'static str,
    inputs: Vec<(Vec<usize>, DType)>,
    trains: bool,
    variant: u64,
}

#[derive(Debug, Default)]
struct Memory {
    /// Forward passes whose gradients were compared, by their place and the ranks of their inputs.
    verified: Mutex<HashSet<Signature>>,
    recordings: Mutex<HashMap<Signature, Box<dyn Any + Send>>>,
}

/// Recordings of forward passes, for whoever runs one in each step.
///
/// The gradients of a forward pass are compared once, at its first training step; a recording is
/// made anew in each step, or kept. A forward pass is known by the place in the program that asks,
/// and by the types, ranks and shapes that it uses. Clones share what they remember.
#[derive(Debug, Clone)]
pub struct Recordings {
    memory: Arc<Memory>,
    /// Whether a recording is kept for the shapes of its inputs. Default: no.
    pub caches: bool,
    /// Whether gradients are compared with those of the model, as
    /// [`Recording::verify_gradients`] does. Default: yes.
    pub verifies: bool,
}

impl Default for Recordings {
    fn default() -> Self {
        Self {
            memory: Arc::default(),
            caches: false,
            verifies: true,
        }
    }
}

impl Recordings {
    /// A recording of `forward`; `caller` is the place that asks for it, and `variant` tells apart
    /// what else a recording depends on.
    ///
    /// # Errors
    ///
    /// As [`record`] and [`Recording::verify_gradients`].
    pub fn recording<M, I, O>(
        &self,
        model: &M,
        input: &I,
        forward: impl FnOnce(&M, I) -> O,
        caller: &'static Location<'static>,
        variant: u64,
    ) -> Result<Arc<Recording<O>>, GraphError>
    where
        M: Module,
        I: Tensors,
        O: Tensors + Send + Sync + 'static,
    {
        let devices = model.devices();
        let signature = Signature {
            caller: (caller.file(), caller.line(), caller.column()),
            model: type_name::<(M, O)>(),
            inputs: signature(input),
            trains: devices.first().is_some_and(Device::is_autodiff),
            variant,
        };
        if self.caches
            && let Some(known) = self.known::<M, O>(&signature, model)
        {
            return Ok(known);
        }
        let recording = Arc::new(self.record(model, input, forward, &signature)?);
        if self.caches {
            let kept: Arc<Recording<O>> = recording.clone();
            lock(&self.memory.recordings).insert(signature, Box::new(kept));
        }
        Ok(recording)
    }

    /// The kept recording, if it is of a model that carries the same hooks.
    fn known<M: Module, O: Send + Sync + 'static>(
        &self,
        signature: &Signature,
        model: &M,
    ) -> Option<Arc<Recording<O>>> {
        let known = lock(&self.memory.recordings)
            .get(signature)?
            .downcast_ref::<Arc<Recording<O>>>()?
            .clone();
        let carried = hooks::offered(model);
        known.graph.check_hooks(&carried).is_ok().then_some(known)
    }

    fn record<M: Module, I: Tensors, O: Tensors>(
        &self,
        model: &M,
        input: &I,
        forward: impl FnOnce(&M, I) -> O,
        signature: &Signature,
    ) -> Result<Recording<O>, GraphError> {
        let mut ranks = signature.clone();
        for (shape, _) in &mut ranks.inputs {
            shape.fill(0);
        }
        let is_verified = || lock(&self.memory.verified).contains(&ranks);
        if !self.verifies || !signature.trains || is_verified() {
            return record(model, input, forward);
        }
        let mut recording = record_with_backward(model, input, forward)?;
        recording.verify_gradients(model, input)?;
        recording.forget_backward();
        lock(&self.memory.verified).insert(ranks);
        Ok(recording)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
