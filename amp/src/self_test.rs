//! What a device really does with a dtype.

use std::sync::{Mutex, PoisonError};

use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, Transaction};
use serde::{Deserialize, Serialize};

use crate::AmpError;
use crate::device::compute::Compute;
use crate::device::{device_name, unsupported};
use crate::gradients::{finite, read};

/// What [`self_test`] found on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SelfTest {
    /// The device, as Burn prints it.
    pub device: String,
    /// The dtype under test.
    pub dtype: FloatDType,
    /// An uploaded infinity is found in a gradient.
    pub detects_inf: bool,
    /// An uploaded NaN is found in a gradient.
    pub detects_nan: bool,
    /// A NaN computed on the device (0 · inf) is found in a gradient.
    pub detects_computed_nan: bool,
    /// The largest finite F32 is not taken for an infinity.
    pub passes_largest_finite: bool,
    /// Twice 60,000 in the dtype: infinite in F16, 120,000 or close in BF16 and F32.
    #[serde(with = "burn_lean_reparam::json::float32")]
    pub doubled_60000: f32,
    /// Sum of 4,096 ones, as the product of two vectors in the dtype: 4,096 with F32 accumulators,
    /// 2,048 (F16) or 256 (BF16) without.
    #[serde(with = "burn_lean_reparam::json::float32")]
    pub matmul_of_4096_ones: f32,
    /// Sum of 4,096 ones, as a convolution with a kernel as large as the image: as above. Where it is less,
    /// convolutions in a region lose terms, those of their weights' gradients above all;
    /// [`Autocast::run`](crate::Autocast::run) runs them in F32.
    #[serde(with = "burn_lean_reparam::json::float32")]
    pub convolution_of_4096_ones: f32,
}

impl SelfTest {
    /// Whether convolutions add up in the dtype, and lose terms.
    pub(crate) fn loses_terms(&self) -> bool {
        (self.convolution_of_4096_ones - 4096.0).abs() > 1.0
    }

    /// The first check that makes training in this dtype unsound, if any.
    ///
    /// Half accumulators are no failure by themselves: they cost accuracy.
    pub fn failure(&self) -> Option<AmpError> {
        let fail = |check, expected: &str, found: String| {
            Some(AmpError::SelfTest {
                device: self.device.clone(),
                dtype: self.dtype,
                check,
                expected: expected.into(),
                found,
            })
        };
        if !self.detects_inf {
            return fail("uploaded infinity", "found", "missed".into());
        }
        if !self.detects_nan {
            return fail("uploaded NaN", "found", "missed".into());
        }
        if !self.detects_computed_nan {
            return fail("computed NaN", "found", "missed".into());
        }
        if !self.passes_largest_finite {
            return fail("largest finite F32", "finite", "taken for infinite".into());
        }
        let overflow_is_right = match self.dtype {
            FloatDType::F16 => self.doubled_60000 == f32::INFINITY,
            // 120,000 is on the F32 grid; BF16 values there are 512 apart.
            _ => (self.doubled_60000 - 120_000.0).abs() <= 1024.0,
        };
        if !overflow_is_right {
            let expected = match self.dtype {
                FloatDType::F16 => "inf",
                _ => "about 120000",
            };
            return fail("60000 · 2", expected, self.doubled_60000.to_string());
        }
        None
    }
}

/// Runs the self-test of `dtype` on `device`; the second call for the same pair is free.
///
/// It finds devices whose shaders miss infinities and NaN (a shader compiler may assume that
/// there are none), or that do not overflow as the dtype must. It is run by
/// [`AutocastConfig::prepare`](crate::AutocastConfig::prepare).
///
/// # Errors
///
/// [`AmpError::UnsupportedDtype`] when the device says that it cannot compute in `dtype`,
/// [`AmpError::Device`] when reading back fails. A failed check is no error here: see
/// [`SelfTest::failure`].
///
/// ```
/// use burn::tensor::{Device, FloatDType};
///
/// let test = burn_lean_amp::self_test(&Device::flex(), FloatDType::F16).unwrap();
/// assert_eq!(test.doubled_60000, f32::INFINITY);
/// assert_eq!(test.matmul_of_4096_ones, 4096.0);
/// assert_eq!(test.convolution_of_4096_ones, 2048.0); // Half accumulators.
/// assert!(test.failure().is_none());
/// ```
pub fn self_test(device: &Device, dtype: FloatDType) -> Result<SelfTest, AmpError> {
    if !device.supports_dtype(dtype) {
        return Err(unsupported(device, dtype));
    }
    self_test_compute(device, Compute::native(dtype))
}

pub(crate) fn self_test_compute(device: &Device, compute: Compute) -> Result<SelfTest, AmpError> {
    static DONE: Mutex<Vec<(Device, Compute, SelfTest)>> = Mutex::new(Vec::new());

    let done = || DONE.lock().unwrap_or_else(PoisonError::into_inner);
    let of_this = |(known, of, _): &&(Device, Compute, SelfTest)| known == device && *of == compute;
    if let Some((_, _, test)) = done().iter().find(of_this) {
        return Ok(test.clone());
    }
    // Without the lock: a thread of rayon's that waits in it may take on another task that tests, too.
    let test = run(device, compute)?;
    tracing::debug!(device = %test.device, dtype = ?test.dtype, ?test, "self-test");
    let mut done = done();
    if !done.iter().any(|known| of_this(&known)) {
        done.push((device.clone(), compute, test.clone()));
    }
    Ok(test)
}

fn run(device: &Device, compute: Compute) -> Result<SelfTest, AmpError> {
    // `inner` may only be asked of an autodiff device.
    let device = match device.is_autodiff() {
        true => device.clone().inner(),
        false => device.clone(),
    };
    // Not in the default dtype of the device, which may be half itself.
    let upload =
        |values: &[f32]| Tensor::<1>::from_data(TensorData::from(values), (&device, DType::F32));
    let inf = upload(&[1.0, f32::INFINITY, 2.0]);
    let computed = inf.clone().mul_scalar(0.0);
    let ones = Tensor::<2>::ones([1, 4096], (&device, DType::F32));

    let transaction = Transaction::default()
        .register(finite(inf))
        .register(finite(upload(&[1.0, f32::NAN, 2.0])))
        .register(finite(computed))
        .register(finite(upload(&[f32::MAX, -f32::MAX])))
        .register(
            compute
                .cast(compute.cast(upload(&[60_000.0])).mul_scalar(2.0))
                .cast(FloatDType::F32),
        )
        .register(
            compute
                .cast(ones.clone())
                .matmul(compute.cast(ones.clone()).transpose())
                .cast(FloatDType::F32),
        )
        .register(convolved(compute.cast(ones)).cast(FloatDType::F32));
    let data = read(transaction)?;
    let first = |index: usize| {
        data[index]
            .iter::<f32>()
            .next()
            .expect("every check gives at least one number")
    };
    Ok(SelfTest {
        device: device_name(&device),
        dtype: compute.dtype,
        detects_inf: !first(0).is_finite(),
        detects_nan: !first(1).is_finite(),
        detects_computed_nan: !first(2).is_finite(),
        passes_largest_finite: first(3).is_finite(),
        doubled_60000: first(4),
        matmul_of_4096_ones: first(5),
        convolution_of_4096_ones: first(6),
    })
}

/// The sum of 4,096 ones as a convolution.
fn convolved(ones: Tensor<2>) -> Tensor<4> {
    let image = ones.reshape([1, 1, 64, 64]);
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    conv2d(image.clone(), image, None, options)
}
