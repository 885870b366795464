//! Scale and zero point, and what they are computed from.
//!
//! The formulas are those of PyTorch's observers
//! (`torch.ao.quantization.observer._calculate_qparams`), and for learned step sizes those of
//! [Learned Step Size Quantization, Esser et al., 2020](https://arxiv.org/abs/1902.08153) and
//! [LSQ+, Bhalgat et al., 2020](https://arxiv.org/abs/2004.09576).

use burn::tensor::{FloatDType, Tensor};

use crate::format::groups::Groups;
use crate::{Mapping, QuantError, Scheme, fake::Range};

/// The scale and the zero point of each group.
///
/// A real number x has the quantized number
/// q = clamp(round(x · (1/scale)) + zero_point, quant_min, quant_max), and that stands for
/// (q − zero_point) · scale. Both tensors are `[groups]`, in row-major order of [`Scheme::group_shape`]. Those of
/// ranges and of tensors are F32; others are cast to it where numbers are quantized with them.
#[derive(Debug, Clone)]
pub struct QuantParams {
    /// Real value of one step, > 0. Where (q − zero_point) · scale is beyond ±3.4e38 for some q, as that of a range
    /// which ends within a step of the largest F32, those q stand for infinities.
    pub scale: Tensor<1>,
    /// Number that stands for 0.0: an integer from quant_min to quant_max.
    pub zero_point: Tensor<1>,
}

/// Whether a number is the step of a grid: positive, finite, and not so small that it has no inverse or
/// that a GPU takes it for 0.
pub(crate) fn is_scale(scale: f32) -> bool {
    scale > 0.0 && scale.is_normal()
}

impl QuantParams {
    /// The smallest scale that a range gives, so that a constant zero tensor has one: 2⁻²³.
    pub const EPSILON: f32 = f32::EPSILON;

    /// Scales with the zero point of the symmetric mapping.
    pub fn symmetric(scale: Tensor<1>, scheme: &Scheme) -> Self {
        let zero_point = scale.full_like(scheme.symmetric_zero_point());
        Self { scale, zero_point }
    }

    /// What learned ones stand for: a scale above zero, and a zero point that is a number of the scheme.
    pub(crate) fn usable(self, scheme: &Scheme) -> Self {
        let zero_point = self.zero_point.round();
        Self {
            scale: self.scale.clamp_min(Self::EPSILON),
            zero_point: zero_point.clamp(scheme.quant_min(), scheme.quant_max()),
        }
    }

    /// The dtype that everything is computed in; gradients go back through the cast.
    pub(crate) fn in_f32(&self) -> Self {
        let of = |qparam: &Tensor<1>| qparam.clone().cast(FloatDType::F32);
        Self {
            scale: of(&self.scale),
            zero_point: of(&self.zero_point),
        }
    }

    /// Scale and zero point of a range, in F32 whatever it is in; 0 is always inside.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_quant::{NumberFormat, QuantParams, Scheme, fake::Range};
    ///
    /// let device = Device::flex();
    /// let range = Range {
    ///     min: Tensor::from_floats([-1.0], &device),
    ///     max: Tensor::from_floats([4.1], &device),
    /// };
    /// let qparams = QuantParams::from_range(range, &Scheme::affine(NumberFormat::uint8()));
    /// assert!((qparams.scale.into_scalar::<f32>() - 0.02).abs() < 1e-8);
    /// assert_eq!(qparams.zero_point.into_scalar::<f32>(), 50.0);
    /// ```
    pub fn from_range(range: Range, scheme: &Scheme) -> Self {
        let (quant_min, quant_max) = (scheme.quant_min(), scheme.quant_max());
        // In half, the smallest scales would be 0 or have a few bits.
        let [min, max] = [range.min, range.max].map(|bound| bound.cast(FloatDType::F32));
        match scheme.mapping {
            Mapping::Symmetric => {
                // The same as with 0 inside, in fewer operations.
                let largest = min.abs().max_pair(max.abs());
                let scale = largest.clone().div_scalar((quant_max - quant_min) / 2.0);
                let scale = scheme.scale_format.stored(scale, || largest, scheme);
                Self::symmetric(scale, scheme)
            }
            Mapping::SymmetricNoClipping => {
                let (min, max) = (min.clamp_max(0.0), max.clamp_min(0.0));
                let below = min.clone().div_scalar(quant_min);
                let scale = below.max_pair(max.clone().div_scalar(quant_max));
                let largest = || min.neg().max_pair(max);
                let scale = scheme.scale_format.stored(scale, largest, scheme);
                Self::symmetric(scale, scheme)
            }
            Mapping::Affine => {
                let (min, max) = (min.clamp_max(0.0), max.clamp_min(0.0));
                // Halves, since the whole may be more than the largest number: exact, so that nothing
                // else changes.
                let half = max.mul_scalar(0.5) - min.clone().mul_scalar(0.5);
                let scale = half.div_scalar(0.5 * (quant_max - quant_min));
                let scale = scale.clamp_min(Self::EPSILON);
                let zero_point = (min / scale.clone()).round().neg() + quant_min;
                Self {
                    scale,
                    zero_point: zero_point.clamp(quant_min, quant_max),
                }
            }
        }
    }

    /// Scale and zero point of the values at hand: memoryless or dynamic quantization.
    ///
    /// # Errors
    ///
    /// If the scheme cannot quantize the shape of `x`.
    pub fn of<const D: usize>(x: &Tensor<D>, scheme: &Scheme) -> Result<Self, QuantError> {
        Ok(Self::from_range(Range::of(x, scheme)?, scheme))
    }

    /// First scales of LSQ: 2 · mean|x| / √Qp, where Qp = quant_max − zero_point.
    ///
    /// The zero point is that of the symmetric mapping, or 0 for the affine one.
    ///
    /// # Errors
    ///
    /// If the scheme cannot quantize the shape of `x`.
    pub fn lsq<const D: usize>(x: &Tensor<D>, scheme: &Scheme) -> Result<Self, QuantError> {
        let (x, groups) = grouped(x, scheme)?;
        let zero_point = match scheme.mapping {
            Mapping::Affine => 0.0,
            _ => scheme.symmetric_zero_point(),
        };
        let mean = groups.mean(x.abs());
        let scale = mean.mul_scalar(2.0 / (scheme.quant_max() - zero_point).sqrt());
        // The sum of the largest numbers is infinite, which would make every number NaN.
        let scale = scale.clamp_min(Self::EPSILON).clamp_max(f32::MAX);
        Ok(Self {
            zero_point: scale.full_like(zero_point),
            scale,
        })
    }

    /// First scales of LSQ+ for weights: max(|μ − 3σ|, |μ + 3σ|) / 2ᵇ⁻¹.
    ///
    /// μ and σ are mean and standard deviation (of the population) of each group; b is the number
    /// of bits. The zero point is that of the symmetric mapping. For activations LSQ+ starts from
    /// [`from_range`](Self::from_range).
    ///
    /// # Errors
    ///
    /// If the scheme cannot quantize the shape of `x`.
    pub fn lsq_plus_weights<const D: usize>(
        x: &Tensor<D>,
        scheme: &Scheme,
    ) -> Result<Self, QuantError> {
        let shape = x.dims();
        let range = Range::of(x, scheme)?;
        let (x, groups) = grouped(x, scheme)?;
        // Squares of large numbers are infinite: those are computed with 2⁻⁸⁰ of the numbers.
        let size = range.min.neg().max_pair(range.max);
        let is_large = size.clone().greater_elem(f32::exp2(30.0));
        let factor = |exponent: f32| {
            let ones = size.full_like(1.0);
            ones.mask_fill(is_large.clone(), f32::exp2(exponent))
        };
        let x = x * groups.expand(factor(-80.0), shape);
        let mean = groups.mean(x.clone());
        let deviation = x - groups.expand(mean.clone(), shape);
        let three_sigma = groups.mean(deviation.square()).sqrt().mul_scalar(3.0);
        let largest = (mean.clone() - three_sigma.clone()).abs();
        let largest = largest.max_pair((mean + three_sigma).abs());
        let half = f32::exp2(f32::from(scheme.format.bits()) - 1.0);
        let scale = largest.div_scalar(half) * factor(80.0);
        let scale = scale.clamp_min(Self::EPSILON).clamp_max(f32::MAX);
        Ok(Self::symmetric(scale, scheme))
    }
}

/// The detached F32 values of a tensor, and its groups.
fn grouped<const D: usize>(
    x: &Tensor<D>,
    scheme: &Scheme,
) -> Result<(Tensor<D>, Groups), QuantError> {
    scheme.validate_choices()?;
    let groups = Groups::new(&scheme.granularity, &x.dims())?;
    Ok((x.clone().detach().cast(FloatDType::F32), groups))
}
