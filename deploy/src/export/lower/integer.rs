//! Operations of integers and bools alone.

use burn::backend::ir::{BoolOperationIr, IntOperationIr};

use super::Written;
use crate::export::Writer;

impl Writer<'_> {
    pub(super) fn int(&mut self, op: &IntOperationIr) -> Written {
        use IntOperationIr::*;
        match op {
            IntoFloat(o) => self.cast(&o.input, &o.out),
            Matmul(o) => self.binary("MatMul", &o.lhs, &o.rhs, &o.out),
            BitwiseAnd(o) => self.binary("BitwiseAnd", &o.lhs, &o.rhs, &o.out),
            BitwiseAndScalar(o) => self.with_scalar("BitwiseAnd", &o.lhs, o.rhs, &o.out),
            BitwiseOr(o) => self.binary("BitwiseOr", &o.lhs, &o.rhs, &o.out),
            BitwiseOrScalar(o) => self.with_scalar("BitwiseOr", &o.lhs, o.rhs, &o.out),
            BitwiseXor(o) => self.binary("BitwiseXor", &o.lhs, &o.rhs, &o.out),
            BitwiseXorScalar(o) => self.with_scalar("BitwiseXor", &o.lhs, o.rhs, &o.out),
            BitwiseNot(o) => self.unary("BitwiseNot", &o.input, &o.out),
            BitwiseLeftShift(_)
            | BitwiseLeftShiftScalar(_)
            | BitwiseRightShift(_)
            | BitwiseRightShiftScalar(_) => Err("ONNX shifts unsigned integers alone".into()),
        }
    }

    pub(super) fn boolean(&mut self, op: &BoolOperationIr) -> Written {
        use BoolOperationIr::*;
        match op {
            IntoFloat(o) | IntoInt(o) => self.cast(&o.input, &o.out),
            Not(o) => self.unary("Not", &o.input, &o.out),
            And(o) => self.binary("And", &o.lhs, &o.rhs, &o.out),
            Or(o) => self.binary("Or", &o.lhs, &o.rhs, &o.out),
            Xor(o) => self.binary("Xor", &o.lhs, &o.rhs, &o.out),
        }
    }
}
