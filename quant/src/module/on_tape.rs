//! Tensors on an autodiff device.

use burn::tensor::kind::Autodiff;
use burn::tensor::{GradientCheckpointingStrategy, Tensor};

/// The tensor on an autodiff device of this strategy.
pub(crate) fn on_tape<const D: usize, K: Autodiff>(
    tensor: Tensor<D, K>,
    strategy: GradientCheckpointingStrategy,
) -> Tensor<D, K> {
    tensor
        .autodiff()
        .with_gradient_checkpointing_strategy(strategy)
}
