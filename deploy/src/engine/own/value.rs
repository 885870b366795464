//! What passes between steps.

use std::sync::Arc;

use burn_lean_kernels::{CodeGrid, dynamic_grid, turn};
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

impl Floats {
    /// In the order of their axes.
    pub(super) fn new(shape: Vec<usize>, data: Vec<f32>) -> Self {
        let last = false;
        Self { shape, data, last }
    }
}

/// Distances of codes from that of zero, stored as [`Floats`] are.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Codes {
    pub(super) shape: Vec<usize>,
    pub(super) codes: Vec<i16>,
    pub(super) last: bool,
    pub(super) scale: f32,
    /// Rows, or images where the second axis is last, with a value that has no code.
    pub(super) broken: Vec<usize>,
}

impl Codes {
    /// On a grid, where infinities have the codes at its ends; or on that of the finite values at hand.
    pub(super) fn of(x: &Floats, grid: Option<CodeGrid>) -> Self {
        let is_known = grid.is_some();
        let grid = grid.unwrap_or_else(|| dynamic_grid(&x.data).0);
        let (mut codes, mut broken) = (Vec::new(), Vec::new());
        if !grid.quantize(&x.data, &mut codes) {
            let [_, channels, inner] = extents(&x.shape);
            let part = match x.last {
                true => channels * inner,
                false => x.shape.last().copied().unwrap_or(1),
            };
            let has_code = |x: &f32| x.is_finite() || is_known && !x.is_nan();
            for (index, part) in x.data.chunks(part.max(1)).enumerate() {
                if !part.iter().all(has_code) {
                    broken.push(index);
                }
            }
        }
        Self {
            shape: x.shape.clone(),
            codes,
            last: x.last,
            scale: grid.scale,
            broken,
        }
    }

    /// Makes NaN of what was computed from what has no code: rows or images of as many numbers.
    pub(super) fn spoil(&self, data: &mut [f32], size: usize) {
        for part in &self.broken {
            data[part * size..][..size].fill(f32::NAN);
        }
    }
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
            Foreign::FloatTensor(x) => {
                Self::floats_of(Floats::new(x.shape().to_vec(), x.into_data()))
            }
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
    let data = turn(&x.data, batch, inner, channels);
    Arc::new(Floats::new(x.shape.clone(), data))
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
        data: turn(&x.data, batch, channels, inner),
        last: true,
    })
}
