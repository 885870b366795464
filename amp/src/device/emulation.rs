//! Half precision on a backend that has none: values and gradients rounded to the half grid.

use burn::backend::Dispatch;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_graph::HalfStorage;

/// Rounds a tensor of any shape to the grid of `dtype`; the gradient is rounded on its way back.
///
/// The result keeps the dtype of `x`: it is an F32 tensor whose values are halves.
pub(crate) fn round<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    let bfloat = dtype == FloatDType::BF16;
    Tensor::from_dispatch(Dispatch::round(x.into_dispatch(), bfloat, false))
}

/// Whether this build can emulate on `device`.
///
/// The operation is compiled for the backends whose feature this crate was built with.
pub(crate) fn is_available(device: &Device) -> bool {
    let name = crate::device::backend_name(device);
    let compiled = [
        ("ndarray", cfg!(feature = "ndarray")),
        ("flex", cfg!(feature = "flex")),
    ];
    match compiled.iter().find(|(backend, _)| name.contains(backend)) {
        Some((_, compiled)) => *compiled,
        // All others are the one CubeCL backend.
        None => cfg!(feature = "cube"),
    }
}
