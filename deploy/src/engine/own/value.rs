//! What passes between steps.

use std::sync::Arc;

use burn_lean_kernels::{axes_to_back, axes_to_front};
use rten::Value as Foreign;
use rten_tensor::prelude::*;

use super::failed;
use crate::DeployError;

/// Floats of a shape; where `last`, the second axis is stored last.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Floats {
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<f32>,
    pub(super) last: bool,
}

/// Distances of codes from that of zero, stored as [`Floats`] are.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Codes {
    pub(super) shape: Vec<usize>,
    pub(super) codes: Vec<i16>,
    pub(super) last: bool,
    pub(super) scale: f32,
}

#[derive(Debug, Clone)]
pub(super) enum Value {
    Floats(Arc<Floats>),
    Codes(Arc<Codes>),
    Foreign(Foreign),
}

impl Value {
    pub(super) fn of(value: Foreign) -> Self {
        match value {
            Foreign::FloatTensor(x) => Self::floats_of(Floats {
                shape: x.shape().to_vec(),
                data: x.into_data(),
                last: false,
            }),
            other => Self::Foreign(other),
        }
    }

    pub(super) fn floats_of(floats: Floats) -> Self {
        Self::Floats(Arc::new(floats))
    }

    pub(super) fn floats(self) -> Result<Arc<Floats>, DeployError> {
        match self {
            Self::Floats(floats) => Ok(floats),
            _ => Err(failed("an operand is not of floats")),
        }
    }

    pub(super) fn into_foreign(self) -> Result<Foreign, DeployError> {
        match self {
            Self::Foreign(value) => Ok(value),
            Self::Codes(_) => Err(failed("codes cannot leave the engine")),
            Self::Floats(floats) => {
                let floats = super::own(ordered(floats));
                Foreign::from_shape(floats.shape, floats.data)
                    .map_err(|error| failed(error.to_string()))
            }
        }
    }
}

/// Batch, channels, and all axes behind.
pub(super) fn extents(shape: &[usize]) -> [usize; 3] {
    match shape {
        [batch, channels, inner @ ..] => [*batch, *channels, inner.iter().product()],
        [one] => [1, *one, 1],
        [] => [1, 1, 1],
    }
}

/// With the axes stored in their order.
pub(super) fn ordered(x: Arc<Floats>) -> Arc<Floats> {
    if !x.last {
        return x;
    }
    let [batch, channels, inner] = extents(&x.shape);
    if channels == 1 || inner == 1 {
        let mut x = super::own(x);
        x.last = false;
        return Arc::new(x);
    }
    Arc::new(Floats {
        shape: x.shape.clone(),
        data: axes_to_front(&x.data, batch, inner, channels),
        last: false,
    })
}

/// With the second axis stored last.
pub(super) fn channels_last(x: Arc<Floats>) -> Arc<Floats> {
    if x.last {
        return x;
    }
    let [batch, channels, inner] = extents(&x.shape);
    if channels == 1 || inner == 1 {
        let mut x = super::own(x);
        x.last = true;
        return Arc::new(x);
    }
    Arc::new(Floats {
        shape: x.shape.clone(),
        data: axes_to_back(&x.data, batch, channels, inner),
        last: true,
    })
}
