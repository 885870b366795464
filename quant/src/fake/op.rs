//! Quantize and dequantize in float, with a gradient that passes through the rounding.

use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, FloatDType, Tensor};

use crate::fake::compiled;
use crate::fake::kernel::Rule;
use crate::fake::straight_through::StraightThrough;
use crate::format::groups::{Groups, Padding};
use crate::{QuantParams, Scheme};

/// Rounds `x` to the numbers that the scheme can represent.
///
/// y = (clamp(round(x · (1/scale)) + zero_point, quant_min, quant_max) − zero_point) · scale
///
/// Ties go to even and the zero point is added after rounding, as in PyTorch. NaN stays NaN,
/// infinities saturate. Other dtypes than F32, also of scales and zero points, are computed in F32, and y is cast
/// back at the end; a finite y beyond F16 becomes ±65504. A y beyond ±3.4e38, the largest of F32 and BF16, is infinite,
/// in F64 too: the last numbers of a range that ends within a step of that.
///
/// The gradient (straight-through estimator) is that of y where the rounded number lies from
/// quant_min to quant_max before it is clamped, and 0 elsewhere. The quantization parameters get
/// none.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{NumberFormat, QuantParams, Scheme, fake_quantize};
///
/// let device = Device::flex().autodiff();
/// let scheme = Scheme::symmetric(NumberFormat::int(4));
/// let x = Tensor::<1>::from_floats([0.3, -2.25, 9.0], &device).require_grad();
/// let qparams = QuantParams::symmetric(Tensor::from_floats([0.5], &device), &scheme);
///
/// let y = fake_quantize(x.clone(), &qparams, &scheme);
/// let grads = y.clone().sum().backward();
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [0.5, -2.0, 3.5]);
/// let gradient = x.grad(&grads).unwrap();
/// assert_eq!(gradient.into_data().to_vec::<f32>().unwrap(), [1.0, 1.0, 0.0]);
/// ```
///
/// # Panics
///
/// If the scheme cannot quantize the shape of `x` ([`Scheme::validate`] tells beforehand), or the
/// number of scales is not [`Scheme::group_count`], or this crate was built without the cargo feature
/// of the backend.
pub fn fake_quantize<const D: usize>(
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D> {
    let dtype = x.dtype();
    fake_quantize_as(dtype, x, qparams, scheme)
}

/// The same of values that were of this dtype, and come back in it; `x` is what they are, or F32 already.
pub(crate) fn fake_quantize_as<const D: usize>(
    dtype: DType,
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D> {
    let Some((rule, QuantParams { scale, zero_point })) = Rule::new(dtype, &x, qparams, scheme)
    else {
        return x;
    };
    rule.in_whole_groups(dtype, x, |x, rule| {
        let [scale, zero_point] = [scale, zero_point].map(Tensor::into_dispatch);
        Dispatch::fake_quantize(x, scale, zero_point, rule)
    })
}

/// 1 for each value that [`fake_quantize`] clips, 0 for the others, in F32 and without gradient: those whose rounded
/// number is beyond the format before it is clamped, and NaN.
pub(crate) fn clipped<const D: usize>(
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D> {
    let dtype = DType::F32;
    let Some((rule, QuantParams { scale, zero_point })) = Rule::new(dtype, &x, qparams, scheme)
    else {
        return x;
    };
    rule.in_whole_groups(dtype, x, |x, rule| {
        let [scale, zero_point] = [scale, zero_point].map(Tensor::into_dispatch);
        Dispatch::clipped(x, scale, zero_point, rule)
    })
}

/// The largest number of F16.
const LARGEST_HALF: f32 = 65504.0;

/// F32 `values` in a dtype, as [`fake_quantize`] gives them: finite ones beyond F16 become ±65504.
pub(crate) fn to_dtype<const D: usize>(values: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    if (values.dtype(), dtype) != (DType::F32, FloatDType::F16) {
        return values.cast(dtype);
    }
    let is_finite = values.clone().abs().lower_equal_elem(f32::MAX);
    let limited = values.clone().clamp(-LARGEST_HALF, LARGEST_HALF);
    values.mask_where(is_finite, limited).cast(dtype)
}

impl Rule {
    /// For values of this dtype in the shape of `x`, with scales and zero points in F32, which whatever computes
    /// with them reads; gradients pass through the cast. None if `x` has no elements.
    ///
    /// # Panics
    ///
    /// As [`fake_quantize`].
    pub(crate) fn new<const D: usize>(
        dtype: DType,
        x: &Tensor<D>,
        qparams: &QuantParams,
        scheme: &Scheme,
    ) -> Option<(Self, QuantParams)> {
        let shape = x.dims();
        if shape.contains(&0) {
            return None;
        }
        let groups = compiled::check(&x.device())
            .and_then(|()| scheme.validate_choices())
            .and_then(|()| Groups::new(&scheme.granularity, &shape))
            .unwrap_or_else(|error| panic!("cannot fake quantize: {error}"));
        let found = [&qparams.scale, &qparams.zero_point].map(|qparams| qparams.dims());
        assert_eq!(
            found,
            [[groups.count()]; 2],
            "scales and zero points for shape {shape:?}, {scheme}"
        );
        let rule = Self {
            grid: scheme.format.grid(),
            groups,
            limit: (dtype == DType::F16).then_some(LARGEST_HALF),
        };
        Some((rule, qparams.in_f32()))
    }

    /// What `quantize` makes of `x` in F32 and in whole groups, in this dtype. Added zeros get no gradient.
    pub(crate) fn in_whole_groups<const D: usize>(
        self,
        dtype: DType,
        x: Tensor<D>,
        quantize: impl FnOnce(DispatchTensor, Self) -> DispatchTensor,
    ) -> Tensor<D> {
        let groups = self.groups.clone();
        let x = groups.pad(x.cast(FloatDType::F32).into_dispatch(), Padding::Zeros);
        let y = groups.cut_off(quantize(x, self));
        Tensor::<D>::from_dispatch(y).cast(dtype)
    }
}
