//! The kernel, and how it is queued under Burn's fusion.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
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
    fn look(
        x: CubeTensor,
        exponents: CubeTensor,
        squares: CubeTensor,
        first: usize,
        look: Look,
    ) -> (CubeTensor, CubeTensor) {
        let x = in_order_of_memory(x);
        let Cubes { count, dim, units } = Cubes::over(&x);
        look_at::launch(
            &x.client.clone(),
            count,
            dim,
            x.into_tensor_arg(),
            exponents.clone().into_tensor_arg(),
            squares.clone().into_tensor_arg(),
            first as u32,
            units,
            look,
        );
        (exponents, squares)
    }

    fn multiply_and_look(
        x: CubeTensor,
        factor: CubeTensor,
        exponents: CubeTensor,
        squares: CubeTensor,
        first: usize,
        look: Look,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let x = in_order_of_memory(x);
        let Cubes { count, dim, units } = Cubes::over(&x);
        let (y, y_argument) = match x.can_mut() {
            true => (x.clone(), x.as_tensor_alias(0)),
            false => {
                let (client, device) = (x.client.clone(), x.device.clone());
                let empty = empty_device_contiguous_dtype(client, device, x.shape(), DType::F32);
                let mut y = x.clone();
                y.handle = empty.handle;
                let argument = y.clone().into_tensor_arg();
                (y, argument)
            }
        };
        multiply_and_look::launch(
            &x.client.clone(),
            count,
            dim,
            x.into_tensor_arg(),
            y_argument,
            factor.into_tensor_arg(),
            exponents.clone().into_tensor_arg(),
            squares.clone().into_tensor_arg(),
            first as u32,
            units,
            look,
        );
        (y, exponents, squares)
    }
}

/// Elements in the order of memory, whatever that is: a product has the strides of `x`.
fn in_order_of_memory(x: CubeTensor) -> CubeTensor {
    match x.is_contiguous_buffer() && x.is_nonoverlapping() {
        true => x,
        false => into_contiguous(x),
    }
}

/// How a kernel is launched: a cube for each part.
struct Cubes {
    count: CubeCount,
    dim: CubeDim,
    units: u32,
}

impl Cubes {
    fn over(x: &CubeTensor) -> Self {
        let hardware = &x.client.properties().hardware;
        let units = 1 << hardware.max_units_per_cube.clamp(1, UNITS).ilog2();
        Self {
            count: CubeCount::new_1d(parts(x.shape().num_elements()) as u32),
            dim: CubeDim::new_1d(units),
            units,
        }
    }
}

impl<B: FusionBackend + OnePass> OnePass for Fusion<B> {
    fn look(
        x: FloatTensor<Self>,
        exponents: FloatTensor<Self>,
        squares: FloatTensor<Self>,
        first: usize,
        look: Look,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [exponents.shape(), squares.shape()];
        let outputs = outputs.map(|shape| TensorSpec::new(shape, DType::F32));
        let operation = move |[x, exponents, squares]: [_; 3]| {
            let (exponents, squares) = B::look(x, exponents, squares, first, look);
            [exponents, squares].map(Output::Float)
        };
        let inputs = [x, exponents, squares];
        let [exponents, squares] = queue::<B, _, _>("look", inputs, outputs, operation);
        (exponents, squares)
    }

    fn multiply_and_look(
        x: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        exponents: FloatTensor<Self>,
        squares: FloatTensor<Self>,
        first: usize,
        look: Look,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [x.shape(), exponents.shape(), squares.shape()];
        let outputs = outputs.map(|shape| TensorSpec::new(shape, DType::F32));
        let operation = move |[x, factor, exponents, squares]: [_; 4]| {
            let (y, exponents, squares) =
                B::multiply_and_look(x, factor, exponents, squares, first, look);
            [y, exponents, squares].map(Output::Float)
        };
        let inputs = [x, factor, exponents, squares];
        let [y, exponents, squares] =
            queue::<B, _, _>("multiply_and_look", inputs, outputs, operation);
        (y, exponents, squares)
    }
}

/// The exponent of `x` by its bits, which no compiler can take for finite: all ones for an infinity or NaN.
#[cube]
fn exponent(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7f80_0000u32
}

/// Of two powers of two, by their bits.
#[cube]
fn larger(a: f32, b: f32) -> f32 {
    let (a, b) = (u32::reinterpret(a), u32::reinterpret(b));
    f32::reinterpret(select(a > b, a, b))
}

/// Adds what all units of the cube have found to the zeros where the parts of this tensor begin, at `first`.
#[cube]
fn publish(
    exponent: f32,
    sum: f32,
    exponents: &mut Tensor<f32>,
    squares: &mut Tensor<f32>,
    first: u32,
    #[comptime] units: u32,
    #[comptime] look: Look,
) {
    let mut largest = Shared::<[f32]>::new_slice(units as usize);
    let mut sums = Shared::<[f32]>::new_slice(units as usize);
    largest[UNIT_POS as usize] = exponent;
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    let mut half = (units / 2).runtime();
    while half > 0 {
        if UNIT_POS < half {
            let mine = largest[UNIT_POS as usize];
            let other = largest[(UNIT_POS + half) as usize];
            largest[UNIT_POS as usize] = larger(mine, other);
            let mine = sums[UNIT_POS as usize];
            let other = sums[(UNIT_POS + half) as usize];
            sums[UNIT_POS as usize] = mine + other;
        }
        sync_cube();
        half /= 2;
    }
    if UNIT_POS == 0 {
        if comptime!(look.is_for_finite()) {
            let at = first as usize + CUBE_POS;
            exponents[at] = larger(exponents[at], largest[0]);
        }
        if comptime!(look.is_for_squares()) {
            let at = first as usize + CUBE_POS;
            squares[at] += sums[0];
        }
    }
}

#[cube(launch)]
fn multiply_and_look(
    x: &Tensor<f32>,
    y: &mut Tensor<f32>,
    factor: &Tensor<f32>,
    exponents: &mut Tensor<f32>,
    squares: &mut Tensor<f32>,
    first: u32,
    #[comptime] units: u32,
    #[comptime] look: Look,
) {
    let factor = factor[0];
    let mut largest = 0.0f32;
    let mut sum = 0.0f32;
    let mut position = ABSOLUTE_POS;
    while position < x.len() {
        let element = x[position];
        let product = element * factor;
        y[position] = product;
        if comptime!(look.is_for_finite()) {
            largest = larger(largest, f32::reinterpret(exponent(element)));
        }
        if comptime!(look.is_for_squares()) {
            sum += product * product;
        }
        position += CUBE_COUNT * units as usize;
    }
    publish(largest, sum, exponents, squares, first, units, look);
}

#[cube(launch)]
fn look_at(
    x: &Tensor<f32>,
    exponents: &mut Tensor<f32>,
    squares: &mut Tensor<f32>,
    first: u32,
    #[comptime] units: u32,
    #[comptime] look: Look,
) {
    let mut largest = 0.0f32;
    let mut sum = 0.0f32;
    let mut position = ABSOLUTE_POS;
    while position < x.len() {
        let element = x[position];
        if comptime!(look.is_for_finite()) {
            largest = larger(largest, f32::reinterpret(exponent(element)));
        }
        if comptime!(look.is_for_squares()) {
            sum += element * element;
        }
        position += CUBE_COUNT * units as usize;
    }
    publish(largest, sum, exponents, squares, first, units, look);
}
