//! Numbers for comparisons.

use std::f64::consts::TAU;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::{FloatDType, IntDType, Shape, Slice};

/// Numbers in [−1, 1] that look random and are the same each time.
pub(crate) fn noise(shape: Shape, device: &DispatchDevice) -> DispatchTensor {
    wave(shape, None, device)
}

/// Such numbers of one draw of many: others for each of its numbers.
pub(crate) fn noise_of(draw: u64, shape: Shape, device: &DispatchDevice) -> DispatchTensor {
    let mut hasher = DefaultHasher::new();
    draw.hash(&mut hasher);
    let turns = hasher.finish() as f64 / u64::MAX as f64;
    wave(shape, Some(turns * TAU), device)
}

/// Sines of large steps, which begin at the phase.
fn wave(shape: Shape, phase: Option<f64>, device: &DispatchDevice) -> DispatchTensor {
    if shape.num_elements() == 0 {
        return Dispatch::float_zeros(shape, device, FloatDType::F32);
    }
    let numbers = counted(shape.num_elements(), device);
    let numbers = Dispatch::int_into_float(numbers, FloatDType::F32);
    let angles = Dispatch::float_mul_scalar(numbers, 12.9898f32.into());
    let sines = match phase {
        None => Dispatch::float_sin(angles),
        // Not added to the angles: a large one has no digits left for it.
        Some(phase) => {
            let (sine, cosine) = phase.sin_cos();
            let sines = Dispatch::float_sin(angles.clone());
            let sines = Dispatch::float_mul_scalar(sines, cosine.into());
            let cosines = Dispatch::float_mul_scalar(Dispatch::float_cos(angles), sine.into());
            Dispatch::float_add(sines, cosines)
        }
    };
    Dispatch::float_reshape(sines, shape)
}

/// 1, 2, … `count`, made of the rows and columns of a square: with fusion Burn makes `arange` of a cumulative
/// sum that reads as many elements as the square of its length.
fn counted(count: usize, device: &DispatchDevice) -> DispatchTensor {
    let columns = count.isqrt().max(1);
    let rows = count.div_ceil(columns);
    let range = |from: usize, to: usize, shape: [usize; 2]| {
        let numbers = Dispatch::int_arange(from as i64..to as i64, device, IntDType::I32);
        Dispatch::int_reshape(numbers, Shape::new(shape))
    };
    let before = Dispatch::int_mul_scalar(range(0, rows, [rows, 1]), (columns as i64).into());
    let all = Dispatch::int_add(before, range(1, columns + 1, [1, columns]));
    let all = Dispatch::int_reshape(all, Shape::new([rows * columns]));
    Dispatch::int_slice(all, &[Slice::from(0..count)])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int, Shape, Tensor};

    use super::{counted, noise_of};

    #[test]
    fn each_draw_has_numbers_of_its_own() {
        let device = Device::flex();
        let drawn = |draw| {
            let noise = noise_of(draw, Shape::new([64]), device.as_dispatch());
            let noise = Tensor::<1>::from_dispatch(noise).into_data();
            noise.try_to_vec::<f32>().unwrap()
        };
        assert_eq!(drawn(3), drawn(3));
        for other in [4, 5, 1000, 1 << 40] {
            let pairs = drawn(3).into_iter().zip(drawn(other));
            let apart = pairs.filter(|(a, b)| (*a > 0.0) != (*b > 0.0)).count();
            // Masks that differ, not only numbers.
            assert!(apart > 3, "{other}: {apart} of 64");
        }
    }

    #[test]
    fn numbers_are_counted_one_by_one() {
        let device = Device::flex();
        for count in [1, 2, 3, 4, 5, 15, 16, 17, 1000] {
            let found = counted(count, device.as_dispatch());
            let found = Tensor::<1, Int>::from_dispatch(found).into_data();
            let expected: Vec<i32> = (1..=count as i32).collect();
            assert_eq!(found.try_to_vec::<i32>().unwrap(), expected);
        }
    }
}
