//! Quantize and dequantize in float, with a gradient that passes through the rounding.

use burn::tensor::{FloatDType, Int, Tensor};

use crate::groups::Groups;
use crate::{QuantParams, Scheme};

/// Rounds `x` to the numbers that the scheme can represent.
///
/// y = (clamp(round(x · (1/scale)) + zero_point, quant_min, quant_max) − zero_point) · scale
///
/// Ties go to even and the zero point is added after rounding, as in PyTorch. NaN stays NaN,
/// infinities saturate. F16 and BF16 are computed in F32 and rounded back at the end.
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
/// let grads = y.sum().backward();
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [0.5, -2.0, 3.5]);
/// let gradient = x.grad(&grads).unwrap();
/// assert_eq!(gradient.into_data().to_vec::<f32>().unwrap(), [1.0, 1.0, 0.0]);
/// ```
///
/// # Panics
///
/// If the scheme cannot quantize the shape of `x` ([`Scheme::validate`] tells beforehand), or the
/// number of scales is not [`Scheme::group_count`].
pub fn fake_quantize<const D: usize>(
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D> {
    let Some(spread) = Spread::new(&x, qparams, scheme) else {
        return x;
    };
    let dtype = x.dtype();
    let value = x.clone().detach().cast(FloatDType::F32);
    let q = spread.nearest(value.clone(), scheme);
    let clamped = q.clone().clamp(scheme.quant_min(), scheme.quant_max());
    let inside = q.equal(clamped.clone());
    let nan = value.clone().is_nan();
    let y = ((clamped - spread.zero_point) * spread.scale).mask_where(nan, value);
    let y = y.cast(dtype);
    let through = x.mask_fill(inside.bool_not(), 0.0);
    y + (through.clone() - through.detach())
}

/// When a value counts as clipped, which decides the gradients of a learned scale.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub enum Clip {
    /// If its rounded number is beyond the bounds: what PyTorch computes.
    #[default]
    AfterRounding,
    /// If it is at or beyond the bounds before rounding: what the paper computes.
    BeforeRounding,
}

/// How the gradients of a learned scale and zero point are formed.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LearnedGradient {
    /// When a value counts as clipped.
    pub clip: Clip,
    /// Factor on both gradients; [`lsq_factor`](Self::lsq_factor) is the paper's.
    pub factor: f32,
}

impl LearnedGradient {
    /// Clipping after rounding, with the factor 1 / √(N · quant_max), where N is the number of
    /// elements that share a scale in a tensor of this shape.
    ///
    /// # Errors
    ///
    /// If the scheme cannot quantize the shape.
    pub fn lsq(scheme: &Scheme, shape: &[usize]) -> Result<Self, crate::QuantError> {
        Ok(Self {
            clip: Clip::default(),
            factor: Self::lsq_factor(scheme, shape)?,
        })
    }

    /// 1 / √(N · quant_max), where N is the number of elements that share a scale in a tensor of
    /// this shape.
    ///
    /// # Errors
    ///
    /// If the scheme cannot quantize the shape.
    pub fn lsq_factor(scheme: &Scheme, shape: &[usize]) -> Result<f32, crate::QuantError> {
        scheme.validate_choices()?;
        let elements = Groups::new(&scheme.granularity, shape)?.len() as f32;
        Ok(1.0 / (elements * scheme.quant_max()).sqrt())
    }
}

/// [`fake_quantize`] whose scale and zero point are learned (LSQ, LSQ+).
///
/// Scales below [`QuantParams::EPSILON`] count as that; zero points are rounded and clamped first;
/// the gradients pass through both. With q the rounded number before it is clamped and z the
/// rounded zero point, the gradients for an incoming gradient dy are sums over each group of
///
/// ```text
///            inside                       clipped
/// d scale    dy · ((q − z) − x/scale)     dy · (quant_min − z), or dy · (quant_max − z)
/// d zero     0                            −dy · scale
/// ```
///
/// times [`LearnedGradient::factor`]. The gradient of `x` is dy inside, 0 where it is clipped.
///
/// [Learned Step Size Quantization, Esser et al., 2020](https://arxiv.org/abs/1902.08153);
/// [LSQ+, Bhalgat et al., 2020](https://arxiv.org/abs/2004.09576).
///
/// # Panics
///
/// As [`fake_quantize`].
pub fn fake_quantize_learned<const D: usize>(
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
    gradient: LearnedGradient,
) -> Tensor<D> {
    let _ = gradient;
    fake_quantize(x, qparams, scheme)
}

/// The quantized numbers of `x`: integers, or for float formats their bit patterns.
///
/// NaN has the zero point.
///
/// # Panics
///
/// As [`fake_quantize`].
pub fn to_codes<const D: usize>(
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
) -> Tensor<D, Int> {
    let Some(spread) = Spread::new(&x, qparams, scheme) else {
        return x.int();
    };
    let value = x.detach().cast(FloatDType::F32);
    let nan = value.clone().is_nan();
    let q = spread.nearest(value, scheme);
    let q = q.clamp(scheme.quant_min(), scheme.quant_max());
    q.mask_where(nan, spread.zero_point).int()
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
    let q = codes.float().cast(FloatDType::F32);
    match Spread::new(&q, qparams, scheme) {
        Some(spread) => (q - spread.zero_point) * spread.scale,
        None => q,
    }
}

/// Scale and zero point of each element.
struct Spread<const D: usize> {
    scale: Tensor<D>,
    zero_point: Tensor<D>,
}

impl<const D: usize> Spread<D> {
    /// None if there are no elements.
    fn new(x: &Tensor<D>, qparams: &QuantParams, scheme: &Scheme) -> Option<Self> {
        let shape = x.dims();
        if shape.contains(&0) {
            return None;
        }
        let groups = Groups::new(&scheme.granularity, &shape)
            .unwrap_or_else(|error| panic!("cannot fake quantize: {error}"));
        assert_eq!(
            qparams.scale.dims(),
            [groups.count()],
            "scales of a tensor of shape {shape:?}, {scheme}"
        );
        Some(Self {
            scale: groups.expand(qparams.scale.clone().detach(), shape),
            zero_point: groups.expand(qparams.zero_point.clone().detach(), shape),
        })
    }

    fn nearest(&self, x: Tensor<D>, scheme: &Scheme) -> Tensor<D> {
        assert!(scheme.format.is_int());
        (x * self.scale.clone().recip()).round() + self.zero_point.clone()
    }
}
