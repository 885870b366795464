//! Activation functions.

use burn::backend::ir::{ActivationOperationIr, DimOpIr};

use super::Written;
use crate::export::Writer;
use crate::onnx::Attribute;

impl Writer<'_> {
    pub(super) fn activation(&mut self, op: &ActivationOperationIr) -> Written {
        use ActivationOperationIr::*;
        match op {
            Relu(o) => self.unary("Relu", &o.input, &o.out),
            LeakyRelu(o) => {
                let x = self.operand(&o.lhs)?;
                let alpha = vec![Attribute::Float("alpha", o.rhs.elem())];
                self.put("LeakyRelu", vec![x], &o.out, alpha);
                Ok(())
            }
            PRelu(o) => self.binary("PRelu", &o.lhs, &o.rhs, &o.out),
            Gelu(o) => self.unary("Gelu", &o.input, &o.out),
            Sigmoid(o) => self.unary("Sigmoid", &o.input, &o.out),
            HardSigmoid(o) => {
                let x = self.operand(&o.tensor)?;
                let alpha = Attribute::Float("alpha", o.alpha.elem());
                let beta = Attribute::Float("beta", o.beta.elem());
                self.put("HardSigmoid", vec![x], &o.out, vec![alpha, beta]);
                Ok(())
            }
            LogSigmoid(o) => {
                // min(x, 0) - ln(1 + exp(-|x|)): rten's Softplus of a large number is infinite.
                let x = self.operand(&o.input)?;
                let zero = self.number(0.0, o.input.dtype)?;
                let below = self.emit("Min", vec![x.clone(), zero], "Min", vec![]);
                let size = self.emit("Abs", vec![x], "Abs", vec![]);
                let minus = self.emit("Neg", vec![size], "Neg", vec![]);
                let softplus = self.emit("Softplus", vec![minus], "Softplus", vec![]);
                self.put("Sub", vec![below, softplus], &o.out, vec![]);
                Ok(())
            }
            Softmax(o) => self.softmax("Softmax", o),
            LogSoftmax(o) => self.softmax("LogSoftmax", o),
            Softmin(o) => {
                let x = self.operand(&o.input)?;
                let minus = self.emit("Neg", vec![x], "Neg", vec![]);
                self.put("Softmax", vec![minus], &o.out, vec![axis(o)]);
                Ok(())
            }
            ReluBackward(_) | GeluBackward(_) | SigmoidBackward(_) | LogSigmoidBackward(_) => {
                Err("it belongs to a backward pass".into())
            }
        }
    }

    fn softmax(&mut self, operator: &'static str, o: &DimOpIr) -> Written {
        let x = self.operand(&o.input)?;
        self.put(operator, vec![x], &o.out, vec![axis(o)]);
        Ok(())
    }
}

/// The last axis as the engine's own operations know it, -1.
fn axis(o: &DimOpIr) -> Attribute {
    let is_last = o.axis + 1 == o.input.shape.num_dims();
    Attribute::Int("axis", if is_last { -1 } else { o.axis as i64 })
}
