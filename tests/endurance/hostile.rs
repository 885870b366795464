//! Numbers that nobody trains with, and that come all the same.

use burn::tensor::{Device, Shape, Tensor, TensorData};
use proptest::prelude::*;

use crate::support::numbers;

const HUGE: f32 = f32::MAX / 2.0;

/// What numbers are like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Ordinary,
    Zeros,
    Constant,
    /// Below the smallest normal number.
    Denormal,
    /// Around 10²⁰, whose squares are no F32 any more.
    Large,
    /// Up to half of the largest number: where the lowest code stands for more than the range holds,
    /// that is a number, too.
    Huge,
    /// From there down to the smallest, of both signs.
    Mixed,
    OneNan,
    OneInfinity,
    AllNan,
}

impl Kind {
    pub(crate) fn is_finite(self) -> bool {
        !matches!(self, Self::OneNan | Self::OneInfinity | Self::AllNan)
    }

    pub(crate) fn values(self, seed: u64, count: usize) -> Vec<f32> {
        let mut values = numbers(seed, count);
        let change: fn(usize, f32) -> f32 = match self {
            Self::Ordinary | Self::OneNan | Self::OneInfinity => |_, x| x,
            Self::Zeros => |_, _| 0.0,
            Self::Constant => |_, _| 3.0,
            Self::Denormal => |_, x| x * 1e-40,
            Self::Large => |_, x| x * 1e20,
            Self::Huge => |_, x| x * HUGE,
            Self::Mixed => |at, x| match at % 7 {
                0 => HUGE,
                1 => -HUGE,
                2 => x * 1e-42,
                3 => 0.0,
                4 => -0.0,
                5 => x * 1e-20,
                _ => x,
            },
            Self::AllNan => |_, _| f32::NAN,
        };
        values
            .iter_mut()
            .enumerate()
            .for_each(|(at, x)| *x = change(at, *x));
        let place = seed as usize % count.max(1);
        match (self, values.get_mut(place)) {
            (Self::OneNan, Some(value)) => *value = f32::NAN,
            (Self::OneInfinity, Some(value)) => *value = f32::NEG_INFINITY,
            _ => {}
        }
        values
    }

    pub(crate) fn tensor<const D: usize>(
        self,
        seed: u64,
        shape: [usize; D],
        device: &Device,
    ) -> Tensor<D> {
        let count = Shape::from(shape).num_elements();
        Tensor::from_data(TensorData::new(self.values(seed, count), shape), device)
    }
}

/// A length below `end`, now and then 0.
pub(crate) fn length(end: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 15 => 1..end]
}

pub(crate) fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        14 => Just(Kind::Ordinary),
        1 => Just(Kind::Zeros),
        1 => Just(Kind::Constant),
        1 => Just(Kind::Denormal),
        1 => Just(Kind::Large),
        2 => Just(Kind::Huge),
        2 => Just(Kind::Mixed),
        1 => Just(Kind::OneNan),
        1 => Just(Kind::OneInfinity),
        1 => Just(Kind::AllNan),
    ]
}
