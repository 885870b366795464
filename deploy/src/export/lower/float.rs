//! Functions of floats, and the matrix product.

use burn::backend::ir::{FloatOperationIr, TensorIr};
use burn_lean_graph::Node;

use super::Written;
use crate::export::Writer;

impl<'a> Writer<'a> {
    pub(super) fn float(&mut self, op: &'a FloatOperationIr, node: Node<'a>) -> Written {
        use FloatOperationIr::*;
        match op {
            Matmul(o) => self.linear(node, &o.lhs, &o.rhs, None, &o.out),
            Exp(o) => self.unary("Exp", &o.input, &o.out),
            Log(o) => self.unary("Log", &o.input, &o.out),
            Log1p(o) => {
                let inputs = vec![self.operand(&o.input)?, self.number(1.0, o.input.dtype)?];
                let sum = self.emit("Add", inputs, "Add", vec![]);
                self.put("Log", vec![sum], &o.out, vec![]);
                Ok(())
            }
            Erf(o) => self.unary("Erf", &o.input, &o.out),
            Powf(o) => self.binary("Pow", &o.lhs, &o.rhs, &o.out),
            PowfScalar(o) => self.with_scalar("Pow", &o.lhs, o.rhs, &o.out),
            Sqrt(o) => self.unary("Sqrt", &o.input, &o.out),
            Recip(o) => self.unary("Reciprocal", &o.input, &o.out),
            Cos(o) => self.unary("Cos", &o.input, &o.out),
            Cosh(o) => self.unary("Cosh", &o.input, &o.out),
            Sin(o) => self.unary("Sin", &o.input, &o.out),
            Sinh(o) => self.unary("Sinh", &o.input, &o.out),
            Tan(o) => self.unary("Tan", &o.input, &o.out),
            Tanh(o) => self.unary("Tanh", &o.input, &o.out),
            ArcCos(o) => self.unary("Acos", &o.input, &o.out),
            ArcCosh(o) => self.unary("Acosh", &o.input, &o.out),
            ArcSin(o) => self.unary("Asin", &o.input, &o.out),
            ArcSinh(o) => self.unary("Asinh", &o.input, &o.out),
            ArcTan(o) => self.unary("Atan", &o.input, &o.out),
            ArcTanh(o) => self.unary("Atanh", &o.input, &o.out),
            Round(o) => self.unary("Round", &o.input, &o.out),
            Floor(o) => self.unary("Floor", &o.input, &o.out),
            Ceil(o) => self.unary("Ceil", &o.input, &o.out),
            Trunc(o) => {
                let x = self.operand(&o.input)?;
                let size = self.emit("Abs", vec![x.clone()], "Abs", vec![]);
                let whole = self.emit("Floor", vec![size], "Floor", vec![]);
                let sign = self.emit("Sign", vec![x], "Sign", vec![]);
                self.put("Mul", vec![sign, whole], &o.out, vec![]);
                Ok(())
            }
            Hypot(o) => {
                let square = |writer: &mut Self, x: &TensorIr| -> Result<_, crate::DeployError> {
                    let x = writer.operand(x)?;
                    Ok(writer.emit("Mul", vec![x.clone(), x], "Mul", vec![]))
                };
                let squares = vec![square(self, &o.lhs)?, square(self, &o.rhs)?];
                let sum = self.emit("Add", squares, "Add", vec![]);
                self.put("Sqrt", vec![sum], &o.out, vec![]);
                Ok(())
            }
            IntoInt(o) => self.cast(&o.input, &o.out),
            IsNan(o) => self.unary("IsNaN", &o.input, &o.out),
            IsInf(o) => self.unary("IsInf", &o.input, &o.out),
            Random(_) => Err("its values are random".into()),
            Quantize(_) | Dequantize(_) => {
                Err("quantized tensors inside of a forward pass are not written".into())
            }
            ArcTan2(_) | Cross(_) | GridSample2d(_) => Err("this crate does not write it".into()),
        }
    }
}
