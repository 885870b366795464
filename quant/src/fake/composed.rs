//! Fake quantization composed of a backend's operations.

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{BoolDType, Shape, Slice};
use burn_lean_reparam::reductions::AXIS;

use crate::fake::Clip;
use crate::fake::kernel::{LearnedGradients, Rule, Wanted};
use crate::format::groups::Groups;
use crate::format::number_format::Grid;
use crate::format::step::Floats;

pub(crate) fn quantize_dequantize<B: Backend>(
    x: FloatTensor<B>,
    scale: FloatTensor<B>,
    zero_point: FloatTensor<B>,
    rule: &Rule,
) -> FloatTensor<B> {
    let x = Operands::<B>::new(x, scale, zero_point, rule);
    let clamped = x.clamp(x.number());
    x.dequantize(clamped)
}

pub(crate) fn quantize_dequantize_masked<B: Backend>(
    x: FloatTensor<B>,
    scale: FloatTensor<B>,
    zero_point: FloatTensor<B>,
    rule: &Rule,
) -> (FloatTensor<B>, BoolTensor<B>) {
    let x = Operands::<B>::new(x, scale, zero_point, rule);
    let number = x.number();
    let clipped = B::bool_reshape(x.is_beyond_bounds(number.clone()), x.shape.clone());
    (x.dequantize(x.clamp(number)), clipped)
}

pub(crate) fn learned_gradients<B: Backend>(
    x: FloatTensor<B>,
    scale: FloatTensor<B>,
    zero_point: FloatTensor<B>,
    dy: FloatTensor<B>,
    rule: &Rule,
    wanted: Wanted,
) -> LearnedGradients<FloatTensor<B>> {
    let x = Operands::<B>::new(x, scale, zero_point, rule);
    let dy = B::float_reshape(dy, x.cut.clone());
    let number = x.number();
    let clamped = x.clamp(number.clone());
    let exact = B::float_div(x.x.clone(), x.scale.clone());
    let clipped = match wanted.clip {
        Clip::AfterRounding => x.is_beyond_bounds(number),
        Clip::BeforeRounding => x.reaches_bounds(exact.clone()),
    };
    let of_scale = {
        let exact = B::float_mask_fill(exact, clipped.clone(), 0f32.into());
        B::float_sub(x.without_zero_point(clamped), exact)
    };
    let zero_point = wanted.zero_point.then(|| {
        let of_zero = B::float_neg(B::float_mul(dy.clone(), x.scale.clone()));
        let inside = B::bool_not(clipped.clone());
        sum::<B>(
            B::float_mask_fill(of_zero, inside, 0f32.into()),
            &rule.groups,
        )
    });
    let dx = B::float_mask_fill(dy.clone(), clipped, 0f32.into());
    LearnedGradients {
        x: B::float_reshape(dx, x.shape.clone()),
        scale: sum::<B>(B::float_mul(dy, of_scale), &rule.groups),
        zero_point,
    }
}

pub(crate) fn range<B: Backend>(
    x: FloatTensor<B>,
    groups: &Groups,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let x = B::float_reshape(x, groups.cut());
    let counts = Shape::from([groups.count()]);
    let dims = groups.element_dims();
    let reduce = |of: fn(FloatTensor<B>, usize) -> FloatTensor<B>| {
        let reduced = dims
            .iter()
            .fold(x.clone(), |x, dim| along::<B>(x, *dim, of));
        B::float_reshape(reduced, counts.clone())
    };
    (reduce(B::float_min_dim), reduce(B::float_max_dim))
}

/// Sums over the elements of each group, `[groups]`, of terms in any shape.
pub(crate) fn sum<B: Backend>(terms: FloatTensor<B>, groups: &Groups) -> FloatTensor<B> {
    let terms = B::float_reshape(terms, groups.cut());
    let dims = groups.element_dims();
    let sums = dims.iter().fold(terms, |terms, dim| {
        along::<B>(terms, *dim, B::float_sum_dim)
    });
    B::float_reshape(sums, Shape::from([groups.count()]))
}

/// A reduction in steps, as those of [`reductions`](burn_lean_reparam::reductions).
fn along<B: Backend>(
    mut x: FloatTensor<B>,
    dim: usize,
    of: fn(FloatTensor<B>, usize) -> FloatTensor<B>,
) -> FloatTensor<B> {
    loop {
        let shape = x.shape();
        let count = shape[dim];
        if count <= AXIS {
            return of(x, dim);
        }
        let rows = count / AXIS;
        let part = |x: FloatTensor<B>, range: Range<usize>| {
            let mut slices = vec![Slice::full(); shape.num_dims()];
            slices[dim] = Slice::from(range);
            B::float_slice(x, &slices)
        };
        let (mut cut, mut reduced) = (shape.to_vec(), shape.clone());
        cut.splice(dim..=dim, [rows, AXIS]);
        reduced[dim] = rows;
        let whole = B::float_reshape(part(x.clone(), 0..rows * AXIS), Shape::from(cut));
        let whole = B::float_reshape(of(whole, dim + 1), reduced);
        x = match rows * AXIS < count {
            true => B::float_cat(vec![whole, of(part(x, rows * AXIS..count), dim)], dim),
            false => whole,
        };
    }
}

/// A tensor cut along its groups, with scale and zero point in shapes that broadcast.
struct Operands<'a, B: Backend> {
    rule: &'a Rule,
    bool_dtype: BoolDType,
    /// The shape of the tensor.
    shape: Shape,
    /// The length of each run.
    cut: Shape,
    x: FloatTensor<B>,
    scale: FloatTensor<B>,
    zero_point: FloatTensor<B>,
}

impl<'a, B: Backend> Operands<'a, B> {
    fn new(
        x: FloatTensor<B>,
        scale: FloatTensor<B>,
        zero_point: FloatTensor<B>,
        rule: &'a Rule,
    ) -> Self {
        let cut = rule.groups.cut();
        let mut broadcast = cut.clone();
        for dim in rule.groups.element_dims() {
            broadcast[dim] = 1;
        }
        Self {
            rule,
            bool_dtype: get_or_init_device_settings::<B>(&x.device()).bool_dtype,
            shape: x.shape(),
            x: B::float_reshape(x, cut.clone()),
            cut,
            scale: B::float_reshape(scale, broadcast.clone()),
            zero_point: B::float_reshape(zero_point, broadcast),
        }
    }

    /// The nearest number of the grid continued beyond its bounds, plus the zero point.
    fn number(&self) -> FloatTensor<B> {
        // The reciprocal of the few scales, as PyTorch has it, not a division for each element.
        let scaled = B::float_mul(self.x.clone(), B::float_recip(self.scale.clone()));
        match self.rule.grid {
            Grid::Int { .. } => B::float_add(B::float_round(scaled), self.zero_point.clone()),
            Grid::Float { floats, max } => self.nearest_float(scaled, floats, max),
        }
    }

    /// `x / 2ᵉ⁻ᵐ` is rounded, with m = `mantissa_bits` and e the exponent of x or the least one.
    fn nearest_float(&self, x: FloatTensor<B>, floats: Floats, max: f32) -> FloatTensor<B> {
        let Floats {
            mantissa_bits,
            min_exponent,
        } = floats;
        let power_of_two = |exponent: i32| f32::exp2(exponent as f32);
        let x = self.clamp_to(x, -2.0 * max, 2.0 * max);

        // The exponent bit by bit: by comparisons and products with powers of two, all exact.
        let mut magnitude = B::float_abs(x.clone());
        let ones = B::float_ones(x.shape(), &x.device(), x.dtype().into());
        let least = min_exponent - mantissa_bits;
        let mut step = B::float_mul_scalar(ones.clone(), power_of_two(least).into());
        let mut inverse = B::float_mul_scalar(ones, power_of_two(-least).into());
        for exponent in [16, 8, 4, 2, 1] {
            let bound = power_of_two(min_exponent + exponent);
            if bound > 2.0 * max {
                continue;
            }
            let (up, down) = (power_of_two(exponent), power_of_two(-exponent));
            let large =
                B::float_greater_equal_elem(magnitude.clone(), bound.into(), self.bool_dtype);
            let scale_large = |tensor: FloatTensor<B>, factor: f32| {
                let scaled = B::float_mul_scalar(tensor.clone(), factor.into());
                B::float_mask_where(tensor, large.clone(), scaled)
            };
            magnitude = scale_large(magnitude, down);
            step = scale_large(step, up);
            inverse = scale_large(inverse, down);
        }
        B::float_mul(B::float_round(B::float_mul(x, inverse)), step)
    }

    fn clamp(&self, number: FloatTensor<B>) -> FloatTensor<B> {
        let (min, max) = self.rule.grid.bounds();
        self.clamp_to(number, min, max)
    }

    /// By comparisons, which NaN passes through; the clamp of some devices drops it.
    fn clamp_to(&self, x: FloatTensor<B>, min: f32, max: f32) -> FloatTensor<B> {
        let low = B::float_lower_elem(x.clone(), min.into(), self.bool_dtype);
        let x = B::float_mask_fill(x, low, min.into());
        let high = B::float_greater_elem(x.clone(), max.into(), self.bool_dtype);
        B::float_mask_fill(x, high, max.into())
    }

    /// Where a number is beyond the bounds, or NaN, for which no comparison holds. (Testing whether
    /// the clamp changed it would not do: NaN equals itself on some devices.)
    fn is_beyond_bounds(&self, number: FloatTensor<B>) -> BoolTensor<B> {
        let (min, max) = self.rule.grid.bounds();
        let above = B::float_greater_equal_elem(number.clone(), min.into(), self.bool_dtype);
        let below = B::float_lower_equal_elem(number, max.into(), self.bool_dtype);
        B::bool_not(B::bool_and(above, below))
    }

    /// Where x / scale is at a bound or beyond, or NaN.
    fn reaches_bounds(&self, exact: FloatTensor<B>) -> BoolTensor<B> {
        let (min, max) = self.rule.grid.bounds();
        let exact = match self.rule.grid {
            Grid::Int { .. } => B::float_add(exact, self.zero_point.clone()),
            Grid::Float { .. } => exact,
        };
        let above = B::float_greater_elem(exact.clone(), min.into(), self.bool_dtype);
        let below = B::float_lower_elem(exact, max.into(), self.bool_dtype);
        B::bool_not(B::bool_and(above, below))
    }

    fn without_zero_point(&self, number: FloatTensor<B>) -> FloatTensor<B> {
        match self.rule.grid {
            Grid::Int { .. } => B::float_sub(number, self.zero_point.clone()),
            // Float formats have none, and −0 stays −0.
            Grid::Float { .. } => number,
        }
    }

    fn dequantize(&self, number: FloatTensor<B>) -> FloatTensor<B> {
        let y = B::float_mul(self.without_zero_point(number), self.scale.clone());
        let y = match self.rule.limit {
            Some(limit) => self.limit_finite(y, limit),
            None => y,
        };
        B::float_reshape(y, self.shape.clone())
    }

    /// What is finite, within the limit on both sides.
    fn limit_finite(&self, y: FloatTensor<B>, limit: f32) -> FloatTensor<B> {
        let size = B::float_abs(y.clone());
        let is_finite = B::float_lower_equal_elem(size.clone(), f32::MAX.into(), self.bool_dtype);
        let beyond = B::float_greater_elem(size, limit.into(), self.bool_dtype);
        let limited = self.clamp_to(y.clone(), -limit, limit);
        B::float_mask_where(y, B::bool_and(beyond, is_finite), limited)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
