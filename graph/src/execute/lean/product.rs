//! A matrix product with a tensor to which no gradient goes: a frozen weight, the input of a model.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, broadcast_shape, unary};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;

use crate::execute::HalfStorage;

/// The gradient of the other operand. Burn keeps the constant one as the product reads it, in F32.
#[derive(Debug)]
pub(super) struct Product;

/// The constant operand.
#[derive(Debug, Clone)]
pub(super) struct Constant<B: HalfStorage> {
    /// In F32, not rounded yet, where somebody keeps it so; in half otherwise.
    pub(super) value: FloatTensor<B>,
    pub(super) is_given: bool,
    pub(super) is_left: bool,
    pub(super) bfloat: bool,
    /// The shape of the operand that has a gradient.
    pub(super) shape: Shape,
}

impl<B: HalfStorage> Backward<B, 1> for Product {
    type State = Constant<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let constant = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let value = match constant.is_given {
                true => B::round(constant.value, constant.bfloat, false),
                false => B::widen(constant.value, constant.bfloat),
            };
            let value = B::float_transpose(value);
            let grad = match constant.is_left {
                true => B::float_matmul(value, grad),
                false => B::float_matmul(grad, value),
            };
            broadcast_shape::<B>(grad, &constant.shape)
        });
    }
}
