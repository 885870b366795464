//! Half precision on a backend that has none: values and gradients rounded to the half grid.
//!
//! It is computed on the host, in one pass; on a device that is not the CPU every call is
//! a round trip.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, try_read_sync};
use burn_lean_graph::round_all;
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
    Tensor::from_dispatch(Dispatch::round_to_half(
        x.into_dispatch(),
        dtype == FloatDType::BF16,
    ))
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

/// Rounding to a half grid as a backend operation, so that it can have a gradient of its own.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda", feature = "cpu")),
    Capture,
    Autodiff
)]
pub(crate) trait RoundToHalf: Backend {
    fn round_to_half(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        let device = x.device();
        let data = try_read_sync(Self::float_into_data(x))
            .expect("emulation reads synchronously, which this platform does not allow")
            .unwrap_or_else(|error| panic!("emulation could not read the tensor: {error}"));
        Self::float_from_data(round_data(data, bfloat), &device)
    }
}

#[cfg(feature = "flex")]
impl RoundToHalf for burn::backend::Flex {}
#[cfg(feature = "ndarray")]
impl RoundToHalf for burn::backend::NdArray {}
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "cpu"))]
impl RoundToHalf for burn::backend::Cube {}

/// Capture records no values: the rounding keeps shape and dtype, so the operand stands for it.
impl RoundToHalf for burn::backend::Capture {
    fn round_to_half(x: FloatTensor<Self>, _bfloat: bool) -> FloatTensor<Self> {
        x
    }
}

fn half(bfloat: bool) -> FloatDType {
    match bfloat {
        true => FloatDType::BF16,
        false => FloatDType::F16,
    }
}

fn round_data(mut data: TensorData, bfloat: bool) -> TensorData {
    if data.dtype() != DType::F32 {
        data = data.convert::<f32>();
    }
    let values = data
        .as_mut_slice::<f32>()
        .expect("the data was just converted to f32");
    round_all(values, half(bfloat));
    data
}

#[derive(Debug)]
struct RoundGradient;

impl<B: RoundToHalf> Backward<B, 1> for RoundGradient {
    type State = bool;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let bfloat = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::round_to_half(grad, bfloat)
        });
    }
}

impl<B: RoundToHalf, C: CheckpointStrategy> RoundToHalf for Autodiff<B, C> {
    fn round_to_half(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        let (primitive, node) = x.into_parts();
        match RoundGradient
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(bfloat, B::round_to_half(primitive, bfloat)),
            OpsKind::UnTracked(prep) => prep.finish(B::round_to_half(primitive, bfloat)),
        }
    }
}
