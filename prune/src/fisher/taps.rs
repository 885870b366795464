//! Gradients in the results of operations, from one backward pass.

use std::collections::HashMap;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{
    AutodiffBackend, Dispatch, DispatchAutodiffContext, DispatchTensor, TensorMetadata,
};
use burn::tensor::{Shape, Tensor};
use burn_lean_graph::{Node, Observed, Observer};

use crate::fisher::factors::Factors;
use crate::fisher::uses::Use;

/// Makes the gradients in the results of operations visible.
pub(crate) struct Taps {
    uses: HashMap<usize, Use>,
    /// Uses of this pass, the values of their operands, and leaves whose gradients are those in
    /// their results.
    taps: Vec<(Use, DispatchTensor, DispatchTensor)>,
}

impl Taps {
    pub(crate) fn of(uses: HashMap<usize, Use>) -> Self {
        Self {
            uses,
            taps: Vec::new(),
        }
    }

    /// One backward pass.
    pub(crate) fn factors(self, loss: Tensor<1>, groups: usize) -> Vec<Factors> {
        let mut grads = <Dispatch as AutodiffBackend>::backward(loss.into_dispatch());
        let taps = self.taps.into_iter();
        taps.filter_map(|(of_weight, operand, leaf)| {
            let delta = <Dispatch as AutodiffBackend>::grad_remove(&leaf, &mut grads)?;
            Some(of_weight.factors(operand, delta, groups))
        })
        .collect()
    }
}

impl Observer for Taps {
    fn before(&mut self, node: &Node<'_>, tensors: &Observed<'_, '_>) {
        if let Some(of_weight) = self.uses.get(&node.index())
            && let Some(operand) = tensors.get(of_weight.operand)
        {
            let operand = without_autodiff(operand);
            // The leaf takes its place after the operation.
            self.taps
                .push((of_weight.clone(), operand.clone(), operand));
        }
    }

    fn after(&mut self, node: &Node<'_>, tensors: &mut Observed<'_, '_>) {
        if self.uses.remove(&node.index()).is_some()
            && let Some((_, _, leaf)) = self.taps.last_mut()
            && let Some(result) = node.operation().outputs().next()
        {
            tensors.replace(result.id, |value| {
                let (tapped, of_value) = tap(value);
                *leaf = of_value;
                tapped
            });
        }
    }
}

/// The tensor with a leaf that has its gradient: a zero that is added, or the tensor itself where
/// nothing before it has a gradient.
fn tap(value: DispatchTensor) -> (DispatchTensor, DispatchTensor) {
    let leaf = |tensor| {
        let tensor = <Dispatch as AutodiffBackend>::from_inner(tensor);
        Dispatch::float_set_require_grad(tensor, true)
    };
    if value.autodiff == DispatchAutodiffContext::Disabled {
        let leaf = leaf(value);
        return (leaf.clone(), leaf);
    }
    let shape = value.shape();
    let one = Shape::from(vec![1; shape.num_dims()]);
    let device = value.device().inner();
    let zero = Dispatch::float_zeros(one, &device, value.dtype().into());
    let zero = leaf(Dispatch::float_expand(zero, shape));
    (Dispatch::float_add(value, zero.clone()), zero)
}

fn without_autodiff(tensor: DispatchTensor) -> DispatchTensor {
    match tensor.autodiff == DispatchAutodiffContext::Disabled || !tensor.dtype().is_float() {
        true => tensor,
        false => <Dispatch as AutodiffBackend>::inner(tensor),
    }
}
