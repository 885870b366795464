//! Operations that keep less for the backward pass than Burn's own.
//!
//! - The gradient of a softmax is computed from its results. Where products in half precision read
//!   them, the rounded ones are kept for those products anyway, and nothing else is kept.
//! - Burn composes a layer normalization of nine operations, most of which keep a tensor as large as
//!   the input. Here it keeps its input alone, and its result can be computed again.
//! - The mask of a dropout is zeros and ones: half precision has them.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::ir::{
    ActivationOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{FloatDType, Shape};

use super::storage::HalfStorage;
use super::tensors::Alive;
use crate::Node;
use crate::interpret::Operands;

impl Alive<'_> {
    /// Computes the current operation here, if that keeps less for the backward pass.
    pub(super) fn compute_lean(&mut self, node: Node<'_>) -> bool {
        if !self.is_lean() {
            return false;
        }
        let bfloat = self.half() == FloatDType::BF16;
        match node.operation() {
            OperationIr::Activation(ActivationOperationIr::Softmax(softmax)) => {
                if self.half_result().is_none() {
                    return false;
                }
                let x = self.float(&softmax.input);
                let y = Dispatch::softmax_in_half(x, softmax.axis, bfloat);
                self.set(&softmax.out, y);
            }
            OperationIr::Module(ModuleOperationIr::LayerNorm(norm)) => {
                let x = self.float(&norm.input);
                let gamma = self.float(&norm.gamma);
                let beta = match &norm.beta {
                    Some(beta) => self.float(beta),
                    None => {
                        let shape = norm.gamma.shape.clone();
                        Dispatch::float_zeros(shape, &self.device(), FloatDType::F32)
                    }
                };
                let y = Dispatch::lean_layer_norm(x, gamma, beta, norm.epsilon.elem());
                self.set(&norm.out, y);
                self.is_computed_again(&norm.out);
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Mul(product)) => {
                let Some((x, mask)) = node.masked() else {
                    return false;
                };
                if !self.is_f32(x) || !self.is_f32(mask) {
                    return false;
                }
                let (x, mask) = (self.float(x), self.float(mask));
                self.set(&product.out, Dispatch::mask(x, mask, bfloat));
            }
            _ => return false,
        }
        true
    }
}

/// Operations on F32 tensors that keep less for the backward pass than Burn's own.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda", feature = "cpu")),
    Capture,
    Autodiff
)]
pub(crate) trait LeanBackward: HalfStorage {
    /// A softmax along `dim`, computed in F32, in a half dtype. Its gradient is computed from the
    /// half numbers, divided by their sum.
    fn softmax_in_half(x: FloatTensor<Self>, dim: usize, bfloat: bool) -> FloatTensor<Self> {
        Self::narrow(Self::softmax(x, dim), bfloat)
    }

    /// A layer normalization over the last dimension, computed again where the backward pass reads
    /// its result.
    fn lean_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        Self::layer_norm(x, gamma, Some(beta), epsilon)
    }

    /// `x` times a mask of zeros and ones, to which no gradient goes.
    fn mask(x: FloatTensor<Self>, mask: FloatTensor<Self>, _bfloat: bool) -> FloatTensor<Self> {
        Self::float_mul(x, mask)
    }
}

#[cfg(feature = "flex")]
impl LeanBackward for burn::backend::Flex {}
#[cfg(feature = "ndarray")]
impl LeanBackward for burn::backend::NdArray {}
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "cpu"))]
impl LeanBackward for burn::backend::Cube {}
impl LeanBackward for burn::backend::Capture {}

impl<B: LeanBackward, C: CheckpointStrategy> LeanBackward for Autodiff<B, C> {
    fn softmax_in_half(x: FloatTensor<Self>, dim: usize, bfloat: bool) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let y = B::softmax_in_half(x, dim, bfloat);
        match Softmax.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((y.clone(), dim, bfloat), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn lean_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let again = NormAgain::<B> {
            x: Read::of::<B, C>(&x),
            gamma: Read::of::<B, C>(&gamma),
            beta: Read::of::<B, C>(&beta),
            epsilon,
        };
        let tracked = [&x, &gamma, &beta]
            .into_iter()
            .filter(|one| one.is_tracked());
        let prepared = LayerNorm
            .prepare::<BalancedCheckpointing>([x.node(), gamma.node(), beta.node()])
            .memory_bound()
            .retro_forward(again.clone())
            .parents(tracked)
            .stateful();
        let y = |x: FloatTensor<Self>| {
            let (gamma, beta) = (gamma.primitive().clone(), beta.primitive().clone());
            B::layer_norm(x.into_primitive(), gamma, Some(beta), epsilon)
        };
        match prepared {
            OpsKind::Tracked(mut prep) => {
                for kept in [&x, &gamma].into_iter().filter(|one| one.is_tracked()) {
                    prep.checkpoint(kept);
                }
                prep.finish(again, y(x))
            }
            OpsKind::UnTracked(prep) => prep.finish(y(x)),
        }
    }

    fn mask(x: FloatTensor<Self>, mask: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let mask = mask.into_primitive();
        match Mask.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let kept = B::narrow(mask.clone(), bfloat);
                prep.finish((kept, bfloat), B::float_mul(x, mask))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::float_mul(x, mask)),
        }
    }
}

/// `∂L/∂x = y ∘ (g − ⟨g, y⟩)` for the results `y` and their gradient `g`.
///
/// Rounded results do not sum to one. Divided by their sum they do, so that a gradient that is the
/// same for all of them has no effect, as with exact ones.
#[derive(Debug)]
struct Softmax;

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

/// The gradient of a product with a mask: the mask in half, and which half.
#[derive(Debug)]
struct Mask;

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

/// A tensor that the backward pass reads.
#[derive(Debug, Clone)]
enum Read<T> {
    /// Of a node that has a gradient.
    Node(NodeId),
    /// Of none.
    Value(T),
}

impl<T: Clone + Send + 'static> Read<T> {
    fn of<B, C>(tensor: &FloatTensor<Autodiff<B, C>>) -> Self
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
struct NormAgain<B: HalfStorage> {
    x: Read<FloatTensor<B>>,
    gamma: Read<FloatTensor<B>>,
    beta: Read<FloatTensor<B>>,
    epsilon: f64,
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
struct LayerNorm;

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
