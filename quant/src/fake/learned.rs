//! Fake quantization with a learned scale and zero point: LSQ and LSQ+.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::fake::kernel::Rule;
use crate::fake::straight_through::StraightThrough;
use crate::format::groups::Groups;
use crate::{QuantError, QuantParams, Scheme};

/// When a value counts as clipped, which decides the gradients of a learned scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Clip {
    /// If its rounded number is beyond the bounds: what PyTorch computes.
    #[default]
    AfterRounding,
    /// If it is at or beyond the bounds before rounding: what the paper computes.
    BeforeRounding,
}

/// How the gradients of a learned scale and zero point are formed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
    pub fn lsq(scheme: &Scheme, shape: &[usize]) -> Result<Self, QuantError> {
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
    pub fn lsq_factor(scheme: &Scheme, shape: &[usize]) -> Result<f32, QuantError> {
        scheme.validate_choices()?;
        let elements = Groups::new(&scheme.granularity, shape)?.len() as f32;
        Ok(1.0 / (elements * scheme.quant_max()).sqrt())
    }
}

/// [`fake_quantize`](crate::fake_quantize()) whose scale and zero point are learned (LSQ, LSQ+).
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
/// times [`LearnedGradient::factor`]. The gradient of `x` is dy inside, 0 where it is clipped. Each has the
/// dtype of what it is the gradient of, and is computed in F32.
///
/// [Learned Step Size Quantization, Esser et al., 2020](https://arxiv.org/abs/1902.08153);
/// [LSQ+, Bhalgat et al., 2020](https://arxiv.org/abs/2004.09576).
///
/// # Panics
///
/// As [`fake_quantize`](crate::fake_quantize()).
pub fn fake_quantize_learned<const D: usize>(
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
    gradient: LearnedGradient,
) -> Tensor<D> {
    let dtype = x.dtype();
    fake_quantize_learned_as(dtype, x, qparams, scheme, gradient)
}

/// The same of values that were of this dtype, and come back in it; `x` is what they are, or F32 already.
pub(crate) fn fake_quantize_learned_as<const D: usize>(
    dtype: DType,
    x: Tensor<D>,
    qparams: &QuantParams,
    scheme: &Scheme,
    gradient: LearnedGradient,
) -> Tensor<D> {
    let Some((rule, QuantParams { scale, zero_point })) = Rule::new(dtype, &x, qparams, scheme)
    else {
        return x;
    };
    rule.in_whole_groups(dtype, x, |x, rule| {
        let [scale, zero_point] = [scale, zero_point].map(Tensor::into_dispatch);
        Dispatch::fake_quantize_learned(x, scale, zero_point, rule, gradient)
    })
}
