//! Operations of integers and bools alone.

use burn::backend::ir::{BoolOperationIr, IntOperationIr, NumericOperationIr, ScalarIr};
use burn::tensor::DType;
use burn_lean_graph::Node;

use super::Written;
use crate::DeployError;
use crate::export::Writer;

impl Writer<'_> {
    /// Arithmetic; of 8 and 16 bits it stays within them, also where it is computed in 32.
    pub(super) fn numeric_int(&mut self, op: &NumericOperationIr, node: Node<'_>) -> Written {
        use NumericOperationIr::*;
        self.numeric(op, node)?;
        let may_leave = matches!(
            op,
            Add(_)
                | AddScalar(_)
                | Sub(_)
                | SubScalar(_)
                | Mul(_)
                | MulScalar(_)
                | Div(_)
                | DivScalar(_)
                | Powi(_)
                | PowiScalar(_)
                | Abs(_)
                | Neg(_)
                | Sum(_)
                | SumDim(_)
                | SumDims(_)
                | Prod(_)
                | ProdDim(_)
                | CumSum(_)
        );
        for out in node.operation().outputs().filter(|_| may_leave) {
            let name = self.operand(out)?;
            let name = self.wrapped(name, out.dtype)?;
            self.set(out, name);
        }
        Ok(())
    }

    /// What was cast to 8 or 16 bits, where these are computed in 32: of a float the nearest number that they have,
    /// of an integer the lowest bits.
    pub(super) fn narrowed(
        &mut self,
        x: String,
        from: DType,
        to: DType,
    ) -> Result<String, DeployError> {
        let Some((low, high)) = range(to).filter(|_| self.limits.wide_integers) else {
            return Ok(x);
        };
        if from.is_float() {
            let low = self.scalar(ScalarIr::Int(low), to)?;
            let high = self.scalar(ScalarIr::Int(high), to)?;
            return Ok(self.emit("Clip", vec![x, low, high], "Clip", vec![]));
        }
        let holds = |(least, most): (i64, i64)| low <= least && most <= high;
        match from.is_bool() || range(from).is_some_and(holds) {
            true => Ok(x),
            false => self.wrapped(x, to),
        }
    }

    /// The lowest bits of an integer of 8 or 16, where it is computed in 32.
    fn wrapped(&mut self, x: String, dtype: DType) -> Result<String, DeployError> {
        let Some((low, high)) = range(dtype).filter(|_| self.limits.wide_integers) else {
            return Ok(x);
        };
        // rten has neither operators of bits nor integers of 16.
        let count = self.scalar(ScalarIr::Int(high - low + 1), dtype)?;
        let bits = self.emit("Mod", vec![x, count.clone()], "Mod", vec![]);
        if low == 0 {
            return Ok(bits);
        }
        let half = self.scalar(ScalarIr::Int(-low), dtype)?;
        let moved = self.emit("Add", vec![bits, half.clone()], "Add", vec![]);
        let moved = self.emit("Mod", vec![moved, count], "Mod", vec![]);
        Ok(self.emit("Sub", vec![moved, half], "Sub", vec![]))
    }

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

/// The least and the largest integer of 8 or 16 bits.
fn range(dtype: DType) -> Option<(i64, i64)> {
    Some(match dtype {
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        _ => return None,
    })
}
