//! Scales in the format that they are stored in.

use burn::tensor::{DType, Tensor};
use burn_lean_reparam::reductions;

use crate::fake::op::fake_quantize;
use crate::fake::qparams::QuantParams;
use crate::format::{Mapping, NumberFormat, ScaleFormat, ScaleRounding, Scheme};

impl ScaleFormat {
    /// The stored scales of groups whose largest magnitudes are `largest`, which few formats ask for; `scale`
    /// is what they would be in F32.
    pub(crate) fn stored(
        self,
        scale: Tensor<1>,
        largest: impl FnOnce() -> Tensor<1>,
        scheme: &Scheme,
    ) -> Tensor<1> {
        // The scales of a microscaling format reach further down than any F32 tensor needs, but
        // not to 0.
        const LEAST: f32 = 1e-30;
        match self {
            Self::F32 => scale.clamp_min(QuantParams::EPSILON),
            Self::PowerOfTwo(ScaleRounding::Up) => {
                let scale = scale.clamp_min(LEAST);
                let below = power_of_two_below(scale.clone());
                let above = below.clone().mul_scalar(2.0);
                above.mask_where(below.clone().equal(scale), below)
            }
            Self::PowerOfTwo(ScaleRounding::Standard) => {
                let exponent = scheme.quant_max().log2().floor();
                power_of_two_below(largest().clamp_min(LEAST)).mul_scalar(f32::exp2(-exponent))
            }
            Self::E4M3(rounding) => {
                // The largest scale of the tensor is the largest E4M3 number.
                let largest_scale = NumberFormat::E4M3.quant_max();
                let of_tensor = match scheme.mapping {
                    // Not half of the numbers wide, but as wide as the side that needs more.
                    Mapping::SymmetricNoClipping => {
                        reductions::max(scale.clone()).div_scalar(largest_scale)
                    }
                    _ => {
                        let half_width = (scheme.quant_max() - scheme.quant_min()) / 2.0;
                        reductions::max(largest()).div_scalar(largest_scale * half_width)
                    }
                };
                let of_tensor = of_tensor.clamp_min(LEAST);
                let of_group = scale.clone() / of_tensor.clone();
                let of_group = match rounding {
                    ScaleRounding::Standard => {
                        // From the smallest normal number on.
                        nearest_e4m3(of_group).clamp(f32::exp2(-6.0), largest_scale)
                    }
                    ScaleRounding::Up => e4m3_above(of_group).clamp(f32::exp2(-9.0), largest_scale),
                };
                // No number of E4M3 stands for an infinity or a NaN, which would come out finite.
                let is_finite = scale.clone().abs().lower_equal_elem(f32::MAX);
                scale.mask_where(is_finite, of_group * of_tensor)
            }
        }
    }
}

/// The largest power of two that is not above `x`, for `x` from 2⁻¹²⁶; what is not finite stays.
fn power_of_two_below(x: Tensor<1>) -> Tensor<1> {
    // By comparisons and products with powers of two, which are exact; a logarithm is not.
    let mut power = x.ones_like();
    let mut rest = x.clone();
    for exponent in [64, 32, 16, 8, 4, 2, 1] {
        let up = f32::exp2(exponent as f32);
        for (factor, applies) in [
            (up, rest.clone().greater_equal_elem(up)),
            (1.0 / up, rest.clone().lower_elem(2.0 / up)),
        ] {
            let scaled = rest.clone().mul_scalar(1.0 / factor);
            rest = rest.mask_where(applies.clone(), scaled);
            power = power.clone().mask_where(applies, power.mul_scalar(factor));
        }
    }
    let is_finite = x.clone().abs().lower_equal_elem(f32::MAX);
    x.mask_where(is_finite, power)
}

fn nearest_e4m3(x: Tensor<1>) -> Tensor<1> {
    let scheme = Scheme::symmetric(NumberFormat::E4M3);
    let unit = QuantParams::symmetric(Tensor::ones([1], (&x.device(), DType::F32)), &scheme);
    fake_quantize(x, &unit, &scheme)
}

/// The smallest E4M3 number that is not below `x`.
fn e4m3_above(x: Tensor<1>) -> Tensor<1> {
    let nearest = nearest_e4m3(x.clone());
    let step = power_of_two_below(nearest.clone().clamp_min(f32::exp2(-6.0))).mul_scalar(0.125);
    let next = nearest.clone() + step;
    let below = nearest.clone().lower(x);
    nearest.mask_where(below, next)
}
