//! In what a training computes on a device.

use burn::tensor::{Device, FloatDType};
use burn_lean_amp::{AmpError, Autocast, AutocastConfig, Fallback};

use crate::{ComputeDtype, RecipeError};

/// The dtype that a training computes in; F32 where a fallback says so.
pub(crate) fn resolve(
    dtype: ComputeDtype,
    fallback: Fallback,
    device: &Device,
) -> Result<FloatDType, RecipeError> {
    let device = device.clone().without_autodiff();
    let Some(dtype) = dtype.fixed() else {
        return Ok(first_sound(|dtype| {
            AutocastConfig::new(dtype).check(&device)
        })?);
    };
    AutocastConfig::new(dtype)
        .with_fallback(fallback)
        .check(&device)?;
    Ok(match fallback {
        Fallback::F32 if !device.supports_dtype(dtype) => FloatDType::F32,
        _ => dtype,
    })
}

/// BF16, else F16, else F32: the first that the device has and computes right numbers in.
fn first_sound(check: impl Fn(FloatDType) -> Result<(), AmpError>) -> Result<FloatDType, AmpError> {
    for dtype in [FloatDType::BF16, FloatDType::F16] {
        match check(dtype) {
            Ok(()) => return Ok(dtype),
            Err(AmpError::UnsupportedDtype { .. }) => {}
            Err(error @ AmpError::SelfTest { .. }) => {
                tracing::warn!(?dtype, %error, "`dtype = \"auto\"` takes another dtype");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(FloatDType::F32)
}

/// Autocast in a dtype that [`resolve`] gave.
pub(crate) fn autocast(dtype: FloatDType, fallback: Fallback) -> Autocast {
    Autocast::new(dtype).with_fallback(fallback)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsound(dtype: FloatDType) -> AmpError {
        AmpError::SelfTest {
            device: "a device".into(),
            dtype,
            check: "60000 · 2",
            expected: "inf".into(),
            found: "65504".into(),
        }
    }

    fn lacking(dtype: FloatDType) -> AmpError {
        AmpError::UnsupportedDtype {
            dtype,
            device: "a device".into(),
            supported: vec![FloatDType::F32],
            emulation: false,
        }
    }

    #[test]
    fn a_dtype_that_fails_its_self_test_gives_way_to_the_next() {
        type Refuse = fn(FloatDType) -> AmpError;
        let cases: [(Option<Refuse>, Option<Refuse>, FloatDType); 5] = [
            (None, None, FloatDType::BF16),
            (Some(unsound), None, FloatDType::F16),
            (Some(lacking), None, FloatDType::F16),
            (Some(unsound), Some(unsound), FloatDType::F32),
            (Some(lacking), Some(unsound), FloatDType::F32),
        ];
        for (bf16, f16, expected) in cases {
            let found = first_sound(|dtype| {
                let refuse = match dtype {
                    FloatDType::BF16 => bf16,
                    _ => f16,
                };
                refuse.map_or(Ok(()), |refuse| Err(refuse(dtype)))
            });
            assert_eq!(found.unwrap(), expected);
        }
        // A device that cannot be read from computes in no dtype.
        let lost = AmpError::Device {
            reason: "lost".into(),
        };
        assert_eq!(first_sound(|_| Err(lost.clone())), Err(lost.clone()));
    }
}
