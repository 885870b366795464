//! A layer normalization that is computed again, and its gradient.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, TensorMetadata};
use burn::tensor::Shape;

use crate::execute::HalfStorage;

/// A tensor that the backward pass reads.
#[derive(Debug, Clone)]
pub(super) enum Read<T> {
    /// Of a node that has a gradient.
    Node(NodeId),
    /// Of none.
    Value(T),
}

impl<T: Clone + Send + 'static> Read<T> {
    pub(super) fn of<B, C>(tensor: &FloatTensor<Autodiff<B, C>>) -> Self
    where
        B: HalfStorage<FloatTensorPrimitive = T>,
        C: CheckpointStrategy,
    {
        match tensor.is_tracked() {
            true => Self::Node(tensor.id()),
            false => Self::Value(tensor.primitive().clone()),
        }
    }

    /// For a computation that is repeated.
    fn again(&self, states: &mut BackwardStates) -> T {
        match self {
            Self::Node(id) => states.get_state::<T>(id),
            Self::Value(value) => value.clone(),
        }
    }

    fn retrieve(self, checkpointer: &mut Checkpointer) -> T {
        match self {
            Self::Node(id) => checkpointer.retrieve_node_output(id),
            Self::Value(value) => value,
        }
    }
}

/// A layer normalization, to be computed again.
#[derive(Debug, Clone)]
pub(super) struct NormAgain<B: HalfStorage> {
    pub(super) x: Read<FloatTensor<B>>,
    pub(super) gamma: Read<FloatTensor<B>>,
    pub(super) beta: Read<FloatTensor<B>>,
    pub(super) epsilon: f64,
}

impl<B: HalfStorage> RetroForward for NormAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let [x, gamma, beta] = [&self.x, &self.gamma, &self.beta].map(|read| read.again(states));
        let y = B::layer_norm(x, gamma, Some(beta), self.epsilon);
        states.save(out_node, y);
    }
}

/// With `x̂ = (x − μ)/σ`, `σ² = var(x) + ε` and `h = g ∘ γ`, over the last dimension:
/// `∂L/∂x = (h − mean(h) − x̂ ∘ mean(h ∘ x̂))/σ`; summed over all others `∂L/∂γ = Σ g ∘ x̂` and
/// `∂L/∂β = Σ g` (Ba, Kiros, Hinton, *Layer Normalization*, 2016).
#[derive(Debug)]
pub(super) struct LayerNorm;

impl<B: HalfStorage> Backward<B, 3> for LayerNorm {
    type State = NormAgain<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [to_x, to_gamma, to_beta] = ops.parents;
        let norm = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        // Read in any case: what is kept is counted.
        let x = norm.x.retrieve(checkpointer);
        let gamma = norm.gamma.retrieve(checkpointer);
        let shape = x.shape();
        let last = shape.num_dims() - 1;
        let width = shape[last];
        let mean = |x| B::float_mean_dim(x, last);
        let over_rows = |x: FloatTensor<B>| {
            let rows = shape.num_elements() / width.max(1);
            let sum = B::float_sum_dim(B::float_reshape(x, Shape::new([rows, width])), 0);
            B::float_reshape(sum, Shape::new([width]))
        };
        if let Some(beta) = to_beta {
            grads.register::<B>(beta.id, over_rows(grad.clone()));
        }
        if to_x.is_none() && to_gamma.is_none() {
            return;
        }
        let centered = B::float_sub(x.clone(), mean(x));
        let variance = mean(B::float_mul(centered.clone(), centered.clone()));
        let deviation = B::float_sqrt(B::float_add_scalar(variance, norm.epsilon.into()));
        let normalized = B::float_div(centered, deviation.clone());
        if let Some(to) = to_gamma {
            let weighted = B::float_mul(grad.clone(), normalized.clone());
            grads.register::<B>(to.id, over_rows(weighted));
        }
        if let Some(to) = to_x {
            let mut as_row = vec![1; last + 1];
            as_row[last] = width;
            let grad = B::float_mul(grad, B::float_reshape(gamma, Shape::from(as_row)));
            let along = mean(B::float_mul(grad.clone(), normalized.clone()));
            let rest = B::float_sub(grad.clone(), mean(grad));
            let rest = B::float_sub(rest, B::float_mul(normalized, along));
            grads.register::<B>(to.id, B::float_div(rest, deviation));
        }
    }
}
