//! A dtype to compute in, and how a device reaches it.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean_graph::hooks::note_cast;
use burn_lean_graph::is_castable;

use crate::device::{device_name, emulation};

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
    pub(crate) fn assert_supported(self, device: &Device) {
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
        if let Some(noted) = note_cast(&x, self.dtype) {
            return noted;
        }
        if self.emulated {
            return emulation::round(cast_to(x, FloatDType::F32), self.dtype);
        }
        cast_to(x, self.dtype)
    }
}

/// A cast that is recorded only where it changes something.
pub(crate) fn cast_to<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    if is_castable(x.dtype())
        && let Some(noted) = note_cast(&x, dtype)
    {
        return noted;
    }
    match !is_castable(x.dtype()) || x.dtype() == dtype.into() {
        true => x,
        false => x.cast(dtype),
    }
}
