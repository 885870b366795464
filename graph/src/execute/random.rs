//! The same numbers in the place of random ones each time, for a comparison of two executions.

use burn::backend::ir::{FloatOperationIr, NumericOperationIr, OperationIr, RandomOpIr};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::Distribution;

use crate::interpret::noise;

/// What stands for random numbers of an operation, the same each time; `None` for other
/// operations.
pub(crate) fn instead_of_random(
    operation: &OperationIr,
    device: &DispatchDevice,
) -> Option<DispatchTensor> {
    let RandomOpIr { out, distribution } = match operation {
        OperationIr::Float(_, FloatOperationIr::Random(random)) => random,
        OperationIr::NumericInt(_, NumericOperationIr::IntRandom(random)) => random,
        _ => return None,
    };
    let noise = noise(out.shape.clone(), device);
    let (scale, offset) = match distribution {
        Distribution::Default | Distribution::Bernoulli(_) => (0.499, 0.5),
        Distribution::Uniform(low, high) => (0.499 * (high - low), 0.5 * (high + low)),
        Distribution::Normal(mean, std) => (1.4 * std, *mean),
    };
    let mut value = Dispatch::float_mul_scalar(noise, scale.into());
    value = Dispatch::float_add_scalar(value, offset.into());
    if let Distribution::Bernoulli(probability) = distribution {
        // One where the number, uniform enough in [0, 1], is below the probability. Without booleans:
        // which of them a device has, it alone knows.
        let above = Dispatch::float_add_scalar(value, (-*probability).into());
        let sign = Dispatch::float_mul_scalar(Dispatch::float_sign(above), (-1f32).into());
        value = Dispatch::float_clamp(sign, 0f32.into(), 1f32.into());
    }
    Some(match out.dtype.is_float() {
        true => Dispatch::float_cast(value, out.dtype.into()),
        false => Dispatch::float_into_int(value, out.dtype.into()),
    })
}
