//! Numbers for comparisons.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::{FloatDType, IntDType, Shape};

/// Numbers in [−1, 1] that look random and are the same each time.
pub(crate) fn noise(shape: Shape, device: &DispatchDevice) -> DispatchTensor {
    let count = shape.num_elements() as i64;
    let numbers = Dispatch::int_arange(1..count + 1, device, IntDType::I32);
    let numbers = Dispatch::int_into_float(numbers, FloatDType::F32);
    let numbers = Dispatch::float_mul_scalar(numbers, 12.9898f32.into());
    Dispatch::float_reshape(Dispatch::float_sin(numbers), shape)
}
