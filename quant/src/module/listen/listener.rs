//! Who is shown what passes through the quantizers of a model.
//!
//! The quantizers of a copy of the model carry the listener, so that it hears of every call of the
//! copy and of its clones, on whatever thread.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;

use crate::module::listen::layer_inputs::LayerInputs;
use crate::module::listen::tap::Tap;
use crate::module::listen::watch::Watcher;
use crate::module::map_quantizers;
use crate::module::walk::Site;

/// What is shared by the quantizers of one model copy.
///
/// Who listens computes and reads before it locks: a thread of rayon's pool that waits for its share
/// takes up another task, which may be a call of the same model.
#[derive(Clone)]
pub(crate) enum Listener {
    /// Every tensor that is quantized.
    Watcher(Arc<Watcher>),
    /// The codes of every tensor that is quantized.
    Tap(Arc<Mutex<Tap>>),
    /// The inputs of layers.
    Inputs {
        into: Arc<Mutex<LayerInputs>>,
        /// Path of the weight that carries the quantizer.
        weight: String,
    },
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

/// A copy of `model` as it is after training, all of whose quantizers have the listener and know
/// their paths.
pub(crate) fn listening<M: Module>(model: &M, listener: &Listener) -> M {
    map_quantizers(model.valid(), |located| {
        let quantizer = located.quantizer.with_path(located.path);
        quantizer.with_listener(Some(listener.clone()))
    })
}

/// A copy of `model` as it is after training, whose weights' quantizers collect the inputs of their
/// layers.
pub(crate) fn collecting<M: Module>(model: &M, into: &Arc<Mutex<LayerInputs>>) -> M {
    map_quantizers(model.valid(), |located| {
        let listener = match (located.site, located.parameter) {
            (Site::Weight, Some(weight)) => Some(Listener::Inputs {
                into: into.clone(),
                weight,
            }),
            _ => None,
        };
        located.quantizer.with_listener(listener)
    })
}

/// Locks, also after a panic of the model's.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
