//! Values made of tensors: what a recorded forward pass takes and returns.

mod constants;

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher};

use burn::backend::DispatchTensor;
use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};
use burn::tensor::{Bool, DType, Device, Int, Tensor};

use crate::capture;
pub use constants::as_constants;

/// What is done to each tensor of a value.
pub trait TensorMapper {
    /// Called for each float tensor.
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D>;

    /// Called for each integer tensor. Default: it stays.
    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        tensor.clone()
    }

    /// Called for each boolean tensor. Default: it stays.
    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        tensor.clone()
    }
}

/// A value made of tensors: a batch, the outputs of a model, its states.
///
/// Implemented for tensors of every kind and rank, `()`, numbers, strings, tuples, `Option`,
/// `Result` (its value), `Vec`, `Box`, maps (their values, in the order of their keys), arrays, the states of
/// Burn's recurrent cells, what its attention returns, and with the feature `train` the outputs of Burn's
/// training steps. For a type of your own name its fields in [`tensors!`](crate::tensors):
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
/// use burn_lean_graph::{Form, TensorMapper, Tensors};
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
///
///     fn describe(&self, form: &mut Form) {
///         form.kind(std::mem::discriminant(self));
///     }
/// }
/// ```
pub trait Tensors: Sized {
    /// The value with each of its tensors replaced by what `mapper` makes of it, in a fixed order.
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self;

    /// Says what tells it from other values besides the shapes and dtypes of its tensors: which
    /// variant it is, how many it holds, its numbers and keys. Default: nothing.
    ///
    /// A recording that is kept is used for values that say the same.
    fn describe(&self, form: &mut Form) {
        let _ = form;
    }
}

/// What tells values apart whose tensors have the same shapes.
#[derive(Debug, Clone, Default)]
pub struct Form {
    kinds: DefaultHasher,
    values: DefaultHasher,
}

impl Form {
    /// Which variant it is, whether a flag is set, or how many there are: another one is another kind of
    /// forward pass, whose gradients are compared with those of the model anew.
    pub fn kind(&mut self, kind: impl Hash) {
        kind.hash(&mut self.kinds);
    }

    /// A number, a name, a key: another one may be computed with in the same way.
    pub fn value(&mut self, value: impl Hash) {
        value.hash(&mut self.values);
    }

    /// What was said of kinds, and of values.
    pub(crate) fn of(value: &impl Tensors) -> (u64, u64) {
        let mut form = Self::default();
        value.describe(&mut form);
        (form.kinds.finish(), form.values.finish())
    }
}

/// What a plain field says: its hash, what it prints, or, if it can do neither, nothing. The first
/// trait that its type allows is the one that a call through three references finds.
#[doc(hidden)]
pub mod plain {
    use std::fmt::Debug;
    use std::hash::Hash;

    use super::Form;

    #[derive(Debug)]
    pub struct Plain<'a, V>(pub &'a V);

    pub trait Hashed {
        fn describe_plain(&self, form: &mut Form);
    }

    impl<V: Hash> Hashed for &&Plain<'_, V> {
        fn describe_plain(&self, form: &mut Form) {
            form.value(self.0);
        }
    }

    pub trait Printed {
        fn describe_plain(&self, form: &mut Form);
    }

    impl<V: Debug> Printed for &Plain<'_, V> {
        fn describe_plain(&self, form: &mut Form) {
            form.value(format!("{:?}", self.0));
        }
    }

    pub trait Silent {
        fn describe_plain(&self, form: &mut Form);
    }

    impl<V> Silent for Plain<'_, V> {
        fn describe_plain(&self, _form: &mut Form) {}
    }
}

/// Implements [`Tensors`] for a struct by the names of all its fields; those after a semicolon hold
/// no tensors and are cloned. A recording that is kept knows these by `Hash`, or else by `Debug`; a type
/// with neither cannot be told from another value of it.
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_lean_graph::tensors;
///
/// #[derive(Clone, Hash)]
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

            fn describe(&self, form: &mut $crate::Form) {
                let _ = &form;
                $($crate::Tensors::describe(&self.$field, form);)*
                $($({
                    #[allow(unused_imports)]
                    use $crate::plain::{Hashed as _, Printed as _, Silent as _};
                    (&&&$crate::plain::Plain(&self.$plain)).describe_plain(form);
                })*)?
            }
        }
    };
    ($ty:ty { $($fields:tt)* }) => {
        $crate::tensors!([] $ty { $($fields)* });
    };
}

/// The methods of a [`TensorMapper`] that does the same to tensors of every kind, or of those that are named.
#[doc(hidden)]
#[macro_export]
macro_rules! every_kind {
    (|$self:ident, $tensor:pat_param| $mapped:expr) => {
        $crate::every_kind!(float, int, bool: |$self, $tensor| $mapped);
    };
    ($($name:ident),+: |$self:ident, $tensor:pat_param| $mapped:expr) => {$(
        fn $name<const D: usize>(
            &mut $self,
            $tensor: &::burn::tensor::Tensor<D, $crate::kind!($name)>,
        ) -> ::burn::tensor::Tensor<D, $crate::kind!($name)> {
            $mapped
        }
    )+};
}

/// The tensors of an input as they come.
#[derive(Default)]
pub(crate) struct Given {
    pub(crate) tensors: Vec<DispatchTensor>,
    pub(crate) signature: Vec<(Vec<usize>, DType)>,
    /// Which of them have a gradient.
    pub(crate) tracked: Vec<bool>,
    pub(crate) autodiff: bool,
    pub(crate) device: Option<Device>,
}

impl Given {
    fn note(&mut self, tensor: DispatchTensor, is_tracked: bool) {
        self.signature.push(capture::signature(&tensor));
        self.tracked.push(is_tracked);
        self.tensors.push(tensor);
    }
}

impl TensorMapper for Given {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        self.autodiff |= tensor.is_autodiff();
        self.device.get_or_insert_with(|| tensor.device());
        self.note(tensor.clone().into_dispatch(), tensor.is_tracked());
        tensor.clone()
    }

    every_kind!(int, bool: |self, tensor| {
        self.device.get_or_insert_with(|| tensor.device());
        self.note(tensor.clone().into_dispatch(), false);
        tensor.clone()
    });
}

/// The device of the first tensor of a value.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_graph::input_device;
///
/// let device = Device::flex();
/// assert_eq!(input_device(&(Tensor::<1>::ones([2], &device), 1.5)), Some(device));
/// assert_eq!(input_device(&1.5), None);
/// ```
pub fn input_device(value: &impl Tensors) -> Option<Device> {
    let mut given = Given::default();
    let _ = value.map_tensors(&mut given);
    given.device
}

/// Shapes and dtypes of the tensors of a value, in order.
pub fn signature(value: &impl Tensors) -> Vec<(Vec<usize>, DType)> {
    let mut given = Given::default();
    let _ = value.map_tensors(&mut given);
    given.signature
}

/// What a value says of itself besides the shapes and dtypes of its tensors ([`Tensors::describe`]): the same
/// numbers for the same variants, flags and values.
///
/// ```
/// use burn_lean_graph::description;
///
/// assert_eq!(description(&1.5), description(&1.5));
/// assert_ne!(description(&1.5), description(&2.5));
/// ```
pub fn description(value: &impl Tensors) -> (u64, u64) {
    Form::of(value)
}

/// The shapes of the tensors of a value, in order.
pub fn shapes(value: &impl Tensors) -> Vec<Vec<usize>> {
    signature(value)
        .into_iter()
        .map(|(shape, _)| shape)
        .collect()
}

/// The same tensors again, for a forward pass that takes its inputs.
pub fn cloned<T: Tensors>(value: &T) -> T {
    struct Same;
    impl TensorMapper for Same {
        fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
            tensor.clone()
        }
    }
    value.map_tensors(&mut Same)
}

/// The value with its tensors off the autodiff device: what is recorded with a model that is
/// [`valid`](burn::module::Module::valid) is an evaluation then.
pub fn evaluated<V: Tensors>(value: &V) -> V {
    struct Inner;
    impl TensorMapper for Inner {
        every_kind!(|self, tensor| tensor.clone().without_autodiff());
    }
    value.map_tensors(&mut Inner)
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
    (|$value:ident| $described:expr; $($ty:ty),*) => {$(
        impl Tensors for $ty {
            fn map_tensors<T: TensorMapper>(&self, _mapper: &mut T) -> Self {
                self.clone()
            }

            fn describe(&self, form: &mut Form) {
                let $value = self;
                form.value($described);
            }
        }
    )*};
}
without_tensors!(
    |value| value;
    (),
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
    String,
    &str
);
without_tensors!(|value| value.to_bits(); f32, f64);

impl Tensors for bool {
    fn map_tensors<T: TensorMapper>(&self, _mapper: &mut T) -> Self {
        *self
    }

    /// Another kind: what is behind a flag may stop gradients.
    fn describe(&self, form: &mut Form) {
        form.kind(self);
    }
}

impl<V: Tensors> Tensors for Option<V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        self.as_ref().map(|value| value.map_tensors(mapper))
    }

    fn describe(&self, form: &mut Form) {
        form.kind(self.is_some());
        if let Some(value) = self {
            value.describe(form);
        }
    }
}

impl<V: Tensors> Tensors for Vec<V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        self.iter().map(|value| value.map_tensors(mapper)).collect()
    }

    fn describe(&self, form: &mut Form) {
        form.kind(self.len());
        self.iter().for_each(|value| value.describe(form));
    }
}

impl<V: Tensors> Tensors for Box<V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        Box::new(V::map_tensors(self, mapper))
    }

    fn describe(&self, form: &mut Form) {
        V::describe(self, form);
    }
}

impl<K: Ord + Hash + Clone, V: Tensors, S: BuildHasher + Clone> Tensors for HashMap<K, V, S> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        let mut mapped = Self::with_capacity_and_hasher(self.len(), self.hasher().clone());
        for (key, value) in in_order(self) {
            mapped.insert(key.clone(), value.map_tensors(mapper));
        }
        mapped
    }

    fn describe(&self, form: &mut Form) {
        form.kind(self.len());
        for (key, value) in in_order(self) {
            form.value(key);
            value.describe(form);
        }
    }
}

/// The entries by their keys: the order of a map's own is another one in each map.
fn in_order<K: Ord, V, S>(map: &HashMap<K, V, S>) -> Vec<(&K, &V)> {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_unstable_by_key(|(key, _)| *key);
    entries
}

impl<K: Ord + Hash + Clone, V: Tensors> Tensors for BTreeMap<K, V> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        let mapped = self.iter();
        mapped
            .map(|(key, value)| (key.clone(), value.map_tensors(mapper)))
            .collect()
    }

    fn describe(&self, form: &mut Form) {
        form.kind(self.len());
        for (key, value) in self {
            form.value(key);
            value.describe(form);
        }
    }
}

impl<V: Tensors, E: Clone> Tensors for Result<V, E> {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        match self {
            Ok(value) => Ok(value.map_tensors(mapper)),
            Err(error) => Err(error.clone()),
        }
    }

    fn describe(&self, form: &mut Form) {
        form.kind(self.is_ok());
        if let Ok(value) = self {
            value.describe(form);
        }
    }
}

impl<V: Tensors, const N: usize> Tensors for [V; N] {
    fn map_tensors<T: TensorMapper>(&self, mapper: &mut T) -> Self {
        self.each_ref().map(|value| value.map_tensors(mapper))
    }

    fn describe(&self, form: &mut Form) {
        self.iter().for_each(|value| value.describe(form));
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

            #[allow(non_snake_case)]
            fn describe(&self, form: &mut Form) {
                let ($($name,)+) = self;
                $($name.describe(form);)+
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
#[cfg(feature = "train")]
tensors!(burn::train::SequenceOutput {
    loss,
    logits,
    predictions,
    targets
});
