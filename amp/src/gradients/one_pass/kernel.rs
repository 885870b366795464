//! The pass as an operation of a backend.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Tensor};

use super::Look;
use crate::device::is_cubecl;

/// Parts of a sum, at most: enough to keep every processor of a GPU busy, few enough to read.
const PARTS: usize = 1024;
/// Elements for one part, at least.
const ELEMENTS: usize = 2048;

/// How many parts a tensor is summed up in.
pub(super) fn parts(elements: usize) -> usize {
    elements.div_ceil(ELEMENTS).clamp(1, PARTS)
}

/// The pass as an operation of a backend.
///
/// It writes into `exponents`, `squares` or both, as `look` says, [`parts`] numbers from `first` on, and hands
/// them on; one that nothing is written to may be of any length. All tensors are F32; `x` has elements.
#[backend_extension(Cube)]
pub(super) trait OnePass: Backend {
    /// What there is to see in `x`.
    fn look(
        x: FloatTensor<Self>,
        exponents: FloatTensor<Self>,
        squares: FloatTensor<Self>,
        first: usize,
        look: Look,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `x · factor`, of which `factor` is `[1]`, then as [`look`](Self::look).
    fn multiply_and_look(
        x: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        exponents: FloatTensor<Self>,
        squares: FloatTensor<Self>,
        first: usize,
        look: Look,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

pub(in crate::gradients) fn is_there_for<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && is_cubecl(&x.device())
}
