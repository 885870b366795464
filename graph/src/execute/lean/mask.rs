//! The gradient of a product with a mask.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, unary};
use burn::backend::tensor::FloatTensor;

use crate::execute::HalfStorage;

/// The gradient of a product with a mask: the mask in half, and which half.
#[derive(Debug)]
pub(super) struct Mask;

impl<B: HalfStorage> Backward<B, 1> for Mask {
    type State = (FloatTensor<B>, bool);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (mask, bfloat) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::float_mul(grad, B::widen(mask, bfloat))
        });
    }
}
