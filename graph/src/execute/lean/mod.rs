//! Operations that keep less for the backward pass than Burn's own.
//!
//! - The gradient of a softmax is computed from its results. Where products in half precision read
//!   them, the rounded ones are kept for those products anyway, and nothing else is kept.
//! - Burn composes a layer normalization of nine operations, most of which keep a tensor as large as
//!   the input. Here it keeps its input alone, and its result can be computed again.
//! - The mask of a dropout is zeros and ones: half precision has them.
//! - What has no gradient cannot be widened or rounded again by Burn's autodiff. A product with a frozen
//!   weight or the input of a model keeps it in half, or as it is where somebody keeps it anyway.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

mod layer_norm;
mod mask;
mod product;
mod softmax;

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::ir::{FloatOperationIr, NumericOperationIr, OperationIr};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, FloatDType, Shape};

use super::storage::HalfStorage;
use super::tensors::Alive;
use crate::graph::composite::{Composite, CompositeKind};
use crate::interpret::Operands;
use crate::{Assignment, Graph, Node, Precision};
use layer_norm::{LayerNorm, NormAgain, Read};
use mask::Mask;
use product::{Constant, Product};
use softmax::Softmax;

impl Alive<'_> {
    /// Computes the current operation here, or leaves it to the end of the composite that it is part
    /// of, if that keeps less for the backward pass.
    pub(super) fn compute_lean(
        &mut self,
        graph: &Graph,
        node: Node<'_>,
        assignments: &[Assignment],
    ) -> bool {
        if !self.is_lean() {
            return false;
        }
        let is_f32 = |composite: &Composite| {
            let results = |index: &usize| assignments[*index].results == Some(DType::F32);
            composite.inner.iter().all(results)
        };
        if let Some((end, composite)) = graph.composites.around(node.index()) {
            let is_lean = is_f32(composite) && self.gives(composite, assignments[end]);
            if is_lean {
                self.hold(composite.kind.operands());
            }
            return is_lean;
        }
        if let Some(composite) = graph.composites.ending_at(node.index())
            && is_f32(composite)
            && self.gives(composite, assignments[node.index()])
        {
            self.compute_composite(composite);
            return true;
        }
        self.compute_one(node)
    }

    /// Whether the end of a composite gives what is computed here for it.
    fn gives(&self, composite: &Composite, end: Assignment) -> bool {
        match composite.kind {
            CompositeKind::Softmax { .. } => {
                end.precision == Precision::Full && end.results == Some(self.half().into())
            }
            CompositeKind::LayerNorm { .. } => {
                end.precision != Precision::Half && end.results == Some(DType::F32)
            }
        }
    }

    fn compute_composite(&mut self, composite: &Composite) {
        self.release(composite.kind.operands());
        match &composite.kind {
            CompositeKind::Softmax { x, axis } => {
                let x = self.wide(x);
                let bfloat = self.half() == FloatDType::BF16;
                let y = Dispatch::softmax_in_half(x, *axis, bfloat);
                self.set(&composite.out, y);
            }
            CompositeKind::LayerNorm {
                x,
                gamma,
                beta,
                epsilon,
            } => {
                let x = self.wide(x);
                let width = Shape::new([gamma.shape.num_elements()]);
                let gamma = Dispatch::float_reshape(self.wide(gamma), width.clone());
                let beta = match beta {
                    Some(beta) => Dispatch::float_reshape(self.wide(beta), width),
                    None => Dispatch::float_zeros(width, &self.device(), FloatDType::F32),
                };
                let y = Dispatch::lean_layer_norm(x, gamma, beta, epsilon.elem());
                self.set(&composite.out, y);
                self.is_computed_again(&composite.out);
            }
        }
        self.free_put_back();
    }

    fn compute_one(&mut self, node: Node<'_>) -> bool {
        let bfloat = self.half() == FloatDType::BF16;
        match node.operation() {
            OperationIr::NumericFloat(_, NumericOperationIr::Mul(product)) => {
                let Some((x, mask)) = node.masked() else {
                    return false;
                };
                if self.reads_half() || !self.is_f32(x.id) || !self.is_f32(mask.id) {
                    return false;
                }
                let (x, mask) = (self.float(x), self.float(mask));
                self.set(&product.out, Dispatch::mask(x, mask, bfloat));
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(product)) => {
                let (x, constant, is_left) = match [&product.lhs, &product.rhs]
                    .map(|operand| self.is_constant_in_half(operand))
                {
                    [true, false] => (&product.rhs, &product.lhs, true),
                    [false, true] => (&product.lhs, &product.rhs, false),
                    _ => return false,
                };
                let (constant, is_given) = self.constant(constant);
                let x = self.float(x);
                let y = Dispatch::matmul_constant(x, constant, is_left, is_given, bfloat);
                self.set(&product.out, y);
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
    Cube: cfg(feature = "cube"),
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

    /// The product of `x`, on the grid of a half dtype, and a constant, to which no gradient goes:
    /// rounded to the grid here if it is given in F32, and on it otherwise.
    fn matmul_constant(
        x: FloatTensor<Self>,
        constant: FloatTensor<Self>,
        is_left: bool,
        is_given: bool,
        bfloat: bool,
    ) -> FloatTensor<Self> {
        let constant = match is_given {
            true => Self::round(constant, bfloat, false),
            false => constant,
        };
        match is_left {
            true => Self::float_matmul(constant, x),
            false => Self::float_matmul(x, constant),
        }
    }

    /// `x` times a mask of zeros and ones, to which no gradient goes; it may be broadcast to the shape
    /// of `x`.
    fn mask(x: FloatTensor<Self>, mask: FloatTensor<Self>, _bfloat: bool) -> FloatTensor<Self> {
        Self::float_mul(x, mask)
    }
}

#[cfg(feature = "flex")]
impl LeanBackward for burn::backend::Flex {}
#[cfg(feature = "ndarray")]
impl LeanBackward for burn::backend::NdArray {}
#[cfg(feature = "cube")]
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

    fn matmul_constant(
        x: FloatTensor<Self>,
        constant: FloatTensor<Self>,
        is_left: bool,
        is_given: bool,
        bfloat: bool,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let constant = constant.into_primitive();
        let shape = x.shape();
        let y = B::matmul_constant(x, constant.clone(), is_left, is_given, bfloat);
        match Product.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let value = match is_given {
                    true => constant,
                    false => B::narrow(constant, bfloat),
                };
                let constant = Constant {
                    value,
                    is_given,
                    is_left,
                    bfloat,
                    shape,
                };
                prep.finish(constant, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
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
