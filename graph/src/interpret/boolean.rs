//! Operations on bools alone.

use burn::backend::Dispatch;
use burn::backend::ir::BoolOperationIr;
use burn::backend::ops::BoolTensorOps;

use super::{Done, Operands};

pub(super) fn run(op: &BoolOperationIr, operands: &mut impl Operands) -> Done {
    use BoolOperationIr::*;
    match op {
        IntoFloat(o) => {
            let dtype = o.out.dtype.into();
            unary!(operands, o, bool, |x| Dispatch::bool_into_float(x, dtype))
        }
        IntoInt(o) => unary!(operands, o, bool, |x| Dispatch::bool_into_int(
            x,
            o.out.dtype.into()
        )),
        Not(o) => unary!(operands, o, bool, Dispatch::bool_not),
        And(o) => binary!(operands, o, bool, Dispatch::bool_and),
        Or(o) => binary!(operands, o, bool, Dispatch::bool_or),
        Xor(o) => binary!(operands, o, bool, Dispatch::bool_xor),
    }
    Ok(())
}
