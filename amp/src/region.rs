//! The autocast region: where weights are worth their half-precision copies.

use std::cell::Cell;
use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::device::device_name;
use crate::lists::Lists;
use crate::run::Memory;
use crate::{Fallback, FloatTensors, emulation};

/// The dtype of an autocast region, and how it is reached on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compute {
    pub(crate) dtype: FloatDType,
    /// F32 tensors holding half values, for devices without the dtype.
    pub(crate) emulated: bool,
}

impl Compute {
    pub(crate) fn native(dtype: FloatDType) -> Self {
        Self {
            dtype,
            emulated: false,
        }
    }

    pub(crate) fn emulated(dtype: FloatDType) -> Self {
        Self {
            dtype,
            emulated: true,
        }
    }

    pub(crate) fn is_half(self) -> bool {
        matches!(self.dtype, FloatDType::F16 | FloatDType::BF16)
    }

    /// Some devices compute garbage in a dtype that they lack, without a word.
    fn assert_supported(self, device: &Device) {
        assert!(
            self.emulated || !self.is_half() || device.supports_dtype(self.dtype),
            "{} cannot compute in {:?}: the model was prepared on another device. Move it there \
             before `AutocastConfig::prepare`, which checks the device",
            device_name(device),
            self.dtype
        );
    }

    /// Casts F32 and half tensors; F64 and quantized tensors are left alone.
    pub(crate) fn cast<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        if !is_castable(x.dtype()) {
            return x;
        }
        if self.emulated {
            return emulation::round(cast_to(x, FloatDType::F32), self.dtype);
        }
        cast_to(x, self.dtype)
    }
}

fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::Flex32 | DType::F16 | DType::BF16)
}

/// A cast that is recorded only where it changes something.
pub(crate) fn cast_to<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    match !is_castable(x.dtype()) || x.dtype() == dtype.into() {
        true => x,
        false => x.cast(dtype),
    }
}

thread_local! {
    /// The region this thread is in. A spawned thread starts outside, as with PyTorch.
    static REGION: Cell<Option<Compute>> = const { Cell::new(None) };
}

/// The region this thread is in.
pub(crate) fn current() -> Option<Compute> {
    REGION.get()
}

/// Restores the surrounding region, also when the forward pass panics.
pub(crate) struct Entered {
    previous: Option<Compute>,
}

impl Entered {
    pub(crate) fn enter(compute: Option<Compute>) -> Self {
        Self {
            previous: REGION.replace(compute),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        REGION.set(self.previous);
    }
}

/// Mixed precision for forward passes: [`run`](Self::run) for any model, operation by operation;
/// [`forward`](Self::forward) as a region for a [prepared](crate::AutocastConfig::prepare) model.
///
/// Clones share what [`run`](Self::run) remembers between steps.
#[derive(Debug, Clone)]
pub struct Autocast {
    pub(crate) compute: Compute,
    /// The device has been looked at.
    pub(crate) resolved: bool,
    pub(crate) fallback: Fallback,
    pub(crate) output_dtype: FloatDType,
    pub(crate) lists: Arc<Lists>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) caches: bool,
    pub(crate) verifies: bool,
}

impl PartialEq for Autocast {
    fn eq(&self, other: &Self) -> bool {
        self.compute == other.compute && self.output_dtype == other.output_dtype
    }
}

impl Autocast {
    /// For devices that were found able.
    pub(crate) fn resolved(compute: Compute, output_dtype: FloatDType) -> Self {
        Self {
            compute,
            resolved: true,
            output_dtype,
            ..Self::unresolved(compute.dtype)
        }
    }

    /// For devices that are not known yet.
    pub(crate) fn unresolved(dtype: FloatDType) -> Self {
        Self {
            compute: Compute::native(dtype),
            resolved: false,
            fallback: Fallback::Error,
            output_dtype: FloatDType::F32,
            lists: Arc::default(),
            memory: Arc::default(),
            caches: false,
            verifies: true,
        }
    }

    /// Runs `forward` in half precision: casts the input, switches the casts of the weights on,
    /// and casts the output.
    ///
    /// `input` and the result are tensors, or anything made of them ([`FloatTensors`]); integer
    /// and boolean tensors pass unchanged, as do F64 tensors. Compute the loss outside, in F32.
    /// The region is of this thread only: a thread that `forward` spawns is outside of it.
    ///
    /// # Panics
    ///
    /// When the input is on a device that cannot compute in the dtype, which
    /// [`prepare`](crate::AutocastConfig::prepare) has refused for the devices of the model.
    pub fn forward<I: FloatTensors, O: FloatTensors>(
        &self,
        input: I,
        forward: impl FnOnce(I) -> O,
    ) -> O {
        let input = input.map_floats(&Caster(Edge::In(self.compute)));
        let output = {
            let _region = Entered::enter(Some(self.compute));
            forward(input)
        };
        output.map_floats(&Caster(Edge::Out(self.compute, self.output_dtype)))
    }

    /// The same region without any cast.
    pub(crate) fn in_full_precision(&self) -> Self {
        Self::resolved(Compute::native(FloatDType::F32), FloatDType::F32)
    }

    /// The dtype that the forward pass computes in (or emulates).
    pub fn dtype(&self) -> FloatDType {
        self.compute.dtype
    }

    /// Whether the dtype is emulated with rounded F32 tensors.
    pub fn is_emulated(&self) -> bool {
        self.compute.emulated
    }
}

/// Runs `body` in F32 inside an autocast region, and casts its result back.
///
/// For what must not run in half: modules that Burn cannot run in it (BatchNorm, recurrent cells,
/// positional encodings), or a sum that would overflow. `input` arrives in F32, weights are the
/// FP32 master weights, the result is cast to the dtype of the region. Outside of a region `body`
/// just runs, so a model that contains this call is unchanged without autocast.
///
/// ```
/// use burn::nn::{BatchNormConfig, LinearConfig};
/// use burn::tensor::{DType, Device, FloatDType, Tensor};
/// use burn_lean_amp::{AutocastConfig, full_precision};
///
/// let device = Device::flex();
/// let linear = LinearConfig::new(4, 2).init(&device);
/// let norm = BatchNormConfig::new(2).init(&device);
/// let (model, autocast) = AutocastConfig::new(FloatDType::BF16).prepare((linear, norm))?;
///
/// let y = autocast.forward(Tensor::<2>::ones([3, 4], &device), |x| {
///     let h = model.0.forward(x);
///     let h = full_precision(h.unsqueeze_dim::<3>(2), |h| {
///         assert_eq!(h.dtype(), DType::F32);
///         model.1.forward(h)
///     });
///     assert_eq!(h.dtype(), DType::BF16);
///     h
/// });
/// assert_eq!(y.dims(), [3, 2, 1]);
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
pub fn full_precision<I: FloatTensors, O: FloatTensors>(input: I, body: impl FnOnce(I) -> O) -> O {
    let Some(compute) = current() else {
        return body(input);
    };
    let input = input.map_floats(&Caster(Edge::Out(compute, FloatDType::F32)));
    let output = {
        let _region = Entered::enter(None);
        body(input)
    };
    output.map_floats(&Caster(Edge::In(compute)))
}

/// The cast at the edge of a region, handed to [`FloatTensors::map_floats`].
#[derive(Debug, Clone, Copy)]
pub struct Caster(Edge);

#[derive(Debug, Clone, Copy)]
enum Edge {
    /// Into a region.
    In(Compute),
    /// Out of a region, to this dtype.
    Out(Compute, FloatDType),
}

impl Caster {
    /// Casts one tensor of any rank; the cast is tracked by autodiff.
    pub fn cast<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.0 {
            Edge::In(compute) => {
                compute.assert_supported(&x.device());
                compute.cast(x)
            }
            Edge::Out(compute, dtype) if compute.emulated => {
                // What leaves a half region is half, and so is the gradient that enters it.
                cast_to(compute.cast(x), dtype)
            }
            Edge::Out(_, dtype) => cast_to(x, dtype),
        }
    }
}
