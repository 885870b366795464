//! Fake quantization of a backend's tensors: composed of its operations, or in one pass over
//! memory where the backend's memory is the host's.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{BoolDType, Shape};

use crate::Clip;
use crate::groups::{Counts, Groups};
use crate::number_format::Grid;
use crate::step::Floats;

/// What to round to, and which elements share a scale.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub(crate) grid: Grid,
    pub(crate) groups: Groups,
}

/// Fake quantization and its gradients. All tensors are F32; scales and zero points `[groups]`.
pub(crate) trait Kernel: Backend {
    /// What the quantized `x` stands for.
    fn quantize_dequantize(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> FloatTensor<Self> {
        let x = Operands::<Self>::new(x, scale, zero_point, rule);
        let clamped = x.clamp(x.number());
        x.dequantize(clamped)
    }

    /// As [`quantize_dequantize`](Self::quantize_dequantize), with where `x` was clipped or is NaN.
    fn quantize_dequantize_masked(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> (FloatTensor<Self>, BoolTensor<Self>) {
        let x = Operands::<Self>::new(x, scale, zero_point, rule);
        let number = x.number();
        let clipped = Self::bool_reshape(x.is_beyond_bounds(number.clone()), x.shape.clone());
        (x.dequantize(x.clamp(number)), clipped)
    }

    /// The gradients of `x`, scale and zero point for an incoming gradient `dy`.
    fn learned_gradients(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        rule: &Rule,
        clip: Clip,
    ) -> [FloatTensor<Self>; 3] {
        let x = Operands::<Self>::new(x, scale, zero_point, rule);
        let dy = Self::float_reshape(dy, x.cut.clone());
        let number = x.number();
        let clamped = x.clamp(number.clone());
        let exact = Self::float_div(x.x.clone(), x.scale.clone());
        let clipped = match clip {
            Clip::AfterRounding => x.is_beyond_bounds(number),
            Clip::BeforeRounding => x.reaches_bounds(exact.clone()),
        };
        let inside = Self::bool_not(clipped.clone());
        let of_scale = {
            let exact = Self::float_mask_fill(exact, clipped.clone(), 0f32.into());
            Self::float_sub(x.without_zero_point(clamped), exact)
        };
        let of_zero = Self::float_neg(Self::float_mul(dy.clone(), x.scale.clone()));
        let dx = Self::float_mask_fill(dy.clone(), clipped, 0f32.into());
        [
            Self::float_reshape(dx, x.shape.clone()),
            x.sum(Self::float_mul(dy, of_scale)),
            x.sum(Self::float_mask_fill(of_zero, inside, 0f32.into())),
        ]
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
        let runs = rule.groups.runs();
        let mut cut: Vec<usize> = runs.iter().map(|run| run.len).collect();
        let mut broadcast: Vec<usize> = runs
            .iter()
            .map(|run| match run.counts {
                Counts::Groups => run.len,
                Counts::Elements => 1,
            })
            .collect();
        if runs.is_empty() {
            cut.push(1);
            broadcast.push(1);
        }
        let (cut, broadcast) = (Shape::from(cut), Shape::from(broadcast));
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

    /// `|x| = a · 2ᵉ` with a from 1 to 2, or e the least exponent, is rounded to `mantissa_bits`.
    fn nearest_float(&self, x: FloatTensor<B>, floats: Floats, max: f32) -> FloatTensor<B> {
        let Floats {
            mantissa_bits,
            min_exponent,
        } = floats;
        let power_of_two = |exponent: i32| f32::exp2(exponent as f32);
        let x = self.clamp_to(x, -2.0 * max, 2.0 * max);
        let negative = B::float_lower_elem(x.clone(), 0f32.into(), self.bool_dtype);

        let mut a =
            B::float_mul_scalar(B::float_abs(x.clone()), power_of_two(-min_exponent).into());
        let mut unit = B::float_ones(x.shape(), &x.device(), x.dtype().into());
        for halvings in [16, 8, 4, 2, 1] {
            if power_of_two(min_exponent + halvings) > 2.0 * max {
                continue;
            }
            let (up, down) = (power_of_two(halvings), power_of_two(-halvings));
            let large = B::float_greater_equal_elem(a.clone(), up.into(), self.bool_dtype);
            let halved = B::float_mul_scalar(a.clone(), down.into());
            a = B::float_mask_where(a, large.clone(), halved);
            let doubled = B::float_mul_scalar(unit.clone(), up.into());
            unit = B::float_mask_where(unit, large, doubled);
        }
        let steps = B::float_mul_scalar(a, power_of_two(mantissa_bits).into());
        let steps = B::float_mul(B::float_round(steps), unit);
        let least = power_of_two(min_exponent - mantissa_bits);
        let magnitude = B::float_mul_scalar(steps, least.into());
        let minus = B::float_neg(magnitude.clone());
        B::float_mask_where(magnitude, negative, minus)
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
        B::float_reshape(y, self.shape.clone())
    }

    /// Sums over the elements of each group, `[groups]`.
    fn sum(&self, terms: FloatTensor<B>) -> FloatTensor<B> {
        let runs = self.rule.groups.runs().iter().enumerate();
        let elements = runs.filter(|(_, run)| run.counts == Counts::Elements);
        let dims: Vec<usize> = elements.map(|(dim, _)| dim).collect();
        let sums = B::float_sum_dims(terms, &dims);
        B::float_reshape(sums, Shape::from([self.rule.groups.count()]))
    }
}

impl Kernel for burn::backend::Capture {}
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "cpu"))]
impl Kernel for burn::backend::Cube {}
