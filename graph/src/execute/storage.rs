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
    use half::slice::HalfFloatSliceExt;
    use half::{bf16, f16};

    pub(super) fn narrow(x: &FloatTensor<Flex>, bfloat: bool) -> FloatTensor<Flex> {
        let shape = x.shape();
        let values = &x.storage::<f32>()[..shape.num_elements()];
        let data = match bfloat {
            true => TensorData::new(
                values.iter().map(|x| to_bf16(*x)).collect::<Vec<_>>(),
                shape,
            ),
            false => {
                let mut halves = vec![f16::ZERO; values.len()];
                halves.convert_from_f32_slice(values);
                TensorData::new(halves, shape)
            }
        };
        Flex::float_from_data(data, &x.device())
    }

    pub(super) fn widen(x: &FloatTensor<Flex>, bfloat: bool) -> FloatTensor<Flex> {
        let shape = x.shape();
        let count = shape.num_elements();
        let values: Vec<f32> = match bfloat {
            true => {
                let widened = |x: &bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
                x.storage::<bf16>()[..count].iter().map(widened).collect()
            }
            false => {
                let mut values = vec![0.0; count];
                x.storage::<f16>()[..count].convert_to_f32_slice(&mut values);
                values
            }
        };
        Flex::float_from_data(TensorData::new(values, shape), &x.device())
    }

    /// To nearest, ties to even, without a branch, so that the compiler converts several at once.
    fn to_bf16(x: f32) -> bf16 {
        const INFINITY: u32 = 0x7f80_0000;
        const QUIET: u32 = 0x0040_0000;
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let nan = bits & 0x7fff_ffff > INFINITY;
        bf16::from_bits(((if nan { bits | QUIET } else { rounded }) >> 16) as u16)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn bf16_is_rounded_as_the_conversion_does_it() {
            let bits = (0..=u32::MAX / 257).map(|index| index * 257);
            let ties = (0..=u32::from(u16::MAX))
                .flat_map(|high| [0x7fff, 0x8000, 0x8001].map(|low| high << 16 | low));
            for x in bits.chain(ties).map(f32::from_bits) {
                let (ours, exact) = (to_bf16(x), bf16::from_f32(x));
                assert!(
                    ours.to_bits() == exact.to_bits() || (ours.is_nan() && exact.is_nan()),
                    "{x:e} becomes {ours}, not {exact}"
                );
            }
        }
    }
}

#[derive(Debug)]
struct Narrowing;

impl<B: HalfStorage> Backward<B, 1> for Narrowing {
    type State = bool;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let bfloat = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| B::widen(grad, bfloat));
    }
}

#[derive(Debug)]
struct Widening;

impl<B: HalfStorage> Backward<B, 1> for Widening {
    type State = bool;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let bfloat = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| B::narrow(grad, bfloat));
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
        match Narrowing.prepare::<C>([node]).compute_bound().stateful() {
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
        match Widening
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
