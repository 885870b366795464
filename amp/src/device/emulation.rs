//! Half precision on a backend that has none: values and gradients rounded to the half grid.

use burn::backend::Dispatch;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_graph::HalfStorage;
use half::{bf16, f16};

/// Rounds one number to the grid of `dtype` and back to F32.
///
/// To nearest, ties to even; overflow gives an infinity, underflow is gradual; NaN stays NaN.
/// Any `dtype` but F16 and BF16 returns `x`.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_lean_amp::round_to;
///
/// assert_eq!(round_to(FloatDType::F16, 65519.0), 65504.0);
/// assert_eq!(round_to(FloatDType::F16, 65520.0), f32::INFINITY);
/// assert_eq!(round_to(FloatDType::BF16, 1.00390625), 1.0);
/// ```
pub fn round_to(dtype: FloatDType, x: f32) -> f32 {
    match dtype {
        FloatDType::F16 => f16::from_f32(x).to_f32(),
        FloatDType::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

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
        None => cfg!(any(feature = "wgpu", feature = "cuda", feature = "cpu")),
    }
}
