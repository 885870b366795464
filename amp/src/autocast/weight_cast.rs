//! One cast per trained weight and region.
//!
//! A layer that is used many times in a forward pass would be cast, and its copy kept for the
//! backward pass, as many times. PyTorch's autocast keeps the copies of leaves that require a
//! gradient until the outermost region ends; so does this. What identifies a weight is its node in
//! the autodiff graph: an optimizer's step makes another one.
//!
//! Only the numbers are shared. Every use has a node of its own, so that the gradients of all uses
//! meet at the master weight, in F32, and a second backward pass in the same region is possible.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_lean_graph::HalfStorage;

use crate::device::compute::Compute;
use crate::device::emulation;

/// The cast of a weight, with the numbers of the region's copy if there is one.
pub(crate) fn cast<const D: usize>(x: Tensor<D>, compute: Compute) -> Tensor<D> {
    // A frozen weight is not kept: its copy is of no use after the operation that reads it.
    let is_kept = x.dtype() == DType::F32 && compute.is_half() && x.is_require_grad();
    if !is_kept || !emulation::is_available(&x.device()) {
        return compute.cast(x);
    }
    Tensor::from_dispatch(Dispatch::cast_weight(
        x.into_dispatch(),
        compute.dtype == FloatDType::BF16,
        compute.emulated,
    ))
}

/// The weight, and what it is cast to: BF16 or F16, emulated or not.
type Key = (NodeId, bool, bool);

thread_local! {
    /// The copies of the outermost region of this thread, each a tensor of the backend that the
    /// weight is on; `None` outside.
    static COPIES: RefCell<Option<HashMap<Key, Box<dyn Any>>>> = const { RefCell::new(None) };
}

/// The copies of a region: gone when this is dropped.
pub(crate) struct Cache(());

impl Cache {
    /// `None` where there is one already.
    pub(crate) fn open() -> Option<Self> {
        COPIES.with_borrow_mut(|copies| {
            copies.is_none().then(|| {
                *copies = Some(HashMap::new());
                Self(())
            })
        })
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Dropped after the borrow.
        let _copies = COPIES.take();
    }
}

/// The copy of this weight, which `cast` makes where there is none.
fn copy_of<T: Clone + 'static>(key: Key, cast: impl FnOnce() -> T) -> T {
    let known = COPIES.with_borrow(|copies| {
        let copy = copies.as_ref()?.get(&key)?;
        copy.downcast_ref::<T>().cloned()
    });
    known.unwrap_or_else(|| {
        let copy = cast();
        COPIES.with_borrow_mut(|copies| {
            if let Some(copies) = copies {
                copies.insert(key, Box::new(copy.clone()));
            }
        });
        copy
    })
}

/// The cast as a backend operation, so that it sees the node of its operand.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Capture,
    Autodiff
)]
pub(crate) trait CastWeight: Backend + HalfStorage {
    fn cast_weight(x: FloatTensor<Self>, bfloat: bool, emulated: bool) -> FloatTensor<Self> {
        match (emulated, bfloat) {
            (true, _) => Self::round(x, bfloat, false),
            (false, true) => Self::float_cast(x, FloatDType::BF16),
            (false, false) => Self::float_cast(x, FloatDType::F16),
        }
    }
}

#[cfg(feature = "flex")]
impl CastWeight for burn::backend::Flex {}
#[cfg(feature = "ndarray")]
impl CastWeight for burn::backend::NdArray {}
#[cfg(feature = "cube")]
impl CastWeight for burn::backend::Cube {}
impl CastWeight for burn::backend::Capture {}

impl<B: CastWeight, C: CheckpointStrategy> CastWeight for Autodiff<B, C> {
    fn cast_weight(x: FloatTensor<Self>, bfloat: bool, emulated: bool) -> FloatTensor<Self> {
        let copy = copy_of((x.id(), bfloat, emulated), || {
            B::cast_weight(x.primitive().clone(), bfloat, emulated)
        });
        let copy = <Self as AutodiffBackend>::from_inner(copy);
        Self::used_again(x, copy, bfloat)
    }
}
