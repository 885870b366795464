//! Operations on ints or bools alone.

use burn::backend::ops::{BoolTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{FloatDType, IntDType};

use super::{bools, check, indices, ints};

type Binary = fn(DispatchTensor, DispatchTensor) -> DispatchTensor;

#[test]
fn bits_of_ints() {
    let binary: [(&str, Binary); 5] = [
        ("bitwise_and", Dispatch::bitwise_and),
        ("bitwise_or", Dispatch::bitwise_or),
        ("bitwise_xor", Dispatch::bitwise_xor),
        ("bitwise_left_shift", Dispatch::bitwise_left_shift),
        ("bitwise_right_shift", Dispatch::bitwise_right_shift),
    ];
    for (name, function) in binary {
        let inputs = [indices([4, 3], 11), indices([4, 3], 7)];
        check(&format!("int {name}"), inputs, |[x, y]| function(x, y));
    }
    let one = || [ints([4, 3])];
    let mask = || 16_777_217i64.into();
    check!("int bitwise_and_scalar", one() => |[x]| Dispatch::bitwise_and_scalar(x, mask()));
    check!("int bitwise_or_scalar", one() => |[x]| Dispatch::bitwise_or_scalar(x, mask()));
    check!("int bitwise_xor_scalar", one() => |[x]| Dispatch::bitwise_xor_scalar(x, mask()));
    check!("int bitwise_not", one() => |[x]| Dispatch::bitwise_not(x));
    check!("int bitwise_left_shift_scalar", [indices([4, 3], 11)] => |[x]| {
        Dispatch::bitwise_left_shift_scalar(x, 2i64.into())
    });
    check!("int bitwise_right_shift_scalar", [indices([4, 3], 11)] => |[x]| {
        Dispatch::bitwise_right_shift_scalar(x, 2i64.into())
    });
}

#[test]
fn products_of_ints() {
    let inputs = [indices([4, 3], 11), indices([3, 2], 7)];
    check!("int matmul", inputs => |[x, y]| Dispatch::int_matmul(x, y));
}

#[test]
fn ints_and_bools_become_other_kinds() {
    for dtype in [FloatDType::F32, FloatDType::F16] {
        check!("int into_float", [indices([4, 3], 11)] => |[x]| Dispatch::int_into_float(x, dtype));
        check!("bool into_float", [bools([4, 3])] => |[x]| Dispatch::bool_into_float(x, dtype));
    }
    for dtype in [IntDType::I32, IntDType::I64] {
        check!("bool into_int", [bools([4, 3])] => |[x]| Dispatch::bool_into_int(x, dtype));
    }
}

#[test]
fn logic_of_bools() {
    let pair = || [bools([4, 3]), bools([3, 4])];
    let other = |y| Dispatch::bool_swap_dims(y, 0, 1);
    check!("bool and", pair() => |[x, y]| Dispatch::bool_and(x, other(y)));
    check!("bool or", pair() => |[x, y]| Dispatch::bool_or(x, other(y)));
    check!("bool xor", pair() => |[x, y]| Dispatch::bool_xor(x, other(y)));
    check!("bool not", pair() => |[x, _]| Dispatch::bool_not(x));
}
