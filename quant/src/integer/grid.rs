//! The integers that an activation is rounded to.

use burn::tensor::Tensor;

use crate::{FakeQuantize, Granularity, QuantError};

/// The integer grid of one activation tensor: `value = (code − zero_point) · scale`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grid {
    /// Real value of one step, positive and finite.
    pub scale: f32,
    /// The code of 0.0.
    pub zero_point: i32,
    /// Smallest code.
    pub quant_min: i32,
    /// Largest code.
    pub quant_max: i32,
}

impl Grid {
    /// The grid of an activation quantizer.
    ///
    /// # Errors
    ///
    /// [`QuantError::UnsupportedScheme`] unless it is of integers and per tensor, and those of
    /// [`FakeQuantize::qparams`].
    pub fn of(quantizer: &FakeQuantize) -> Result<Self, QuantError> {
        let scheme = quantizer.scheme();
        if !scheme.format.is_int() || scheme.granularity != Granularity::PerTensor {
            return Err(QuantError::UnsupportedScheme {
                scheme: scheme.to_string(),
                reason: "integer arithmetic takes activations that are integers with one scale",
            });
        }
        let qparams = quantizer.qparams()?;
        let number = |tensor: Tensor<1>| -> Result<f32, QuantError> {
            let data = tensor.try_into_data().map_err(QuantError::device)?;
            data.iter::<f32>().next().ok_or(QuantError::NeverObserved)
        };
        Ok(Self {
            scale: number(qparams.scale)?,
            zero_point: number(qparams.zero_point)? as i32,
            quant_min: scheme.quant_min() as i32,
            quant_max: scheme.quant_max() as i32,
        })
    }

    /// The code of `value`: `round(value · (1 / scale)) + zero_point`, ties to even, clamped; as if the inverse
    /// of no scale were beyond F32.
    ///
    /// # Errors
    ///
    /// [`QuantError::NonFinite`] for NaN: there is no code for it. [`QuantError::InvalidScale`] and
    /// [`QuantError::InvalidConfig`] for a grid that is none.
    pub fn quantize(&self, value: f32) -> Result<i32, QuantError> {
        self.validate()?;
        if value.is_nan() {
            return Err(QuantError::NonFinite {
                what: "value to quantize",
            });
        }
        // The inverse of a scale near an end of F32 is beyond the other: both move, by a power of two.
        let lift = match self.scale {
            scale if scale < 1e-37 => 2f32.powi(64),
            scale if scale > 1e37 => 2f32.powi(-64),
            _ => 1.0,
        };
        // Infinities saturate here, and the sum below stays far inside of f64's exact integers.
        let steps = value * lift * (1.0 / (self.scale * lift));
        let steps = steps.round_ties_even();
        let code = f64::from(steps) + f64::from(self.zero_point);
        Ok(code.clamp(f64::from(self.quant_min), f64::from(self.quant_max)) as i32)
    }

    /// The value of `code`.
    pub fn dequantize(&self, code: i32) -> f32 {
        self.steps(code) as f32 * self.scale
    }

    /// The code's distance from that of 0.0.
    pub(super) fn steps(&self, code: i32) -> i64 {
        i64::from(code) - i64::from(self.zero_point)
    }

    /// Whether it is a grid: a positive, finite scale, and 0.0 among its codes.
    ///
    /// # Errors
    ///
    /// [`QuantError::InvalidScale`] and [`QuantError::InvalidConfig`].
    pub fn validate(&self) -> Result<(), QuantError> {
        self.check("grid", &[])
    }

    pub(super) fn check(&self, what: &str, codes: &[i32]) -> Result<(), QuantError> {
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(QuantError::InvalidScale {
                what: what.to_string(),
                value: self.scale,
            });
        }
        let range = self.quant_min..=self.quant_max;
        if !range.contains(&self.zero_point) {
            return Err(QuantError::InvalidConfig {
                field: "zero_point",
                value: format!(
                    "{} with codes from {} to {}",
                    self.zero_point, self.quant_min, self.quant_max
                ),
                expected: "one of the codes",
            });
        }
        match codes.iter().find(|code| !range.contains(*code)) {
            None => Ok(()),
            Some(code) => Err(QuantError::CodeOutOfRange {
                what: what.to_string(),
                code: i64::from(*code),
                quant_min: self.quant_min,
                quant_max: self.quant_max,
            }),
        }
    }
}
