//! What a device can do by its own word, what stands in where it cannot, and what it is called.

pub(crate) mod accumulation;
pub(crate) mod compute;
pub(crate) mod emulation;
mod names;

use burn::tensor::{Device, FloatDType};
use serde::{Deserialize, Serialize};

use crate::AmpError;
pub(crate) use names::{device_name, is_cubecl};

/// What to do where a device cannot compute in the requested dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Fallback {
    /// Refuse, with [`AmpError::UnsupportedDtype`].
    #[default]
    Error,
    /// Compute in F32 after all, with a warning event.
    F32,
    /// Keep F32 tensors, but round to the half grid, with a warning event: in
    /// [`Autocast::run`](crate::Autocast::run) the result of every operation in half and its gradient, in
    /// a region weights, inputs and the gradients through the casts alone. Slower than F32: for checking that a model trains in half
    /// precision on a machine that has none.
    Emulate,
}

/// The float dtypes among F32, F16 and BF16 that `device` can compute in.
pub fn supported_dtypes(device: &Device) -> Vec<FloatDType> {
    [FloatDType::F32, FloatDType::F16, FloatDType::BF16]
        .into_iter()
        .filter(|dtype| device.supports_dtype(*dtype))
        .collect()
}

pub(crate) fn unsupported(device: &Device, dtype: FloatDType) -> AmpError {
    AmpError::UnsupportedDtype {
        dtype,
        device: device_name(device),
        supported: supported_dtypes(device),
        emulation: crate::device::emulation::is_available(device),
    }
}
