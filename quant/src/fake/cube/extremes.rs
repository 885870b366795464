//! The lowest and the highest number of a whole tensor, in one pass over memory: each cube finds those of
//! its part, and one cube those of the parts. Reductions of Burn read the tensor for each of the two.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

/// Parts of a tensor, at most: enough to keep every processor of a GPU busy.
const PARTS: usize = 1024;
/// Elements of a part, at least.
const ELEMENTS: usize = 2048;
/// Units of a cube, at most; a power of two.
const UNITS: u32 = 256;

/// Minimum and maximum of an F32 tensor that has elements, both `[1]`; NaN where one of them is.
pub(super) fn extremes(x: CubeTensor) -> (CubeTensor, CubeTensor) {
    // Elements in the order of memory, whatever that is.
    let x = match x.is_contiguous_buffer() && x.is_nonoverlapping() {
        true => x,
        false => into_contiguous(x),
    };
    let parts = x.shape().num_elements().div_ceil(ELEMENTS);
    let parts = parts.clamp(1, PARTS);
    let (min, max) = in_parts(x.clone(), x, parts, false);
    match parts {
        1 => (min, max),
        _ => in_parts(min, max, 1, true),
    }
}

/// The minima of `lowest` and the maxima of `highest`, which are one tensor unless they are `of_parts`.
fn in_parts(
    lowest: CubeTensor,
    highest: CubeTensor,
    parts: usize,
    of_parts: bool,
) -> (CubeTensor, CubeTensor) {
    let client = lowest.client.clone();
    let device = lowest.device.clone();
    let empty = || {
        let (client, device) = (client.clone(), device.clone());
        empty_device_contiguous_dtype(client, device, Shape::from([parts]), DType::F32)
    };
    let (min, max) = (empty(), empty());
    let hardware = &client.properties().hardware;
    let units = 1 << hardware.max_units_per_cube.clamp(1, UNITS).ilog2();
    find_extremes::launch(
        &client,
        CubeCount::new_1d(parts as u32),
        CubeDim::new_1d(units),
        lowest.into_tensor_arg(),
        highest.into_tensor_arg(),
        min.clone().into_tensor_arg(),
        max.clone().into_tensor_arg(),
        units,
        of_parts,
    );
    (min, max)
}

/// An integer for each number, in the same order. Integers compare alike on all devices; numbers do not where
/// one is NaN.
#[cube]
fn key(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let negative = bits ^ 0xffff_ffffu32;
    let positive = bits | 0x8000_0000u32;
    select(bits < 0x8000_0000u32, positive, negative)
}

/// The number for a key. The lowest and the highest key are those of NaN.
#[cube]
fn number(key: u32) -> f32 {
    let negative = key ^ 0xffff_ffffu32;
    let positive = key ^ 0x8000_0000u32;
    f32::reinterpret(select(key < 0x8000_0000u32, negative, positive))
}

/// By the bits, which no compiler can take for a number.
#[cube]
fn is_nan_by_bits(x: f32) -> bool {
    (u32::reinterpret(x) & 0x7fff_ffffu32) > 0x7f80_0000u32
}

#[cube]
fn smaller(a: u32, b: u32) -> u32 {
    select(a < b, a, b)
}

#[cube]
fn larger(a: u32, b: u32) -> u32 {
    select(a > b, a, b)
}

/// NaN is below everything.
#[cube]
fn key_for_min(x: f32) -> u32 {
    select(is_nan_by_bits(x), 0u32, key(x))
}

/// NaN is above everything.
#[cube]
fn key_for_max(x: f32) -> u32 {
    select(is_nan_by_bits(x), 0xffff_ffffu32, key(x))
}

#[cube(launch)]
fn find_extremes(
    lowest: &Tensor<f32>,
    highest: &Tensor<f32>,
    min: &mut Tensor<f32>,
    max: &mut Tensor<f32>,
    #[comptime] units: u32,
    #[comptime] of_parts: bool,
) {
    let mut low = 0xffff_ffffu32;
    let mut high = 0u32;
    let mut position = ABSOLUTE_POS;
    while position < lowest.len() {
        let element = lowest[position];
        low = smaller(low, key_for_min(element));
        if comptime!(of_parts) {
            high = larger(high, key_for_max(highest[position]));
        } else {
            high = larger(high, key_for_max(element));
        }
        position += CUBE_COUNT * units as usize;
    }

    let mut lows = Shared::<[u32]>::new_slice(units as usize);
    let mut highs = Shared::<[u32]>::new_slice(units as usize);
    lows[UNIT_POS as usize] = low;
    highs[UNIT_POS as usize] = high;
    sync_cube();
    let mut half = (units / 2).runtime();
    while half > 0 {
        if UNIT_POS < half {
            let mine = lows[UNIT_POS as usize];
            let other = lows[(UNIT_POS + half) as usize];
            lows[UNIT_POS as usize] = smaller(mine, other);
            let mine = highs[UNIT_POS as usize];
            let other = highs[(UNIT_POS + half) as usize];
            highs[UNIT_POS as usize] = larger(mine, other);
        }
        sync_cube();
        half /= 2;
    }
    if UNIT_POS == 0 {
        min[CUBE_POS] = number(lows[0]);
        max[CUBE_POS] = number(highs[0]);
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use burn::backend::{Dispatch, DispatchTensor};
    use burn::tensor::{DType, Device, Tensor, TensorData};

    use crate::Granularity;
    use crate::fake::composed;
    use crate::fake::range::GroupRange;
    use crate::format::groups::Groups;

    /// Numbers of both signs, from almost 0 to 2147; none is 0.
    fn number(index: usize) -> f32 {
        let hash = (index as u32 + 1).wrapping_mul(2_654_435_769);
        hash as i32 as f32 / 1e6
    }

    /// All NaNs are alike.
    fn bits(of: DispatchTensor) -> u32 {
        let value = Tensor::<1>::from_dispatch(of).into_scalar::<f32>();
        match value.is_nan() {
            true => u32::MAX,
            false => value.to_bits(),
        }
    }

    #[test]
    fn one_pass_finds_what_reductions_do() {
        let device = Device::wgpu(Default::default());
        for count in [1, 2, 31, 2048, 2049, 16_384, 16_385, 1_000_003] {
            let plain: Vec<f32> = (0..count).map(number).collect();
            let with = |at: &[(usize, f32)]| {
                let mut x = plain.clone();
                for (at, value) in at {
                    x[*at] = *value;
                }
                x
            };
            let [first, middle, last] = [0, count / 2, count - 1];
            for x in [
                with(&[]),
                with(&[(first, 3e38), (last, -3e38)]),
                with(&[(last, f32::NAN)]),
                with(&[(first, -f32::NAN), (middle, f32::NAN)]),
                with(&[(first, f32::INFINITY), (last, f32::NEG_INFINITY)]),
                with(&[(middle, f32::INFINITY), (last, f32::NAN)]),
                vec![-0.75; count],
                vec![f32::NEG_INFINITY; count],
                plain.iter().map(|x| -x.abs()).collect(),
            ] {
                let groups = Groups::new(&Granularity::PerTensor, &[count]).unwrap();
                let x = TensorData::new(x, [count]);
                let x = Tensor::<1>::from_data(x, (&device, DType::F32)).into_dispatch();
                let expected = composed::range::<Dispatch>(x.clone(), &groups);
                let found = Dispatch::group_range(x, groups);
                let found = [found.0, found.1].map(bits);
                assert_eq!(found, [expected.0, expected.1].map(bits), "{count}");
            }
        }
    }
}
