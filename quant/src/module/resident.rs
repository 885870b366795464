//! The values of a converted weight, computed once.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// When the float values of a converted weight are computed.
///
/// Burn's layers multiply floats, so that something has to turn codes into them. Once is as fast as
/// the float model; at every use is slow (a layer's whole weight for each batch, also for one
/// sample), but keeps no floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Dequantize {
    /// At the first use. They stay in memory beside the codes.
    #[default]
    Once,
    /// At every use. Only the codes stay in memory.
    EveryUse,
}

impl fmt::Display for Dequantize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Once => "dequantized once",
            Self::EveryUse => "dequantized at every use",
        })
    }
}

/// The values of a weight, once they are computed. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Resident(Arc<Mutex<Option<Values>>>);

enum Values {
    /// They are those that are stored.
    Stored,
    /// A `Tensor<D>`, of whatever rank.
    Computed(Box<dyn Any + Send>),
}

impl Resident {
    /// What `compute` makes of `stored`, or made of it before.
    ///
    /// The values of a weight that is stored as floats and already on its grid are not kept twice;
    /// finding out reads from the device, once.
    pub(crate) fn values<const D: usize>(
        &self,
        stored: Tensor<D>,
        compute: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Tensor<D> {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match values.as_ref() {
            Some(Values::Stored) => return stored,
            Some(Values::Computed(computed)) => {
                if let Some(computed) = computed.downcast_ref::<Tensor<D>>() {
                    return computed.clone();
                }
            }
            None => {}
        }
        let computed = compute(stored.clone());
        let is_stored = stored.dtype() == computed.dtype()
            && stored
                .clone()
                .equal(computed.clone())
                .all()
                .into_scalar::<bool>();
        *values = Some(match is_stored {
            true => Values::Stored,
            false => Values::Computed(Box::new(computed.clone())),
        });
        match is_stored {
            true => stored,
            false => computed,
        }
    }
}

impl fmt::Debug for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resident")
    }
}
