//! Numbers for comparisons.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::{FloatDType, IntDType, Shape, Slice};

/// Numbers in [−1, 1] that look random and are the same each time.
pub(crate) fn noise(shape: Shape, device: &DispatchDevice) -> DispatchTensor {
    if shape.num_elements() == 0 {
        return Dispatch::float_zeros(shape, device, FloatDType::F32);
    }
    let numbers = counted(shape.num_elements(), device);
    let numbers = Dispatch::int_into_float(numbers, FloatDType::F32);
    let numbers = Dispatch::float_mul_scalar(numbers, 12.9898f32.into());
    Dispatch::float_reshape(Dispatch::float_sin(numbers), shape)
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
    use burn::tensor::{Device, Int, Tensor};

    use super::counted;

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
