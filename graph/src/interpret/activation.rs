//! Activation functions, and the backward operations of a few.

use burn::backend::Dispatch;
use burn::backend::ir::ActivationOperationIr;
use burn::backend::ops::ActivationOps;

use super::{Done, Operands};

pub(super) fn run(op: &ActivationOperationIr, operands: &mut impl Operands) -> Done {
    use ActivationOperationIr::*;
    match op {
        Relu(o) => unary!(operands, o, float, Dispatch::relu),
        ReluBackward(o) => binary!(operands, o, float, Dispatch::relu_backward),
        LeakyRelu(o) => scalar!(operands, o, float, Dispatch::leaky_relu),
        PRelu(o) => binary!(operands, o, float, Dispatch::prelu),
        Gelu(o) => unary!(operands, o, float, Dispatch::gelu),
        GeluBackward(o) => binary!(operands, o, float, Dispatch::gelu_backward),
        Sigmoid(o) => unary!(operands, o, float, Dispatch::sigmoid),
        SigmoidBackward(o) => binary!(operands, o, float, Dispatch::sigmoid_backward),
        HardSigmoid(o) => {
            let sigmoid = |x| Dispatch::hard_sigmoid(x, o.alpha.into(), o.beta.into());
            apply!(operands, o, sigmoid, float tensor)
        }
        LogSigmoid(o) => unary!(operands, o, float, Dispatch::log_sigmoid),
        LogSigmoidBackward(o) => binary!(operands, o, float, Dispatch::log_sigmoid_backward),
        Softmax(o) => along!(operands, o, float, Dispatch::softmax),
        LogSoftmax(o) => along!(operands, o, float, Dispatch::log_softmax),
        Softmin(o) => along!(operands, o, float, Dispatch::softmin),
    }
    Ok(())
}
