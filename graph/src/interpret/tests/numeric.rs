//! Arithmetic, comparisons, reductions and orders of floats and ints.

use burn::backend::ops::{FloatTensorOps, IntTensorOps, PadMode};
use burn::backend::{Dispatch, DispatchTensor, Shape, TensorMetadata};
use burn::tensor::{BoolDType, Device, FloatDType, IntDType, TensorData};

use super::{check, floats, floats_in, indices, ints};

fn native() -> BoolDType {
    Device::flex().settings().bool_dtype
}

#[test]
fn arithmetic_of_floats() {
    let pair = || [floats([4, 3]), floats_in([1, 3], 0.3, 1.7)];
    check!("float add", pair() => |[x, y]| Dispatch::float_add(x, y));
    check!("float sub", pair() => |[x, y]| Dispatch::float_sub(x, y));
    check!("float mul", pair() => |[x, y]| Dispatch::float_mul(x, y));
    check!("float div", pair() => |[x, y]| Dispatch::float_div(x, y));
    check!("float remainder", pair() => |[x, y]| Dispatch::float_remainder(x, y));
    let one = || [floats([4, 3])];
    check!("float add_scalar", one() => |[x]| Dispatch::float_add_scalar(x, 0.3f64.into()));
    check!("float add_scalar", one() => |[x]| Dispatch::float_add_scalar(x, 16_777_217i64.into()));
    check!("float sub_scalar", one() => |[x]| Dispatch::float_sub_scalar(x, 0.3f64.into()));
    check!("float mul_scalar", one() => |[x]| Dispatch::float_mul_scalar(x, 0.3f64.into()));
    check!("float div_scalar", one() => |[x]| Dispatch::float_div_scalar(x, 0.3f64.into()));
    check!("float remainder_scalar", one() => |[x]| {
        Dispatch::float_remainder_scalar(x, 0.3f64.into())
    });
    check!("float powi_scalar", one() => |[x]| Dispatch::float_powi_scalar(x, 3i64.into()));
    check!("float neg", one() => |[x]| Dispatch::float_neg(x));
    check!("float abs", one() => |[x]| Dispatch::float_abs(x));
    check!("float sign", one() => |[x]| Dispatch::float_sign(x));
    check!("float clamp", one() => |[x]| Dispatch::float_clamp(x, (-0.3f64).into(), 0.7f64.into()));
    check!("float clamp_min", one() => |[x]| Dispatch::float_clamp_min(x, 0.3f64.into()));
    check!("float clamp_max", one() => |[x]| Dispatch::float_clamp_max(x, 0.3f64.into()));
}

#[test]
fn arithmetic_of_ints() {
    let add = |x| Dispatch::int_add_scalar(x, 1i64.into());
    let pair = || [ints([4, 3]), indices([4, 3], 7)];
    check!("int add", pair() => |[x, y]| Dispatch::int_add(x, y));
    check!("int sub", pair() => |[x, y]| Dispatch::int_sub(x, y));
    check!("int mul", pair() => |[x, y]| Dispatch::int_mul(x, y));
    check!("int div", pair() => |[x, y]| Dispatch::int_div(x, add(y)));
    check!("int remainder", pair() => |[x, y]| Dispatch::int_remainder(x, add(y)));
    let small = || [indices([4, 3], 5), indices([4, 3], 4)];
    check!("int powi", small() => |[x, y]| Dispatch::int_powi(x, y));
    check!("int powi_scalar", [indices([4, 3], 5)] => |[x]| {
        Dispatch::int_powi_scalar(x, 3i64.into())
    });
    let one = || [ints([4, 3])];
    // No float of 32 bits is this number.
    check!("int add_scalar", one() => |[x]| Dispatch::int_add_scalar(x, 16_777_217i64.into()));
    check!("int sub_scalar", one() => |[x]| Dispatch::int_sub_scalar(x, 16_777_217i64.into()));
    check!("int mul_scalar", one() => |[x]| Dispatch::int_mul_scalar(x, 3i64.into()));
    check!("int div_scalar", one() => |[x]| Dispatch::int_div_scalar(x, 3i64.into()));
    check!("int remainder_scalar", one() => |[x]| Dispatch::int_remainder_scalar(x, 3i64.into()));
    check!("int neg", one() => |[x]| Dispatch::int_neg(x));
    check!("int abs", one() => |[x]| Dispatch::int_abs(x));
    check!("int sign", one() => |[x]| Dispatch::int_sign(x));
    check!("int clamp", one() => |[x]| {
        Dispatch::int_clamp(x, (-16_777_217i64).into(), 16_777_219i64.into())
    });
    check!("int clamp_min", one() => |[x]| Dispatch::int_clamp_min(x, 16_777_219i64.into()));
    check!("int clamp_max", one() => |[x]| Dispatch::int_clamp_max(x, 16_777_219i64.into()));
}

#[test]
fn comparisons_of_floats() {
    let pair = || [floats([4, 3]), floats([3])];
    check!("float greater", pair() => |[x, y]| Dispatch::float_greater(x, unsqueeze(y), native()));
    check!("float greater_equal", pair() => |[x, y]| {
        Dispatch::float_greater_equal(x, unsqueeze(y), native())
    });
    check!("float lower", pair() => |[x, y]| Dispatch::float_lower(x, unsqueeze(y), native()));
    check!("float lower_equal", pair() => |[x, y]| {
        Dispatch::float_lower_equal(x, unsqueeze(y), native())
    });
    let one = || [floats([4, 3])];
    // A value of the tensor, so that equality counts.
    let value = || (17.0f64 / 32.0 - 1.97).into();
    check!("float greater_elem", one() => |[x]| Dispatch::float_greater_elem(x, value(), native()));
    check!("float greater_equal_elem", one() => |[x]| {
        Dispatch::float_greater_equal_elem(x, value(), native())
    });
    check!("float lower_elem", one() => |[x]| Dispatch::float_lower_elem(x, value(), native()));
    check!("float lower_equal_elem", one() => |[x]| {
        Dispatch::float_lower_equal_elem(x, value(), native())
    });
}

fn unsqueeze(x: DispatchTensor) -> DispatchTensor {
    Dispatch::float_reshape(x, Shape::new([1, 3]))
}

#[test]
fn comparisons_of_ints() {
    let pair = || [indices([4, 3], 5), indices([1, 3], 4)];
    check!("int greater", pair() => |[x, y]| Dispatch::int_greater(x, y, native()));
    check!("int greater_equal", pair() => |[x, y]| Dispatch::int_greater_equal(x, y, native()));
    check!("int lower", pair() => |[x, y]| Dispatch::int_lower(x, y, native()));
    check!("int lower_equal", pair() => |[x, y]| Dispatch::int_lower_equal(x, y, native()));
    let one = || [TensorData::from([16_777_216i32, 16_777_217, 16_777_218])];
    let value = || 16_777_217i64.into();
    check!("int greater_elem", one() => |[x]| Dispatch::int_greater_elem(x, value(), native()));
    check!("int greater_equal_elem", one() => |[x]| {
        Dispatch::int_greater_equal_elem(x, value(), native())
    });
    check!("int lower_elem", one() => |[x]| Dispatch::int_lower_elem(x, value(), native()));
    check!("int lower_equal_elem", one() => |[x]| {
        Dispatch::int_lower_equal_elem(x, value(), native())
    });
}

#[test]
fn reductions_of_floats() {
    let one = || [floats([4, 3, 2])];
    check!("float sum", one() => |[x]| Dispatch::float_sum(x));
    check!("float sum_dim", one() => |[x]| Dispatch::float_sum_dim(x, 1));
    check!("float sum_dims", one() => |[x]| Dispatch::float_sum_dims(x, &[0, 2]));
    check!("float mean", one() => |[x]| Dispatch::float_mean(x));
    check!("float mean_dim", one() => |[x]| Dispatch::float_mean_dim(x, 1));
    check!("float prod", one() => |[x]| Dispatch::float_prod(x));
    check!("float prod_dim", one() => |[x]| Dispatch::float_prod_dim(x, 1));
    check!("float max", one() => |[x]| Dispatch::float_max(x));
    check!("float max_dim", one() => |[x]| Dispatch::float_max_dim(x, 1));
    check!("float min", one() => |[x]| Dispatch::float_min(x));
    check!("float min_dim", one() => |[x]| Dispatch::float_min_dim(x, 1));
    check!("float max_abs", one() => |[x]| Dispatch::float_max_abs(x));
    check!("float max_abs_dim", one() => |[x]| Dispatch::float_max_abs_dim(x, 1));
    check!("float cumsum", one() => |[x]| Dispatch::float_cumsum(x, 1));
    check!("float cumprod", one() => |[x]| Dispatch::float_cumprod(x, 1));
    check!("float cummin", one() => |[x]| Dispatch::float_cummin(x, 1));
    check!("float cummax", one() => |[x]| Dispatch::float_cummax(x, 1));
}

#[test]
fn reductions_of_ints() {
    let one = || [indices([4, 3, 2], 7)];
    check!("int sum", one() => |[x]| Dispatch::int_sum(x));
    check!("int sum_dim", one() => |[x]| Dispatch::int_sum_dim(x, 1));
    check!("int mean", one() => |[x]| Dispatch::int_mean(x));
    check!("int mean_dim", one() => |[x]| Dispatch::int_mean_dim(x, 1));
    check!("int prod", [indices([3], 7)] => |[x]| Dispatch::int_prod(x));
    check!("int prod_dim", one() => |[x]| Dispatch::int_prod_dim(x, 1));
    check!("int max", one() => |[x]| Dispatch::int_max(x));
    check!("int max_dim", one() => |[x]| Dispatch::int_max_dim(x, 1));
    check!("int min", one() => |[x]| Dispatch::int_min(x));
    check!("int min_dim", one() => |[x]| Dispatch::int_min_dim(x, 1));
    check!("int max_abs", [ints([4, 3])] => |[x]| Dispatch::int_max_abs(x));
    check!("int max_abs_dim", [ints([4, 3])] => |[x]| Dispatch::int_max_abs_dim(x, 1));
    check!("int cumsum", [ints([4, 3])] => |[x]| Dispatch::int_cumsum(x, 1));
    check!("int cumprod", one() => |[x]| Dispatch::int_cumprod(x, 1));
    check!("int cummin", one() => |[x]| Dispatch::int_cummin(x, 1));
    check!("int cummax", one() => |[x]| Dispatch::int_cummax(x, 1));
}

#[test]
fn orders_of_floats() {
    let one = || [floats([4, 5])];
    for dtype in [IntDType::I32, IntDType::I64] {
        check!("float argmax", one() => |[x]| Dispatch::float_argmax(x, 1, dtype));
        check!("float argmin", one() => |[x]| Dispatch::float_argmin(x, 0, dtype));
        check!("float argtopk", one() => |[x]| Dispatch::float_argtopk(x, 1, 2, dtype));
        check!("float argsort", one() => |[x]| Dispatch::float_argsort(x, 0, true, dtype));
        check!("float max_dim_with_indices", one() => |[x]| {
            Dispatch::float_max_dim_with_indices(x, 1, dtype)
        });
        check!("float min_dim_with_indices", one() => |[x]| {
            Dispatch::float_min_dim_with_indices(x, 0, dtype)
        });
        check!("float topk_with_indices", one() => |[x]| {
            Dispatch::float_topk_with_indices(x, 1, 3, dtype)
        });
        check!("float sort_with_indices", one() => |[x]| {
            Dispatch::float_sort_with_indices(x, 1, true, dtype)
        });
    }
    check!("float topk", one() => |[x]| Dispatch::float_topk(x, 1, 2));
    check!("float sort", one() => |[x]| Dispatch::float_sort(x, 0, true));
    check!("float sort", one() => |[x]| Dispatch::float_sort(x, 1, false));
}

#[test]
fn orders_of_ints() {
    let one = || [ints([4, 5])];
    check!("int argmax", one() => |[x]| Dispatch::int_argmax(x, 1));
    check!("int argmin", one() => |[x]| Dispatch::int_argmin(x, 0));
    check!("int argtopk", one() => |[x]| Dispatch::int_argtopk(x, 1, 2));
    check!("int topk", one() => |[x]| Dispatch::int_topk(x, 1, 2));
    check!("int topk_with_indices", one() => |[x]| Dispatch::int_topk_with_indices(x, 1, 3));
    check!("int max_dim_with_indices", one() => |[x]| Dispatch::int_max_dim_with_indices(x, 1));
    check!("int min_dim_with_indices", one() => |[x]| Dispatch::int_min_dim_with_indices(x, 0));
    check!("int sort", one() => |[x]| Dispatch::int_sort(x, 0, true));
    check!("int sort_with_indices", one() => |[x]| Dispatch::int_sort_with_indices(x, 1, true));
    check!("int argsort", one() => |[x]| Dispatch::int_argsort(x, 0, true));
}

#[test]
fn padding_and_fills() {
    let padding = [(1, 0), (2, 1)];
    for mode in [PadMode::Constant(0.3), PadMode::Reflect, PadMode::Edge] {
        let floats = [floats([4, 3])];
        check!("float pad", floats => |[x]| Dispatch::float_pad(x, &padding, mode));
    }
    check!("int pad", [ints([4, 3])] => |[x]| {
        Dispatch::int_pad(x, &padding, PadMode::Constant(-2.0))
    });
    // A shape from an operand: a closure knows of no device.
    check!("float full", [floats([4, 3])] => |[x]| {
        let device = x.device();
        let shape = Shape::new([2, 2]);
        Dispatch::float_full(shape, 0.1f64.into(), &device, FloatDType::F64)
    });
    check!("int full", [floats([4, 3])] => |[x]| {
        let device = x.device();
        let shape = Shape::new([2, 2]);
        Dispatch::int_full(shape, 16_777_217i64.into(), &device, IntDType::I32)
    });
}
