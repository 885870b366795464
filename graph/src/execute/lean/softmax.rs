//! The gradient of a softmax from its results.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, unary};
use burn::backend::tensor::FloatTensor;

use crate::execute::HalfStorage;

/// `∂L/∂x = y ∘ (g − ⟨g, y⟩)` for the results `y` and their gradient `g`.
///
/// Rounded results do not sum to one. Divided by their sum they do, so that a gradient that is the
/// same for all of them has no effect, as with exact ones.
#[derive(Debug)]
pub(super) struct Softmax;

impl<B: HalfStorage> Backward<B, 1> for Softmax {
    /// The results in half, the dimension of the sum, which half.
    type State = (FloatTensor<B>, usize, bool);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        /// Less than any sum but that of nothing but zeros.
        const SMALLEST: f32 = 1e-30;
        let (y, dim, bfloat) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let y = B::widen(y, bfloat);
            let sum = B::float_clamp_min(B::float_sum_dim(y.clone(), dim), SMALLEST.into());
            let y = B::float_div(y, sum);
            let weighted = B::float_mul(B::widen(grad, bfloat), y.clone());
            let mean = B::float_sum_dim(weighted.clone(), dim);
            B::float_sub(weighted, B::float_mul(y, mean))
        });
    }
}
