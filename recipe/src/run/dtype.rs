//! In what a training computes on a device.

use burn::tensor::{Device, FloatDType};
use burn_lean_amp::{Autocast, AutocastConfig, Fallback};

use crate::{ComputeDtype, RecipeError};

/// The dtype that a training computes in; F32 where a fallback says so.
pub(crate) fn resolve(
    dtype: ComputeDtype,
    fallback: Fallback,
    device: &Device,
) -> Result<FloatDType, RecipeError> {
    let device = device.clone().without_autodiff();
    let has = |dtype| device.supports_dtype(dtype);
    let dtype = match dtype.fixed() {
        Some(dtype) => dtype,
        None if has(FloatDType::BF16) => return Ok(FloatDType::BF16),
        None if has(FloatDType::F16) => return Ok(FloatDType::F16),
        None => return Ok(FloatDType::F32),
    };
    AutocastConfig::new(dtype)
        .with_fallback(fallback)
        .check(&device)?;
    Ok(match fallback {
        Fallback::F32 if !has(dtype) => FloatDType::F32,
        _ => dtype,
    })
}

/// Autocast in a dtype that [`resolve`] gave.
pub(crate) fn autocast(dtype: FloatDType, fallback: Fallback) -> Autocast {
    Autocast::new(dtype).with_fallback(fallback)
}
