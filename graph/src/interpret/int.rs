//! Operations on ints alone.

use burn::backend::Dispatch;
use burn::backend::ir::IntOperationIr;
use burn::backend::ops::IntTensorOps;

use super::{Done, Operands};

pub(super) fn run(op: &IntOperationIr, operands: &mut impl Operands) -> Done {
    use IntOperationIr::*;
    match op {
        IntoFloat(o) => {
            let dtype = o.out.dtype.into();
            unary!(operands, o, int, |x| Dispatch::int_into_float(x, dtype))
        }
        Matmul(o) => binary!(operands, o, int, Dispatch::int_matmul),
        BitwiseAnd(o) => binary!(operands, o, int, Dispatch::bitwise_and),
        BitwiseAndScalar(o) => scalar!(operands, o, int, Dispatch::bitwise_and_scalar),
        BitwiseOr(o) => binary!(operands, o, int, Dispatch::bitwise_or),
        BitwiseOrScalar(o) => scalar!(operands, o, int, Dispatch::bitwise_or_scalar),
        BitwiseXor(o) => binary!(operands, o, int, Dispatch::bitwise_xor),
        BitwiseXorScalar(o) => scalar!(operands, o, int, Dispatch::bitwise_xor_scalar),
        BitwiseNot(o) => unary!(operands, o, int, Dispatch::bitwise_not),
        BitwiseLeftShift(o) => binary!(operands, o, int, Dispatch::bitwise_left_shift),
        BitwiseLeftShiftScalar(o) => scalar!(operands, o, int, Dispatch::bitwise_left_shift_scalar),
        BitwiseRightShift(o) => binary!(operands, o, int, Dispatch::bitwise_right_shift),
        BitwiseRightShiftScalar(o) => {
            scalar!(operands, o, int, Dispatch::bitwise_right_shift_scalar)
        }
    }
    Ok(())
}
