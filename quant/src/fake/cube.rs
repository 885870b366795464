//! Fake quantization on CubeCL's backends (wgpu, Vulkan, CUDA…): one kernel for each operation,
//! where composed operations would read and write memory nine times.

mod extremes;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{TensorMetadata, get_or_init_device_settings};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::cubecl::std::FastDivmod;
use burn_cubecl::cubecl::{self, calculate_cube_count_elemwise};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use crate::fake::Clip;
use crate::fake::composed;
use crate::fake::kernel::{Kernel, LearnedGradients, Rule, Wanted};
use crate::format::groups::Groups;
use crate::format::number_format::Grid;
use crate::format::step::Floats;

impl Kernel for CubeBackend {
    fn quantize_dequantize(
        x: CubeTensor,
        scale: CubeTensor,
        zero_point: CubeTensor,
        rule: &Rule,
    ) -> CubeTensor {
        quantize(x, scale, zero_point, rule, false).0
    }

    fn quantize_dequantize_masked(
        x: CubeTensor,
        scale: CubeTensor,
        zero_point: CubeTensor,
        rule: &Rule,
    ) -> (CubeTensor, CubeTensor) {
        quantize(x, scale, zero_point, rule, true)
    }

    fn learned_gradients(
        x: CubeTensor,
        scale: CubeTensor,
        zero_point: CubeTensor,
        dy: CubeTensor,
        rule: &Rule,
        wanted: Wanted,
    ) -> LearnedGradients<CubeTensor> {
        let launch = Launch::new(&x, rule);
        let x = into_contiguous(x);
        let dx = like(&x, DType::F32);
        let of_scale = like(&x, DType::F32);
        let of_zero = like_if(wanted.zero_point, &x, DType::F32);
        let (min, max) = launch.bounds;
        learned_gradients::launch(
            &x.client.clone(),
            launch.cube_count,
            launch.cube_dim,
            x.into_tensor_arg(),
            into_contiguous(dy).into_tensor_arg(),
            inverse(&scale).into_tensor_arg(),
            into_contiguous(scale).into_tensor_arg(),
            into_contiguous(zero_point).into_tensor_arg(),
            dx.clone().into_tensor_arg(),
            of_scale.clone().into_tensor_arg(),
            of_zero.clone().into_tensor_arg(),
            launch.runs,
            launch.strides,
            min,
            max,
            launch.floats,
            wanted.clip == Clip::AfterRounding,
            wanted.zero_point,
        );
        LearnedGradients {
            x: dx,
            scale: composed::sum::<Self>(of_scale, &rule.groups),
            zero_point: wanted
                .zero_point
                .then(|| composed::sum::<Self>(of_zero, &rule.groups)),
        }
    }

    fn range(x: CubeTensor, groups: &Groups) -> (CubeTensor, CubeTensor) {
        match groups.count() {
            1 => extremes::extremes(x),
            _ => composed::range::<Self>(x, groups),
        }
    }
}

/// What the quantized `x` stands for; and, if it is `masked`, where it was clipped or is NaN.
fn quantize(
    x: CubeTensor,
    scale: CubeTensor,
    zero_point: CubeTensor,
    rule: &Rule,
    masked: bool,
) -> (CubeTensor, CubeTensor) {
    let launch = Launch::new(&x, rule);
    let x = into_contiguous(x);
    let y = like(&x, DType::F32);
    let truth = DType::from(get_or_init_device_settings::<CubeBackend>(&x.device()).bool_dtype);
    let clipped = like_if(masked, &x, truth);
    let (min, max) = launch.bounds;
    quantize_dequantize::launch(
        &x.client.clone(),
        launch.cube_count,
        launch.cube_dim,
        x.into_tensor_arg(),
        inverse(&scale).into_tensor_arg(),
        into_contiguous(scale).into_tensor_arg(),
        into_contiguous(zero_point).into_tensor_arg(),
        y.clone().into_tensor_arg(),
        clipped.clone().into_tensor_arg(),
        launch.runs,
        launch.strides,
        min,
        max,
        rule.limit.unwrap_or(f32::MAX),
        launch.floats,
        rule.limit.is_some(),
        masked,
        dtype_to_storage_type(truth),
    );
    (y, clipped)
}

/// How a kernel is launched over the elements of a tensor.
struct Launch {
    cube_count: CubeCount,
    cube_dim: CubeDim,
    /// Lengths of the runs, outermost first; none if all elements share a scale.
    runs: SequenceArg<FastDivmod<usize>>,
    /// How far apart the groups of neighbours along each run are.
    strides: SequenceArg<usize>,
    /// The lowest and the highest number.
    bounds: (f32, f32),
    /// What is rounded to; none for integers.
    floats: Option<Floats>,
}

impl Launch {
    fn new(x: &CubeTensor, rule: &Rule) -> Self {
        let elements = x.shape().num_elements();
        let cube_dim = CubeDim::new(&x.client, elements);
        let mut runs = SequenceArg::new();
        let mut strides = SequenceArg::new();
        if rule.groups.count() > 1 {
            for (run, stride) in rule.groups.strides() {
                runs.push(run);
                strides.push(stride);
            }
        }
        Self {
            cube_count: calculate_cube_count_elemwise(&x.client, elements, cube_dim),
            cube_dim,
            runs,
            strides,
            bounds: rule.grid.bounds(),
            floats: match rule.grid {
                Grid::Int { .. } => None,
                Grid::Float { floats, .. } => Some(floats),
            },
        }
    }
}

/// The reciprocals of the few scales: not a division for each element.
fn inverse(scale: &CubeTensor) -> CubeTensor {
    into_contiguous(CubeBackend::float_recip(scale.clone()))
}

fn like(x: &CubeTensor, dtype: DType) -> CubeTensor {
    like_if(true, x, dtype)
}

/// A result in the shape of `x`; of one number where nobody asks for it.
fn like_if(wanted: bool, x: &CubeTensor, dtype: DType) -> CubeTensor {
    let shape = match wanted {
        true => x.shape(),
        false => Shape::from([1]),
    };
    empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape, dtype)
}

/// The group of an element.
#[cube]
fn group_of(
    position: usize,
    runs: &Sequence<FastDivmod<usize>>,
    strides: &Sequence<usize>,
) -> usize {
    let rank = runs.len().comptime();
    let mut group = 0;
    let mut rest = position;
    #[unroll]
    for i in 0..rank {
        let run = rank - i - 1;
        let (outer, index) = runs[run].div_mod(rest);
        rest = outer;
        group += index * strides[run];
    }
    group
}

/// By comparisons, which NaN passes through.
#[cube]
fn clamp_number(number: f32, min: f32, max: f32) -> f32 {
    let raised = select(number < min, min, number);
    let clamped = select(raised > max, max, raised);
    select(number.is_nan(), number, clamped)
}

/// A finite number, within the limit on both sides.
#[cube]
fn limit_finite(number: f32, limit: f32) -> f32 {
    select(number.is_inf(), number, clamp_number(number, -limit, limit))
}

/// The nearest number of the grid continued beyond its bounds, plus the zero point.
#[cube]
fn nearest(scaled: f32, zero_point: f32, max: f32, #[comptime] floats: Option<Floats>) -> f32 {
    if comptime!(floats.is_none()) {
        scaled.round() + zero_point
    } else {
        let mantissa_bits = comptime!(floats.map_or(0, |floats| floats.mantissa_bits as u32));
        let least = comptime!(floats.map_or(0, |floats| (floats.min_exponent + 127) as u32));
        let far = 2.0f32 * max;
        let bounded = clamp_number(scaled, -far, far);
        // Steps of 2ᵉ⁻ᵐ, by their bits: exact.
        let bits = u32::reinterpret(bounded.abs()) >> 23u32;
        let exponent = select(bits > least, bits, least.runtime());
        let step = f32::reinterpret((exponent - mantissa_bits) << 23u32);
        let inverse = f32::reinterpret((254u32 + mantissa_bits - exponent) << 23u32);
        (bounded * inverse).round() * step
    }
}

/// Float formats have no zero point, and −0 stays −0.
#[cube]
fn without_zero_point(number: f32, zero_point: f32, #[comptime] floats: Option<Floats>) -> f32 {
    if comptime!(floats.is_none()) {
        number - zero_point
    } else {
        number
    }
}

#[cube(launch)]
fn quantize_dequantize<B: Int>(
    x: &Tensor<f32>,
    inverse: &Tensor<f32>,
    scale: &Tensor<f32>,
    zero_point: &Tensor<f32>,
    y: &mut Tensor<f32>,
    clipped: &mut Tensor<B>,
    runs: Sequence<FastDivmod<usize>>,
    strides: Sequence<usize>,
    min: f32,
    max: f32,
    limit: f32,
    #[comptime] floats: Option<Floats>,
    #[comptime] limited: bool,
    #[comptime] masked: bool,
    #[define(B)] _truth: ElemType,
) {
    if ABSOLUTE_POS >= x.len() {
        terminate!();
    }
    let group = group_of(ABSOLUTE_POS, &runs, &strides);
    let (scale, zero_point) = (scale[group], zero_point[group]);
    let number = nearest(x[ABSOLUTE_POS] * inverse[group], zero_point, max, floats);
    let clamped = clamp_number(number, min, max);
    let value = without_zero_point(clamped, zero_point, floats) * scale;
    let value = if comptime!(limited) {
        limit_finite(value, limit)
    } else {
        value
    };
    y[ABSOLUTE_POS] = value;
    if comptime!(masked) {
        let inside = number >= min && number <= max;
        clipped[ABSOLUTE_POS] = select(inside, B::from_int(0), B::from_int(1));
    }
}

#[cube(launch)]
fn learned_gradients(
    x: &Tensor<f32>,
    dy: &Tensor<f32>,
    inverse: &Tensor<f32>,
    scale: &Tensor<f32>,
    zero_point: &Tensor<f32>,
    dx: &mut Tensor<f32>,
    of_scale: &mut Tensor<f32>,
    of_zero: &mut Tensor<f32>,
    runs: Sequence<FastDivmod<usize>>,
    strides: Sequence<usize>,
    min: f32,
    max: f32,
    #[comptime] floats: Option<Floats>,
    #[comptime] after_rounding: bool,
    #[comptime] with_zero: bool,
) {
    if ABSOLUTE_POS >= x.len() {
        terminate!();
    }
    let group = group_of(ABSOLUTE_POS, &runs, &strides);
    let (scale, zero_point) = (scale[group], zero_point[group]);
    let number = nearest(x[ABSOLUTE_POS] * inverse[group], zero_point, max, floats);
    let exact = x[ABSOLUTE_POS] / scale;
    let inside = if comptime!(after_rounding) {
        number >= min && number <= max
    } else {
        exact + zero_point > min && exact + zero_point < max
    };
    let clamped = clamp_number(number, min, max);
    let number = without_zero_point(clamped, zero_point, floats);
    let dy = dy[ABSOLUTE_POS];
    dx[ABSOLUTE_POS] = select(inside, dy, 0.0f32);
    of_scale[ABSOLUTE_POS] = dy * (number - select(inside, exact, 0.0f32));
    if comptime!(with_zero) {
        of_zero[ABSOLUTE_POS] = select(inside, 0.0f32, -(dy * scale));
    }
}
