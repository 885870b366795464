//! What passes between steps.

use std::sync::Arc;

use burn_lean_kernels::{in_shares, transpose};
use rten::{Value as Foreign, ValueOrView, ValueView};
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use super::failed;
use super::ranging::Ranging;
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
    pub(super) scale: Scale,
    /// Rows, or images where the second axis is last, with a value that has no code.
    pub(super) broken: Vec<usize>,
}

/// What a step of a code stands for.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scale {
    OfAll(f32),
    OfRows(Vec<f32>),
}

impl Codes {
    /// On a known grid, where infinities have the codes at its ends; or on that of the finite values at hand.
    pub(super) fn of(x: &Floats, ranging: Ranging) -> Self {
        let mut codes = vec![0; x.data.len()];
        let row = x.shape.last().copied().unwrap_or(1).max(1);
        let (scale, are_finite) = match ranging.is_per_row() {
            true => {
                let shares = in_shares(&mut codes, row, |first, codes| {
                    let values = &x.data[first * row..][..codes.len()];
                    let mut are_finite = true;
                    let rows = values.chunks(row).zip(codes.chunks_mut(row));
                    let scales = rows.map(|(row, codes)| {
                        let grid = ranging.grid(row);
                        are_finite &= grid.quantize(row, codes);
                        grid.scale
                    });
                    let scales: Vec<f32> = scales.collect();
                    (scales, are_finite)
                });
                let (scales, are_finite): (Vec<_>, Vec<_>) = shares.into_iter().unzip();
                (Scale::OfRows(scales.concat()), are_finite)
            }
            false => {
                let grid = ranging.grid(&x.data);
                let are_finite = in_shares(&mut codes, 1, |first, codes| {
                    grid.quantize(&x.data[first..][..codes.len()], codes)
                });
                (Scale::OfAll(grid.scale), are_finite)
            }
        };
        let mut broken = Vec::new();
        if are_finite.contains(&false) {
            let [_, channels, inner] = extents(&x.shape);
            let part = match x.last {
                true => channels * inner,
                false => row,
            };
            let has_code = |x: &f32| x.is_finite() || ranging.is_known() && !x.is_nan();
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
            scale,
            broken,
        }
    }

    /// The values that the codes stand for.
    pub(super) fn values(&self) -> Floats {
        let row = self.shape.last().copied().unwrap_or(1).max(1);
        let mut data: Vec<f32> = self.codes.iter().map(|code| f32::from(*code)).collect();
        match &self.scale {
            Scale::OfAll(scale) => data.iter_mut().for_each(|x| *x *= scale),
            Scale::OfRows(scales) => {
                for (row, scale) in data.chunks_mut(row).zip(scales) {
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            }
        }
        self.spoil(&mut data, row);
        Floats::new(self.shape.clone(), data)
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
    Foreign(Arc<Foreign>),
}

impl Value {
    pub(super) fn of(value: Foreign) -> Self {
        match value {
            Foreign::FloatTensor(x) => {
                Self::floats_of(Floats::new(x.shape().to_vec(), x.into_data()))
            }
            other => Self::Foreign(Arc::new(other)),
        }
    }

    pub(super) fn floats_of(floats: Floats) -> Self {
        Self::Floats(Arc::new(floats))
    }

    pub(super) fn shape(&self) -> Vec<usize> {
        match self {
            Self::Floats(floats) => floats.shape.clone(),
            Self::Codes(codes) => codes.shape.clone(),
            Self::Foreign(value) => value.shape().to_vec(),
        }
    }

    pub(super) fn floats(self) -> Result<Arc<Floats>, DeployError> {
        match self {
            Self::Floats(floats) => Ok(floats),
            _ => Err(failed("an operand is not of floats")),
        }
    }

    /// Where it is of integers.
    pub(super) fn integers(&self) -> Option<&Tensor<i32>> {
        match self {
            Self::Foreign(value) => match &**value {
                Foreign::Int32Tensor(x) => Some(x),
                _ => None,
            },
            _ => None,
        }
    }

    /// As rten takes it: given away where nothing else holds it, so that it may be changed in place, else lent. Floats
    /// with the second axis stored last are copied.
    pub(super) fn lend(held: &mut Option<Self>) -> Result<ValueOrView<'_>, DeployError> {
        match held.take() {
            Some(value) if value.is_given_away() => return Ok(value.into_foreign()?.into()),
            shared => *held = shared,
        }
        match &*held {
            Some(Self::Foreign(value)) => Ok(value.as_view().into()),
            Some(Self::Floats(x)) => {
                let view = ValueView::from_shape(&x.shape, &x.data);
                Ok(view.map_err(|error| failed(error.to_string()))?.into())
            }
            _ => Err(failed("an operand is missing")),
        }
    }

    fn is_given_away(&self) -> bool {
        match self {
            Self::Foreign(value) => Arc::strong_count(value) == 1,
            Self::Floats(x) => x.last || Arc::strong_count(x) == 1,
            Self::Codes(_) => true,
        }
    }

    pub(super) fn into_foreign(self) -> Result<Foreign, DeployError> {
        match self {
            Self::Foreign(value) => Ok(Arc::unwrap_or_clone(value)),
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
    let data = transpose(&x.data, batch, inner, channels);
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
        data: transpose(&x.data, batch, channels, inner),
        last: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_lent(held: &mut Option<Value>) -> bool {
        matches!(Value::lend(held).unwrap(), ValueOrView::View(_))
    }

    #[test]
    fn what_others_hold_is_lent_and_what_nothing_holds_given_away() {
        let integers = Value::of(Tensor::from_data(&[3][..], vec![1, 2, 3_i32]).into());
        let floats = Value::floats_of(Floats::new(vec![1, 2, 2], vec![0.5; 4]));
        for value in [integers, floats] {
            let mut held = Some(value.clone());
            assert!(is_lent(&mut held) && is_lent(&mut held));
            assert!(held.is_some());
            drop(value);
            assert!(!is_lent(&mut held));
            assert!(held.is_none());
        }
    }

    #[test]
    fn floats_in_another_order_are_copied() {
        let floats = Value::floats_of(Floats {
            shape: vec![1, 2, 2],
            data: vec![1.0, 2.0, 3.0, 4.0],
            last: true,
        });
        let given = Value::lend(&mut Some(floats.clone())).unwrap().into_owned();
        let ordered = Foreign::from_shape([1, 2, 2], vec![1.0, 3.0, 2.0, 4.0_f32]).unwrap();
        assert_eq!(given, ordered);
    }
}
