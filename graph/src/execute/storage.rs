//! Half precision as a form in which tensors are kept.
//!
//! What is stored in half and computed with in F32 is widened for each use, and widened again, not
//! kept, for the backward pass: Burn's autodiff calls such an operation memory bound, and recomputes
//! it where gradient checkpointing is on. [`HalfStorage::widen`] asks for that by itself, and so does
//! [`HalfStorage::round`] for what is kept in F32 anyway: a parameter has no copy in half.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use std::marker::PhantomData;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, FloatDType, TensorData, try_read_sync};
use half::{bf16, f16};

use crate::conversions::round_all;

/// Conversions between F32 and a half dtype, with the gradient rounded to the half dtype.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Capture,
    Autodiff
)]
pub trait HalfStorage: Backend {
    /// F32 numbers in BF16 or F16.
    fn narrow(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        Self::float_cast(x, half(bfloat))
    }

    /// Numbers of a half dtype in F32. `bfloat` says which it is.
    fn widen(x: FloatTensor<Self>, _bfloat: bool) -> FloatTensor<Self> {
        Self::float_cast(x, FloatDType::F32)
    }

    /// F32 numbers on the grid of a half dtype; the gradient is rounded to it on its way back.
    ///
    /// Computed on the host: on a device that is not the CPU every call is a round trip. With `again`
    /// the result is not kept for the backward pass but computed once more.
    fn round(x: FloatTensor<Self>, bfloat: bool, _again: bool) -> FloatTensor<Self> {
        let device = x.device();
        let data = try_read_sync(Self::float_into_data(x))
            .expect("rounding reads synchronously, which this platform does not allow")
            .unwrap_or_else(|error| panic!("the tensor to round could not be read: {error}"));
        Self::float_from_data(rounded(data, half(bfloat)), &device)
    }

    /// `copy`, which is `x` in a half dtype or on its grid, for another use of `x`: its gradient goes to `x`
    /// by itself, so that the gradients of all uses are summed as `x` is stored. The numbers are shared.
    fn used_again(
        _x: FloatTensor<Self>,
        copy: FloatTensor<Self>,
        _bfloat: bool,
    ) -> FloatTensor<Self> {
        copy
    }

    /// The same F32 numbers. The backward pass gets them as they are in half, cut off at the largest
    /// half number: nothing else is kept for it. The gradient passes as it is.
    fn store_in_half(x: FloatTensor<Self>, _bfloat: bool) -> FloatTensor<Self> {
        x
    }
}

fn rounded(mut data: TensorData, half: FloatDType) -> TensorData {
    if data.dtype() != DType::F32 {
        data = data.convert::<f32>();
    }
    let values = data
        .as_mut_slice::<f32>()
        .expect("the data was just converted to f32");
    round_all(values, half);
    data
}

#[cfg(feature = "flex")]
impl HalfStorage for burn::backend::Flex {
    fn narrow(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        flex::narrow(&x.to_contiguous(), bfloat)
    }

    fn widen(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        flex::widen(&x.to_contiguous(), bfloat)
    }

    fn round(x: FloatTensor<Self>, bfloat: bool, _again: bool) -> FloatTensor<Self> {
        flex::round(x, bfloat)
    }
}
#[cfg(feature = "ndarray")]
impl HalfStorage for burn::backend::NdArray {}
#[cfg(feature = "cube")]
impl HalfStorage for burn::backend::Cube {}
/// Capture records no values: rounding keeps shape and dtype, so the operand stands for it.
impl HalfStorage for burn::backend::Capture {
    fn round(x: FloatTensor<Self>, _bfloat: bool, _again: bool) -> FloatTensor<Self> {
        x
    }
}

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
    use burn::tensor::{DType, Element, FloatDType, TensorData};
    use half::{bf16, f16};

    use crate::conversions::{convert, from_bf16, from_f16, round_all, to_bf16, to_f16};

    pub(super) fn narrow(x: &FloatTensor<Flex>, bfloat: bool) -> FloatTensor<Flex> {
        let values = &x.storage::<f32>()[..x.shape().num_elements()];
        match bfloat {
            true => tensor(convert(values, to_bf16), x),
            false => tensor(convert(values, to_f16), x),
        }
    }

    pub(super) fn widen(x: &FloatTensor<Flex>, bfloat: bool) -> FloatTensor<Flex> {
        let count = x.shape().num_elements();
        let values = match bfloat {
            true => convert(&x.storage::<bf16>()[..count], from_bf16),
            false => convert(&x.storage::<f16>()[..count], from_f16),
        };
        tensor(values, x)
    }

    pub(super) fn round(mut x: FloatTensor<Flex>, bfloat: bool) -> FloatTensor<Flex> {
        if x.dtype() != DType::F32 {
            x = Flex::float_cast(x, FloatDType::F32);
        }
        if x.is_unique() {
            // Number by number: wherever they lie.
            round_all(x.storage_mut::<f32>(), super::half(bfloat));
            return x;
        }
        let x = x.to_contiguous();
        let values = &x.storage::<f32>()[..x.shape().num_elements()];
        match bfloat {
            true => tensor(convert(values, |x| from_bf16(to_bf16(x))), &x),
            false => tensor(convert(values, |x| from_f16(to_f16(x))), &x),
        }
    }

    fn tensor<E: Element>(values: Vec<E>, like: &FloatTensor<Flex>) -> FloatTensor<Flex> {
        Flex::float_from_data(TensorData::new(values, like.shape()), &like.device())
    }
}

/// The gradient goes back in the dtype that the operand had.
#[derive(Debug, Clone, Copy)]
enum Conversion {
    Narrows,
    Widens,
    Rounds,
    /// Narrows what only the backward pass reads.
    Stores,
    /// Widens what is stored so.
    Restores,
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
            Self::Rounds => B::round(grad, bfloat, false),
            Self::Stores | Self::Restores => grad,
        });
    }
}

/// Converts once more, for the backward pass.
#[derive(Debug)]
struct Again<B> {
    conversion: Conversion,
    stored: NodeId,
    bfloat: bool,
    backend: PhantomData<B>,
}

impl<B: HalfStorage> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let stored = states.get_state::<FloatTensor<B>>(&self.stored);
        states.save(out_node, self.conversion.apply::<B>(stored, self.bfloat));
    }
}

impl Conversion {
    fn apply<B: HalfStorage>(&self, x: FloatTensor<B>, bfloat: bool) -> FloatTensor<B> {
        match self {
            Self::Narrows | Self::Stores => B::narrow(x, bfloat),
            Self::Widens => B::widen(x, bfloat),
            Self::Rounds => B::round(x, bfloat, false),
            Self::Restores => {
                let largest = match bfloat {
                    true => bf16::MAX.to_f32(),
                    false => f16::MAX.to_f32(),
                };
                B::float_clamp(B::widen(x, bfloat), (-largest).into(), largest.into())
            }
        }
    }

    fn again<B>(self, stored: NodeId, bfloat: bool) -> Again<B> {
        Again {
            conversion: self,
            stored,
            bfloat,
            backend: PhantomData,
        }
    }

    /// The conversion with its gradient; its result is kept for the backward pass.
    fn kept<B: HalfStorage, C: CheckpointStrategy>(
        self,
        x: FloatTensor<Autodiff<B, C>>,
        bfloat: bool,
    ) -> FloatTensor<Autodiff<B, C>> {
        let (primitive, node) = x.into_parts();
        let converted = self.apply::<B>(primitive, bfloat);
        self.recorded::<B, C>(node, converted, bfloat)
    }

    /// What the conversion gave, with its gradient.
    fn recorded<B: HalfStorage, C: CheckpointStrategy>(
        self,
        node: NodeGuard,
        converted: FloatTensor<B>,
        bfloat: bool,
    ) -> FloatTensor<Autodiff<B, C>> {
        match self.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(bfloat, converted),
            OpsKind::UnTracked(prep) => prep.finish(converted),
        }
    }

    /// The conversion with its gradient; its operand is kept for the backward pass.
    fn repeated<B: HalfStorage, C: CheckpointStrategy>(
        self,
        x: FloatTensor<Autodiff<B, C>>,
        bfloat: bool,
    ) -> FloatTensor<Autodiff<B, C>> {
        let again = self.again::<B>(x.id(), bfloat);
        let prepared = self
            .prepare::<BalancedCheckpointing>([x.node()])
            .memory_bound()
            .retro_forward(again)
            .parents([&x])
            .stateful();
        let converted = self.apply::<B>(x.into_primitive(), bfloat);
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(bfloat, converted),
            OpsKind::UnTracked(prep) => prep.finish(converted),
        }
    }
}

impl<B: HalfStorage, C: CheckpointStrategy> HalfStorage for Autodiff<B, C> {
    fn narrow(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        Conversion::Narrows.kept::<B, C>(x, bfloat)
    }

    fn widen(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        Conversion::Widens.repeated::<B, C>(x, bfloat)
    }

    fn round(x: FloatTensor<Self>, bfloat: bool, again: bool) -> FloatTensor<Self> {
        match again {
            true => Conversion::Rounds.repeated::<B, C>(x, bfloat),
            false => Conversion::Rounds.kept::<B, C>(x, bfloat),
        }
    }

    fn used_again(
        x: FloatTensor<Self>,
        copy: FloatTensor<Self>,
        bfloat: bool,
    ) -> FloatTensor<Self> {
        if !x.is_tracked() {
            return copy;
        }
        let conversion = match copy.dtype() {
            DType::F32 => Conversion::Rounds,
            _ => Conversion::Narrows,
        };
        conversion.recorded::<B, C>(x.node(), copy.into_primitive(), bfloat)
    }

    fn store_in_half(x: FloatTensor<Self>, bfloat: bool) -> FloatTensor<Self> {
        let (primitive, node) = x.clone().into_parts();
        let OpsKind::Tracked(prep) = Conversion::Stores
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        else {
            return x;
        };
        let stored: FloatTensor<Self> = prep.finish(bfloat, B::narrow(primitive, bfloat));
        let again = Conversion::Restores.again::<B>(stored.id(), bfloat);
        let prepared = Conversion::Restores
            .prepare::<BalancedCheckpointing>([stored.node()])
            .memory_bound()
            .retro_forward(again)
            .parents([&stored])
            .stateful();
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(bfloat, x.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(x.into_primitive()),
        }
    }
}
