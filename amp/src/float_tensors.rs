//! What an autocast region can take and return.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};
use burn::tensor::{Bool, Int, Tensor};

use crate::Caster;

/// A value made of tensors, whose float tensors are cast at the edge of an autocast region.
///
/// Implemented for tensors of every kind and rank, `()`, numbers, strings, tuples, `Option`,
/// `Result` (its value), `Box`, `Vec`, maps (their values) and arrays, the states of Burn's recurrent
/// cells, and what its attention returns. For a type of your own, name the fields that hold float
/// tensors, however deep:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_lean_amp::float_tensors;
///
/// struct Boxes {
///     corners: Vec<Tensor<2>>,
/// }
/// float_tensors!(Boxes { corners });
///
/// struct Batch {
///     images: Tensor<4>,
///     boxes: Option<Boxes>,
///     labels: Tensor<1, Int>,
/// }
/// float_tensors!(Batch { images, boxes });
///
/// // By place, of a tuple struct.
/// struct Masked(Tensor<3>, f64);
/// float_tensors!(Masked { 0 });
/// ```
///
/// Or, for an enum or a generic type, implement it:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_lean_amp::{Caster, FloatTensors};
///
/// enum Input {
///     Pixels(Tensor<4>),
///     Tokens(Tensor<2, Int>),
/// }
///
/// impl FloatTensors for Input {
///     fn map_floats(self, caster: &Caster) -> Self {
///         match self {
///             Self::Pixels(pixels) => Self::Pixels(pixels.map_floats(caster)),
///             tokens => tokens,
///         }
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
unchanged!((), bool, char, String, &'static str);
unchanged!(u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f32, f64);

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

impl<T: FloatTensors, E> FloatTensors for Result<T, E> {
    fn map_floats(self, caster: &Caster) -> Self {
        self.map(|value| value.map_floats(caster))
    }
}

impl<T: FloatTensors> FloatTensors for Box<T> {
    fn map_floats(self, caster: &Caster) -> Self {
        Box::new((*self).map_floats(caster))
    }
}

impl<K: Eq + Hash, V: FloatTensors, S: BuildHasher + Default> FloatTensors for HashMap<K, V, S> {
    fn map_floats(self, caster: &Caster) -> Self {
        let mapped = self.into_iter();
        mapped
            .map(|(key, value)| (key, value.map_floats(caster)))
            .collect()
    }
}

impl<K: Ord, V: FloatTensors> FloatTensors for BTreeMap<K, V> {
    fn map_floats(self, caster: &Caster) -> Self {
        let mapped = self.into_iter();
        mapped
            .map(|(key, value)| (key, value.map_floats(caster)))
            .collect()
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

/// Implements [`FloatTensors`] for a struct, by the fields that hold float tensors; the others pass
/// unchanged. An example is at the trait.
#[macro_export]
macro_rules! float_tensors {
    ($name:ident { $($field:tt),+ $(,)? }) => {
        impl $crate::FloatTensors for $name {
            // Nothing is left of a struct all of whose fields are named.
            #[allow(clippy::needless_update)]
            fn map_floats(self, caster: &$crate::Caster) -> Self {
                Self {
                    $($field: $crate::FloatTensors::map_floats(self.$field, caster),)+
                    ..self
                }
            }
        }
    };
}
