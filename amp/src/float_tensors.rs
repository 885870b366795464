//! What an autocast region can take and return.

use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};
use burn::tensor::{Bool, Int, Tensor};

use crate::Caster;

/// A value made of tensors, whose float tensors are cast at the edge of an autocast region.
///
/// Implemented for tensors of every kind and rank, `()`, numbers, tuples, `Option`, `Vec` and
/// arrays, the states of Burn's recurrent cells, and what its attention returns. For a type of your own:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_lean_amp::{Caster, FloatTensors};
///
/// struct Batch {
///     images: Tensor<4>,
///     labels: Tensor<1, Int>,
/// }
///
/// impl FloatTensors for Batch {
///     fn map_floats(self, caster: &Caster) -> Self {
///         Batch { images: caster.cast(self.images), ..self }
///     }
/// }
/// ```
pub trait FloatTensors: Sized {
    /// Returns the value with every float tensor cast.
    fn map_floats(self, caster: &Caster) -> Self;
}

impl<const D: usize> FloatTensors for Tensor<D> {
    fn map_floats(self, caster: &Caster) -> Self {
        caster.cast(self)
    }
}

macro_rules! unchanged {
    ($($ty:ty),*) => {$(
        impl FloatTensors for $ty {
            fn map_floats(self, _caster: &Caster) -> Self {
                self
            }
        }
    )*};
}
unchanged!((), bool, usize, u8, i32, i64, f32, f64);

impl<const D: usize> FloatTensors for Tensor<D, Int> {
    fn map_floats(self, _caster: &Caster) -> Self {
        self
    }
}

impl<const D: usize> FloatTensors for Tensor<D, Bool> {
    fn map_floats(self, _caster: &Caster) -> Self {
        self
    }
}

impl<T: FloatTensors> FloatTensors for Option<T> {
    fn map_floats(self, caster: &Caster) -> Self {
        self.map(|value| value.map_floats(caster))
    }
}

impl<T: FloatTensors> FloatTensors for Vec<T> {
    fn map_floats(self, caster: &Caster) -> Self {
        self.into_iter()
            .map(|value| value.map_floats(caster))
            .collect()
    }
}

impl<T: FloatTensors, const N: usize> FloatTensors for [T; N] {
    fn map_floats(self, caster: &Caster) -> Self {
        self.map(|value| value.map_floats(caster))
    }
}

macro_rules! tuples {
    ($($name:ident)+) => {
        impl<$($name: FloatTensors),+> FloatTensors for ($($name,)+) {
            #[allow(non_snake_case)]
            fn map_floats(self, caster: &Caster) -> Self {
                let ($($name,)+) = self;
                ($($name.map_floats(caster),)+)
            }
        }
    };
}
tuples!(A);
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
tuples!(A B C D E);
tuples!(A B C D E F);

impl<const D: usize> FloatTensors for LstmState<D> {
    fn map_floats(self, caster: &Caster) -> Self {
        LstmState::new(caster.cast(self.cell), caster.cast(self.hidden))
    }
}

impl<const D: usize> FloatTensors for RnnState<D> {
    fn map_floats(self, caster: &Caster) -> Self {
        RnnState::new(caster.cast(self.hidden))
    }
}

impl FloatTensors for MhaOutput {
    fn map_floats(self, caster: &Caster) -> Self {
        MhaOutput {
            weights: caster.cast(self.weights),
            context: caster.cast(self.context),
        }
    }
}
