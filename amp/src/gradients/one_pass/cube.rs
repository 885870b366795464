//! The kernel, and how it is queued under Burn's fusion.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::custom::TensorSpec;
use burn_fusion::{Fusion, FusionBackend};
use burn_lean_graph::fused::{Output, queue};

use super::Look;
use super::kernel::{OnePass, parts};

/// Units of a cube, at most; a power of two.
const UNITS: u32 = 256;

impl OnePass for CubeBackend {
    fn one_pass(
        x: CubeTensor,
        factor: CubeTensor,
        multiply: bool,
        look: Look,
    ) -> (CubeTensor, CubeTensor) {
        // Elements in the order of memory, whatever that is: a product has the strides of `x`.
        let x = match x.is_contiguous_buffer() && x.is_nonoverlapping() {
            true => x,
            false => into_contiguous(x),
        };
        let client = x.client.clone();
        let count = parts(x.shape().num_elements());
        let empty = |shape| {
            let (client, device) = (x.client.clone(), x.device.clone());
            empty_device_contiguous_dtype(client, device, shape, DType::F32)
        };
        let sums = empty(Shape::from([count]));
        let hardware = &client.properties().hardware;
        let units = 1 << hardware.max_units_per_cube.clamp(1, UNITS).ilog2();
        let cubes = CubeCount::new_1d(count as u32);
        let dim = CubeDim::new_1d(units);
        let sums_argument = sums.clone().into_tensor_arg();
        let squares = look == Look::Squares;
        if !multiply {
            let x_argument = x.clone().into_tensor_arg();
            look_at::launch(
                &client,
                cubes,
                dim,
                x_argument,
                sums_argument,
                units,
                squares,
            );
            return (x, sums);
        }
        let (y, y_argument) = match x.can_mut() {
            true => (x.clone(), x.as_tensor_alias(0)),
            false => {
                let mut y = x.clone();
                y.handle = empty(x.shape()).handle;
                let argument = y.clone().into_tensor_arg();
                (y, argument)
            }
        };
        multiply_and_look::launch(
            &client,
            cubes,
            dim,
            x.into_tensor_arg(),
            y_argument,
            factor.into_tensor_arg(),
            sums_argument,
            units,
            squares,
        );
        (y, sums)
    }
}

impl<B: FusionBackend + OnePass> OnePass for Fusion<B> {
    fn one_pass(
        x: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        multiply: bool,
        look: Look,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [x.shape(), Shape::from([parts(x.shape().num_elements())])];
        let outputs = outputs.map(|shape| TensorSpec::new(shape, DType::F32));
        let operation = move |[x, factor]: [_; 2]| {
            let (y, sums) = B::one_pass(x, factor, multiply, look);
            [y, sums].map(Output::Float)
        };
        let [y, sums] = queue::<B, _, _>("one_pass", [x, factor], outputs, operation);
        (y, sums)
    }
}

/// The exponent of `x` by its bits, which no compiler can take for finite: all ones for an infinity or NaN.
#[cube]
fn exponent(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7f80_0000u32
}

#[cube]
fn add(sum: f32, x: f32, #[comptime] squares: bool) -> f32 {
    if comptime!(squares) {
        sum + x * x
    } else {
        larger(sum, f32::reinterpret(exponent(x)))
    }
}

/// Of two powers of two, by their bits.
#[cube]
fn larger(a: f32, b: f32) -> f32 {
    let (a, b) = (u32::reinterpret(a), u32::reinterpret(b));
    f32::reinterpret(select(a > b, a, b))
}

/// Writes what all units of the cube have found.
#[cube]
fn publish(found: f32, sums: &mut Tensor<f32>, #[comptime] units: u32, #[comptime] squares: bool) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    shared[UNIT_POS as usize] = found;
    sync_cube();
    let mut half = (units / 2).runtime();
    while half > 0 {
        if UNIT_POS < half {
            let mine = shared[UNIT_POS as usize];
            let other = shared[(UNIT_POS + half) as usize];
            shared[UNIT_POS as usize] = if comptime!(squares) {
                mine + other
            } else {
                larger(mine, other)
            };
        }
        sync_cube();
        half /= 2;
    }
    if UNIT_POS == 0 {
        sums[CUBE_POS] = shared[0];
    }
}

#[cube(launch)]
fn multiply_and_look(
    x: &Tensor<f32>,
    y: &mut Tensor<f32>,
    factor: &Tensor<f32>,
    sums: &mut Tensor<f32>,
    #[comptime] units: u32,
    #[comptime] squares: bool,
) {
    let factor = factor[0];
    let mut found = 0.0f32;
    let mut position = ABSOLUTE_POS;
    while position < x.len() {
        let element = x[position];
        let product = element * factor;
        y[position] = product;
        found = add(found, select(squares, product, element), squares);
        position += CUBE_COUNT * units as usize;
    }
    publish(found, sums, units, squares);
}

#[cube(launch)]
fn look_at(
    x: &Tensor<f32>,
    sums: &mut Tensor<f32>,
    #[comptime] units: u32,
    #[comptime] squares: bool,
) {
    let mut found = 0.0f32;
    let mut position = ABSOLUTE_POS;
    while position < x.len() {
        found = add(found, x[position], squares);
        position += CUBE_COUNT * units as usize;
    }
    publish(found, sums, units, squares);
}
