//! The pass as an operation of a backend.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
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
#[backend_extension(Cube)]
pub(super) trait OnePass: Backend {
    /// `x · factor`, or `x` unless it is to `multiply`, and [`parts`] of what is looked for. `x` is F32 and
    /// has elements; `factor` is F32, `[1]`.
    fn one_pass(
        x: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        multiply: bool,
        look: Look,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

pub(super) fn is_there_for<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && is_cubecl(&x.device())
}

/// `x · factor`, where there is one, and what is looked for, `[parts]`.
pub(super) fn multiply_and_look<const D: usize>(
    x: Tensor<D>,
    factor: Option<Tensor<1>>,
    look: Look,
) -> (Tensor<D>, Tensor<1>) {
    let multiply = factor.is_some();
    let factor = factor.unwrap_or_else(|| Tensor::ones([1], (&x.device(), DType::F32)));
    let (x, parts) = Dispatch::one_pass(x.into_dispatch(), factor.into_dispatch(), multiply, look);
    (Tensor::from_dispatch(x), Tensor::from_dispatch(parts))
}
