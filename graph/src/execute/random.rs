//! Numbers in the place of random ones, for a comparison of two executions: the same each time, and others
//! for each draw.

use burn::backend::ir::{FloatOperationIr, NumericOperationIr, OperationIr, RandomOpIr};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::{Distribution, Slice};

use crate::interpret::noise_of;

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
    let noise = noise_of(out.id.value(), out.shape.clone(), device);
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
        if *probability > 0.0 && out.shape.num_elements() > 0 {
            // A mask of a few zeros alone would hide all that it is a factor of.
            let first = vec![Slice::from(0..1usize); out.shape.num_dims()];
            let one = Dispatch::float_slice(value.clone(), &first);
            let one = Dispatch::float_mul_scalar(one, 0f32.into());
            let one = Dispatch::float_add_scalar(one, 1f32.into());
            value = Dispatch::float_slice_assign(value, &first, one);
        }
    }
    Some(match out.dtype.is_float() {
        true => Dispatch::float_cast(value, out.dtype.into()),
        false => Dispatch::float_into_int(value, out.dtype.into()),
    })
}
