//! Values made of tensors: what a recorded forward pass takes and returns.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

use burn::backend::DispatchTensor;
use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};
use burn::tensor::{Bool, DType, Device, Int, Tensor};

use crate::capture;

/// What is done to each tensor of a value.
pub trait TensorMapper {
    /// Called for each float tensor.
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D>;

    /// Called for each integer tensor.
    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int>;

    /// Called for each boolean tensor.
    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool>;
}

/// A value made of tensors: a batch, the outputs of a model, its states.
///
/// Implemented for tensors of every kind and rank, `()`, numbers, strings, tuples, `Option`,
/// `Result` (its value), `Vec`, `Box`, maps (their values), arrays, the states of Burn's recurrent cells, what its attention returns, and
/// with the feature `train` the outputs of Burn's training steps. For a type of your own name its
/// fields in [`tensors!`](crate::tensors):
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
///
/// #[derive(Clone, Debug)]
/// struct Batch {
///     images: Tensor<4>,
///     labels: Tensor<1, Int>,
///     epoch: usize,
/// }
/// burn_lean_graph::tensors!(Batch { images, labels, epoch });
///
/// let device = Device::flex();
/// let batch = Batch {
///     images: Tensor::zeros([5, 1, 8, 8], &device),
///     labels: Tensor::zeros([5], &device),
///     epoch: 3,
/// };
/// let shapes = burn_lean_graph::shapes(&batch);
/// assert_eq!(shapes, [vec![5, 1, 8, 8], vec![5]]);
/// ```
///
/// An enum implements it by hand:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_lean_graph::{TensorMapper, Tensors};
///
/// enum Input {
///     Pixels(Tensor<4>),
///     Tokens(Tensor<2, Int>),
/// }
///
/// impl Tensors for Input {
///     fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
///         match self {
///             Self::Pixels(pixels) => Self::Pixels(mapper.float(pixels)),
///             Self::Tokens(tokens) => Self::Tokens(mapper.int(tokens)),
///         }
///     }
/// }
/// ```
pub trait Tensors: Sized {
    /// The value with each of its tensors replaced by what `mapper` makes of it, in a fixed order.
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self;
}

/// Implements [`Tensors`] for a struct by the names of all its fields; those after a semicolon hold
/// no tensors and are cloned.
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_lean_graph::tensors;
///
/// #[derive(Clone)]
/// enum Split {
///     Train,
///     Test,
/// }
///
/// struct Boxes<const D: usize> {
///     corners: Vec<Tensor<D>>,
///     split: Split,
/// }
/// tensors!([const D: usize] Boxes<D> { corners; split });
///
/// // By place, of a tuple struct.
/// struct Masked(Tensor<3>, Boxes<2>);
/// tensors!(Masked { 0, 1 });
/// ```
#[macro_export]
macro_rules! tensors {
    ([$($generics:tt)*] $ty:ty { $($field:tt),* $(,)? $(; $($plain:tt),* $(,)?)? }) => {
        impl<$($generics)*> $crate::Tensors for $ty {
            fn map_tensors<T: $crate::TensorMapper>(&self, mapper: &mut T) -> Self {
                Self {
                    $($field: $crate::Tensors::map_tensors(&self.$field, mapper),)*
                    $($($plain: ::core::clone::Clone::clone(&self.$plain),)*)?
                }
            }
        }
    };
    ($ty:ty { $($fields:tt)* }) => {
        $crate::tensors!([] $ty { $($fields)* });
    };
}

/// The tensors of an input as they come.
#[derive(Default)]
pub(crate) struct Given {
    pub(crate) tensors: Vec<DispatchTensor>,
    pub(crate) signature: Vec<(Vec<usize>, DType)>,
    pub(crate) autodiff: bool,
    pub(crate) device: Option<Device>,
}

impl Given {
    fn note(&mut self, tensor: DispatchTensor) {
        self.signature.push(capture::signature(&tensor));
        self.tensors.push(tensor);
    }
}

impl TensorMapper for Given {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        self.autodiff |= tensor.is_autodiff();
        self.device.get_or_insert_with(|| tensor.device());
        self.note(tensor.clone().into_dispatch());
        tensor.clone()
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        self.device.get_or_insert_with(|| tensor.device());
        self.note(tensor.clone().into_dispatch());
        tensor.clone()
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.device.get_or_insert_with(|| tensor.device());
        self.note(tensor.clone().into_dispatch());
        tensor.clone()
    }
}

/// Shapes and dtypes of the tensors of a value, in order.
pub fn signature(value: &impl Tensors) -> Vec<(Vec<usize>, DType)> {
    let mut given = Given::default();
    let _ = value.map_tensors(&mut given);
    given.signature
}

/// The shapes of the tensors of a value, in order.
pub fn shapes(value: &impl Tensors) -> Vec<Vec<usize>> {
    signature(value)
        .into_iter()
        .map(|(shape, _)| shape)
        .collect()
}

impl<const D: usize> Tensors for Tensor<D> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        mapper.float(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Int> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        mapper.int(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Bool> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        mapper.bool(self)
    }
}

macro_rules! without_tensors {
    ($($ty:ty),*) => {$(
        impl Tensors for $ty {
            fn map_tensors<T: TensorMapper>(&self, _mapper: &mut T) -> Self {
                self.clone()
            }
        }
    )*};
}
without_tensors!(
    (),
    bool,
    char,
    usize,
    u8,
    u16,
    u32,
    u64,
    isize,
    i8,
    i16,
    i32,
    i64,
    f32,
    f64,
    String,
    &str
);

impl<V: Tensors> Tensors for Option<V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        self.as_ref().map(|value| value.map_tensors(mapper))
    }
}

impl<V: Tensors> Tensors for Vec<V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        self.iter().map(|value| value.map_tensors(mapper)).collect()
    }
}

impl<V: Tensors> Tensors for Box<V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        Box::new(V::map_tensors(self, mapper))
    }
}

impl<K: Eq + Hash + Clone, V: Tensors, S: BuildHasher + Clone> Tensors for HashMap<K, V, S> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        let mut mapped = Self::with_capacity_and_hasher(self.len(), self.hasher().clone());
        for (key, value) in self {
            mapped.insert(key.clone(), value.map_tensors(mapper));
        }
        mapped
    }
}

impl<K: Ord + Clone, V: Tensors> Tensors for BTreeMap<K, V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        let mapped = self.iter();
        mapped
            .map(|(key, value)| (key.clone(), value.map_tensors(mapper)))
            .collect()
    }
}

impl<V: Tensors, E: Clone> Tensors for Result<V, E> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        match self {
            Ok(value) => Ok(value.map_tensors(mapper)),
            Err(error) => Err(error.clone()),
        }
    }
}

impl<V: Tensors, const N: usize> Tensors for [V; N] {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        self.each_ref().map(|value| value.map_tensors(mapper))
    }
}

macro_rules! tuples {
    ($($name:ident)+) => {
        impl<$($name: Tensors),+> Tensors for ($($name,)+) {
            #[allow(non_snake_case)]
            fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
                let ($($name,)+) = self;
                ($($name.map_tensors(mapper),)+)
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

impl<const D: usize> Tensors for LstmState<D> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        LstmState::new(mapper.float(&self.cell), mapper.float(&self.hidden))
    }
}

impl<const D: usize> Tensors for RnnState<D> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        RnnState::new(mapper.float(&self.hidden))
    }
}

tensors!(MhaOutput { weights, context });
#[cfg(feature = "train")]
tensors!(burn::train::ClassificationOutput {
    loss,
    output,
    targets
});
#[cfg(feature = "train")]
tensors!(burn::train::MultiLabelClassificationOutput {
    loss,
    output,
    targets
});
#[cfg(feature = "train")]
tensors!(burn::train::RegressionOutput {
    loss,
    output,
    targets
});
