//! Operations on floats alone, and activations.

use burn::backend::ops::{
    ActivationOps, FloatTensorOps, GridSampleOptions, GridSamplePaddingMode, InterpolateMode,
};
use burn::backend::{Dispatch, DispatchTensor, Shape};
use burn::tensor::IntDType;

use super::{check, floats, floats_in};

type Function = fn(DispatchTensor) -> DispatchTensor;

#[test]
fn functions_of_any_float() {
    let functions: [(&str, Function); 15] = [
        ("exp", Dispatch::float_exp),
        ("erf", Dispatch::float_erf),
        ("recip", Dispatch::float_recip),
        ("sin", Dispatch::float_sin),
        ("cos", Dispatch::float_cos),
        ("tan", Dispatch::float_tan),
        ("sinh", Dispatch::float_sinh),
        ("cosh", Dispatch::float_cosh),
        ("tanh", Dispatch::float_tanh),
        ("asinh", Dispatch::float_asinh),
        ("atan", Dispatch::float_atan),
        ("round", Dispatch::float_round),
        ("floor", Dispatch::float_floor),
        ("ceil", Dispatch::float_ceil),
        ("trunc", Dispatch::float_trunc),
    ];
    for (name, function) in functions {
        check(&format!("float {name}"), [floats([4, 3])], |[x]| {
            function(x)
        });
    }
}

#[test]
fn functions_of_some_floats() {
    let positive: [(&str, Function); 3] = [
        ("log", Dispatch::float_log),
        ("log1p", Dispatch::float_log1p),
        ("sqrt", Dispatch::float_sqrt),
    ];
    for (name, function) in positive {
        check(
            &format!("float {name}"),
            [floats_in([4, 3], 0.1, 3.0)],
            |[x]| function(x),
        );
    }
    let below_one: [(&str, Function); 3] = [
        ("asin", Dispatch::float_asin),
        ("acos", Dispatch::float_acos),
        ("atanh", Dispatch::float_atanh),
    ];
    for (name, function) in below_one {
        check(
            &format!("float {name}"),
            [floats_in([4, 3], -0.9, 0.9)],
            |[x]| function(x),
        );
    }
    check!("float acosh", [floats_in([4, 3], 1.1, 3.0)] => |[x]| Dispatch::float_acosh(x));
}

#[test]
fn functions_of_two_floats() {
    let pair = || [floats_in([4, 3], 0.1, 3.0), floats([4, 3])];
    check!("float powf", pair() => |[x, y]| Dispatch::float_powf(x, y));
    check!("float atan2", pair() => |[x, y]| Dispatch::float_atan2(x, y));
    check!("float hypot", pair() => |[x, y]| Dispatch::float_hypot(x, y));
    check!("float powf_scalar", pair() => |[x, _]| Dispatch::float_powf_scalar(x, 1.7f64.into()));
    check!("float cross", pair() => |[x, y]| Dispatch::float_cross(x, y, 1));
    check!("float matmul", [floats([2, 4, 3]), floats([1, 3, 5])] => |[x, y]| {
        Dispatch::float_matmul(x, y)
    });
}

#[test]
fn floats_become_ints() {
    for dtype in [IntDType::I32, IntDType::I64] {
        check!("float into_int", [floats([4, 3])] => |[x]| Dispatch::float_into_int(x, dtype));
    }
}

#[test]
fn grids_are_sampled_with_their_options() {
    let modes = [InterpolateMode::Bilinear, InterpolateMode::Nearest];
    for (mode, align) in modes.into_iter().zip([true, false]) {
        let options = GridSampleOptions::new(mode)
            .with_padding_mode(GridSamplePaddingMode::Border)
            .with_align_corners(align);
        let inputs = [floats([2, 3, 4, 5]), floats_in([2, 3, 2, 2], -1.2, 1.2)];
        check!("float grid_sample_2d", inputs => |[x, grid]| {
            Dispatch::float_grid_sample_2d(x, grid, options.clone())
        });
    }
}

#[test]
fn activations() {
    let functions: [(&str, Function); 4] = [
        ("relu", Dispatch::relu),
        ("gelu", Dispatch::gelu),
        ("sigmoid", Dispatch::sigmoid),
        ("log_sigmoid", Dispatch::log_sigmoid),
    ];
    let one = || [floats([4, 3])];
    for (name, function) in functions {
        check(&format!("activation {name}"), one(), |[x]| function(x));
    }
    type Along = fn(DispatchTensor, usize) -> DispatchTensor;
    let along: [(&str, Along); 3] = [
        ("softmax", Dispatch::softmax),
        ("log_softmax", Dispatch::log_softmax),
        ("softmin", Dispatch::softmin),
    ];
    for (name, function) in along {
        for dim in [0, 1] {
            check(&format!("activation {name}"), one(), |[x]| function(x, dim));
        }
    }
    check!("activation leaky_relu", one() => |[x]| Dispatch::leaky_relu(x, 0.3f64.into()));
    check!("activation prelu", [floats([4, 3]), floats([3])] => |[x, alpha]| {
        let alpha = Dispatch::float_reshape(alpha, Shape::new([1, 3]));
        Dispatch::prelu(x, alpha)
    });
    check!("activation hard_sigmoid", one() => |[x]| {
        Dispatch::hard_sigmoid(x, 0.3f64.into(), 0.7f64.into())
    });
}
