//! What a loader yields: examples that can be cut apart and moved to a device.

use std::ops::Range;

use burn::tensor::{Bool, Device, Int, Tensor};
use burn_lean_graph::as_constants;

use crate::PruneError;
use crate::host::mismatch;

/// Some examples with what the loss needs of them.
///
/// Tuples of tensors whose first axis counts the examples have it already; a struct takes three
/// lines:
///
/// ```
/// use std::ops::Range;
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_lean_prune::Batch;
///
/// #[derive(Clone)]
/// struct Images {
///     pixels: Tensor<4>,
///     labels: Tensor<1, Int>,
/// }
///
/// impl Batch for Images {
///     fn examples(&self) -> usize {
///         self.labels.dims()[0]
///     }
///     fn slice(&self, examples: Range<usize>) -> Self {
///         let (pixels, labels) = (self.pixels.clone(), self.labels.clone()).slice(examples);
///         Self { pixels, labels }
///     }
///     fn to_device(self, device: &Device) -> Self {
///         let (pixels, labels) = (self.pixels, self.labels).to_device(device);
///         Self { pixels, labels }
///     }
/// }
/// # let device = Device::flex();
/// # let images = Images { pixels: Tensor::zeros([5, 1, 2, 2], &device),
/// #     labels: Tensor::zeros([5], &device) };
/// assert_eq!(images.slice(1..3).examples(), 2);
/// ```
pub trait Batch: Clone {
    /// How many examples there are.
    fn examples(&self) -> usize;

    /// The examples in that range, in their order.
    fn slice(&self, examples: Range<usize>) -> Self;

    /// All tensors on that device.
    fn to_device(self, device: &Device) -> Self;

    /// Whether all parts have as many examples; tuples look.
    ///
    /// # Errors
    ///
    /// [`PruneError::Mismatch`].
    fn check(&self) -> Result<(), PruneError> {
        Ok(())
    }
}

fn same_examples(first: &impl Batch, other: &impl Batch) -> Result<(), PruneError> {
    first.check()?;
    other.check()?;
    mismatch(
        "examples in a part of a batch",
        first.examples(),
        other.examples(),
    )
}

macro_rules! tensor_batch {
    ($($kind:ty),*) => {$(
        impl<const D: usize> Batch for Tensor<D, $kind> {
            fn examples(&self) -> usize {
                self.shape()[0]
            }

            fn slice(&self, examples: Range<usize>) -> Self {
                self.clone().slice_dim(0, examples)
            }

            fn to_device(self, device: &Device) -> Self {
                // Examples are constants; a recording device refuses anything else.
                match self.device() == *device {
                    true => self,
                    false => as_constants(&self, device),
                }
            }
        }
    )*};
}
tensor_batch!(burn::tensor::Float, Int, Bool);

macro_rules! tuple_batch {
    ($first:ident, $($other:ident),+) => {
        impl<$first: Batch, $($other: Batch),+> Batch for ($first, $($other),+) {
            fn examples(&self) -> usize {
                self.0.examples()
            }

            fn slice(&self, examples: Range<usize>) -> Self {
                #[allow(non_snake_case)] // The names of the types.
                let ($first, $($other),+) = self;
                ($first.slice(examples.clone()), $($other.slice(examples.clone())),+)
            }

            fn to_device(self, device: &Device) -> Self {
                #[allow(non_snake_case)]
                let ($first, $($other),+) = self;
                ($first.to_device(device), $($other.to_device(device)),+)
            }

            fn check(&self) -> Result<(), PruneError> {
                #[allow(non_snake_case)]
                let ($first, $($other),+) = self;
                $(same_examples($first, $other)?;)+
                Ok(())
            }
        }
    };
}
tuple_batch!(A, B);
tuple_batch!(A, B, C);
tuple_batch!(A, B, C, D);
tuple_batch!(A, B, C, D, E);
tuple_batch!(A, B, C, D, E, F);
