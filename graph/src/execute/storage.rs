//! Half precision as a form in which tensors are kept.
//!
//! What is stored in half and computed with in F32 is widened for each use, and widened again, not
//! kept, for the backward pass: Burn's autodiff calls such an operation memory bound, and recomputes
//! it where gradient checkpointing is on. [`Widen`] asks for that by itself.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use std::marker::PhantomData;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, backend_extension};
use burn::tensor::FloatDType;

/// Conversions between F32 and a half dtype, with the gradient rounded to the half dtype.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda", feature = "cpu")),
    Capture,
    Autodiff
)]
pub(crate) trait HalfStorage: Backend {
    /// F32 numbers in BF16 or F16.
    fn narrow(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        Self::float_cast(x, half(bfloat))
    }

    /// Numbers of a half dtype in F32. `bfloat` says which it is.
    fn widen(x: FloatTensor<Self>, _bfloat: bool) -> FloatTensor<Self> {
        Self::float_cast(x, FloatDType::F32)
    }
}

#[cfg(feature = "flex")]
impl HalfStorage for burn::backend::Flex {
    fn narrow(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        flex::narrow(&x.to_contiguous(), bfloat)
    }

    fn widen(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        flex::widen(&x.to_contiguous(), bfloat)
    }
}
#[cfg(feature = "ndarray")]
impl HalfStorage for burn::backend::NdArray {}
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "cpu"))]
impl HalfStorage for burn::backend::Cube {}
impl HalfStorage for burn::backend::Capture {}

fn half(bfloat: bool) -> FloatDType {
    match bfloat {
        true => FloatDType::BF16,
        false => FloatDType::F16,
    }
}

/// Many numbers at a time: Burn's own cast converts one by one.
#[cfg(feature = "flex")]
mod flex {
    use burn::backend::Flex;
    use burn::backend::TensorMetadata;
    use burn::backend::ops::FloatTensorOps;
    use burn::backend::tensor::FloatTensor;
    use burn::tensor::TensorData;
    use half::{bf16, f16};

    use crate::conversions::{from_bf16, from_f16, to_bf16, to_f16};

    pub(super) fn narrow(x: &FloatTensor<Flex>, bfloat: bool) -> FloatTensor<Flex> {
        let shape = x.shape();
        let values = x.storage::<f32>()[..shape.num_elements()].iter();
        let data = match bfloat {
            true => TensorData::new(values.map(|x| to_bf16(*x)).collect::<Vec<_>>(), shape),
            false => TensorData::new(values.map(|x| to_f16(*x)).collect::<Vec<_>>(), shape),
        };
        Flex::float_from_data(data, &x.device())
    }

    pub(super) fn widen(x: &FloatTensor<Flex>, bfloat: bool) -> FloatTensor<Flex> {
        let shape = x.shape();
        let count = shape.num_elements();
        let values: Vec<f32> = match bfloat {
            true => x.storage::<bf16>()[..count]
                .iter()
                .map(|x| from_bf16(*x))
                .collect(),
            false => x.storage::<f16>()[..count]
                .iter()
                .map(|x| from_f16(*x))
                .collect(),
        };
        Flex::float_from_data(TensorData::new(values, shape), &x.device())
    }
}

/// The gradient goes back in the dtype that the operand had.
#[derive(Debug)]
enum Conversion {
    Narrows,
    Widens,
}

impl<B: HalfStorage> Backward<B, 1> for Conversion {
    type State = bool;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let bfloat = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| match self {
            Self::Narrows => B::widen(grad, bfloat),
            Self::Widens => B::narrow(grad, bfloat),
        });
    }
}

/// Widens once more, for the backward pass.
#[derive(Debug)]
struct Again<B> {
    stored: NodeId,
    bfloat: bool,
    backend: PhantomData<B>,
}

impl<B: HalfStorage> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let stored = states.get_state::<FloatTensor<B>>(&self.stored);
        states.save(out_node, B::widen(stored, self.bfloat));
    }
}

impl<B: HalfStorage, C: CheckpointStrategy> HalfStorage for Autodiff<B, C> {
    fn narrow(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        let (primitive, node) = x.into_parts();
        match Conversion::Narrows
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(bfloat, B::narrow(primitive, bfloat)),
            OpsKind::UnTracked(prep) => prep.finish(B::narrow(primitive, bfloat)),
        }
    }

    fn widen(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        let again = Again::<B> {
            stored: x.id(),
            bfloat,
            backend: PhantomData,
        };
        match Conversion::Widens
            .prepare::<BalancedCheckpointing>([x.node()])
            .memory_bound()
            .retro_forward(again)
            .parents([&x])
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(bfloat, B::widen(x.into_primitive(), bfloat)),
            OpsKind::UnTracked(prep) => prep.finish(B::widen(x.into_primitive(), bfloat)),
        }
    }
}
