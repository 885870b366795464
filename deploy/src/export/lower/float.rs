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
            Log1p(o) => self.log1p(&o.input, &o.out),
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
            Hypot(o) => self.hypot(&o.lhs, &o.rhs, &o.out),
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

    /// With u = 1 + x: ln u where that is exact, else x · ln u / (u − 1), or x itself where u is 1.
    fn log1p(&mut self, x: &TensorIr, out: &TensorIr) -> Written {
        let one = self.number(1.0, x.dtype)?;
        let x = self.operand(x)?;
        let mut emit = |operator, inputs: [&String; 2]| -> String {
            self.emit(
                operator,
                inputs.map(String::clone).to_vec(),
                operator,
                vec![],
            )
        };
        let sum = emit("Add", [&x, &one]);
        let rounded = emit("Sub", [&sum, &one]);
        let is_exact = emit("Equal", [&rounded, &x]);
        let is_one = emit("Equal", [&sum, &one]);
        let ratio = emit("Div", [&x, &rounded]);
        let log = self.emit("Log", vec![sum], "Log", vec![]);
        let corrected = self.emit("Mul", vec![log.clone(), ratio], "Mul", vec![]);
        let inexact = self.emit("Where", vec![is_one, x, corrected], "Where", vec![]);
        self.put("Where", vec![is_exact, log, inexact], out, vec![]);
        Ok(())
    }

    /// The larger side times √(1 + (smaller / larger)²), which neither overflows nor underflows.
    fn hypot(&mut self, lhs: &TensorIr, rhs: &TensorIr, out: &TensorIr) -> Written {
        let one = self.number(1.0, lhs.dtype)?;
        let [lhs, rhs] = [self.operand(lhs)?, self.operand(rhs)?];
        let sides = [lhs, rhs].map(|side| self.emit("Abs", vec![side], "Abs", vec![]));
        let larger = self.emit("Max", sides.to_vec(), "Max", vec![]);
        let smaller = self.emit("Min", sides.to_vec(), "Min", vec![]);
        // Also where both are 0 or infinite, which have no ratio.
        let are_equal = vec![smaller.clone(), larger.clone()];
        let are_equal = self.emit("Equal", are_equal, "Equal", vec![]);
        let ratio = self.emit("Div", vec![smaller, larger.clone()], "Div", vec![]);
        let ratio = vec![are_equal, one.clone(), ratio];
        let ratio = self.emit("Where", ratio, "Where", vec![]);
        let square = self.emit("Mul", vec![ratio.clone(), ratio], "Mul", vec![]);
        let sum = self.emit("Add", vec![square, one], "Add", vec![]);
        let root = self.emit("Sqrt", vec![sum], "Sqrt", vec![]);
        self.put("Mul", vec![larger, root], out, vec![]);
        Ok(())
    }
}
