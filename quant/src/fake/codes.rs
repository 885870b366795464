//! Quantized numbers as integers.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use crate::fake::kernel::Rule;
use crate::fake_quantize;
use crate::{NumberFormat, QuantParams, Scheme};

/// The quantized numbers of `x`: integers, or for float formats their bit patterns
/// ([`NumberFormat::to_bits`]).
///
/// NaN has the code of 0.0. Float formats are encoded on the host, so they are read from the
/// device.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{NumberFormat, QuantParams, Scheme, fake::{from_codes, to_codes}};
///
/// let device = Device::flex();
/// let scheme = Scheme::affine(NumberFormat::uint8());
/// let qparams = QuantParams {
///     scale: Tensor::from_floats([0.5], &device),
///     zero_point: Tensor::from_floats([10.0], &device),
/// };
/// let x = Tensor::<1>::from_floats([-100.0, 0.0, 1.25], &device);
///
/// let codes = to_codes(x, &qparams, &scheme);
/// let x = from_codes(codes.clone(), &qparams, &scheme);
/// assert_eq!(codes.into_data().iter::<i32>().collect::<Vec<_>>(), [0, 10, 12]);
/// assert_eq!(x.into_data().to_vec::<f32>().unwrap(), [-5.0, 0.0, 1.0]);
/// ```
///
/// # Panics
///
/// As [`fake_quantize`].
pub fn to_codes<const D: usize>(
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D, Int> {
    let Some((Rule { groups, .. }, qparams)) = Rule::new(x.dtype(), &x, qparams, scheme) else {
        return x.int();
    };
    let shape = x.dims();
    let x = x.detach().cast(FloatDType::F32);
    let x = x.clone().mask_fill(x.is_nan(), 0.0);
    let spread = |qparam: &Tensor<1>| groups.expand(qparam.clone().detach(), shape);
    let y = fake_quantize(x, &qparams, scheme);
    // The quotient is off its number by a rounding error or two.
    let numbers = y / spread(&qparams.scale);
    match scheme.format {
        NumberFormat::Int { .. } => (numbers.round() + spread(&qparams.zero_point)).int(),
        float => {
            let device = numbers.device();
            let numbers = numbers.into_data();
            let bits = numbers.iter::<f32>().map(|number| {
                // Rounded again for the same reason.
                i32::from(float.to_bits(number))
            });
            let bits: Vec<i32> = bits.collect();
            Tensor::from_data(TensorData::new(bits, shape), &device)
        }
    }
}

/// The real numbers that quantized numbers stand for: (q − zero_point) · scale, F32.
///
/// # Panics
///
/// As [`fake_quantize`].
pub fn from_codes<const D: usize>(
    codes: Tensor<D, Int>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D> {
    let shape = codes.dims();
    let numbers = match scheme.format {
        NumberFormat::Int { .. } => codes.float().cast(FloatDType::F32),
        float => {
            let device = codes.device();
            let codes = codes.into_data();
            let numbers = codes.iter::<i32>().map(|bits| float.from_bits(bits as u8));
            let numbers: Vec<f32> = numbers.collect();
            let numbers = TensorData::new(numbers, shape);
            Tensor::from_data(numbers, (&device, DType::F32))
        }
    };
    from_numbers(numbers, qparams, scheme)
}

/// As [`from_codes`], of integer codes that are held as floats.
pub(crate) fn from_numbers<const D: usize>(
    numbers: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D> {
    let dtype = numbers.dtype();
    let Some((Rule { groups, .. }, qparams)) = Rule::new(dtype, &numbers, qparams, scheme) else {
        return numbers;
    };
    let shape = numbers.dims();
    let spread = |qparam: &Tensor<1>| groups.expand(qparam.clone().detach(), shape);
    (numbers - spread(&qparams.zero_point)) * spread(&qparams.scale)
}
