//! A weight matrix and the integer grid that its elements are to be rounded to.

use faer::Mat;

use crate::QuantError;
use crate::fake::qparams::is_scale;
use crate::module::listen::input_statistics::InputStatistics;

/// A weight `[outputs, inputs]` (row-major) with the grid of each element: the problem that
/// nearest rounding, [`gptq`](crate::rounding::gptq) and [`adaround`](crate::rounding::adaround) solve differently.
///
/// `value = (code − zero_point) · scale`, with `quant_min ≤ code ≤ quant_max`.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightGrid {
    outputs: usize,
    inputs: usize,
    weight: Vec<f32>,
    scale: Vec<f32>,
    zero_point: Vec<f32>,
    quant_min: i32,
    quant_max: i32,
}

impl WeightGrid {
    /// A weight of shape `[outputs, inputs]`; `scale` and `zero_point` hold one number for every
    /// element, in the same order.
    ///
    /// # Errors
    ///
    /// [`QuantError::LengthMismatch`], [`QuantError::NonFinite`] for a weight that is not finite,
    /// [`QuantError::InvalidScale`], [`QuantError::InvalidConfig`] for an empty range of codes.
    pub fn new(
        shape: [usize; 2],
        weight: Vec<f32>,
        scale: Vec<f32>,
        zero_point: Vec<f32>,
        (quant_min, quant_max): (i32, i32),
    ) -> Result<Self, QuantError> {
        let [outputs, inputs] = shape;
        QuantError::expect_len("weight", outputs * inputs, weight.len())?;
        QuantError::expect_len("scales", outputs * inputs, scale.len())?;
        QuantError::expect_len("zero points", outputs * inputs, zero_point.len())?;
        if weight.iter().any(|value| !value.is_finite()) {
            return Err(QuantError::NonFinite { what: "weight" });
        }
        if let Some(bad) = scale.iter().find(|s| !is_scale(**s)) {
            return Err(QuantError::InvalidScale {
                what: "the weight".into(),
                value: *bad,
            });
        }
        if quant_min >= quant_max {
            return Err(QuantError::InvalidConfig {
                field: "quant_min",
                value: quant_min.to_string(),
                expected: "below quant_max",
            });
        }
        Ok(Self {
            outputs,
            inputs,
            weight,
            scale,
            zero_point,
            quant_min,
            quant_max,
        })
    }

    /// `[outputs, inputs]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    /// Every element to its nearest code: what fake quantization does, except that a quotient that
    /// F32 rounds to a tie is none here.
    pub fn nearest(&self) -> Vec<i32> {
        (0..self.weight.len())
            .map(|index| self.nearest_code(index, f64::from(self.weight[index])))
            .collect()
    }

    /// The values of `codes`, row-major.
    ///
    /// # Panics
    ///
    /// For more codes than the weight has elements.
    pub fn values(&self, codes: &[i32]) -> Vec<f32> {
        let value = |(index, code): (usize, &i32)| {
            (*code as f32 - self.zero_point[index]) * self.scale[index]
        };
        codes.iter().enumerate().map(value).collect()
    }

    /// Mean squared error of the layer's outputs over `inputs` when `codes` replace the weight.
    ///
    /// # Errors
    ///
    /// [`QuantError::LengthMismatch`] for another number of codes or features,
    /// [`QuantError::NoData`] without samples.
    pub fn output_error(&self, codes: &[i32], inputs: &InputStatistics) -> Result<f64, QuantError> {
        self.expect_inputs(inputs)?;
        QuantError::expect_len("codes", self.weight.len(), codes.len())?;
        let values = self.values(codes);
        let error = Mat::from_fn(self.outputs, self.inputs, |row, column| {
            let index = row * self.inputs + column;
            f64::from(values[index]) - f64::from(self.weight[index])
        });
        Ok(inputs.output_error(error.as_ref()))
    }

    /// The nearest code of `value` on the grid of element `index`.
    pub(crate) fn nearest_code(&self, index: usize, value: f64) -> i32 {
        let steps = (value / f64::from(self.scale[index])).round_ties_even();
        self.clamp(steps + f64::from(self.zero_point[index]))
    }

    pub(crate) fn clamp(&self, code: f64) -> i32 {
        code.clamp(f64::from(self.quant_min), f64::from(self.quant_max)) as i32
    }

    /// The value of `code` on the grid of element `index`, in F64.
    pub(crate) fn value(&self, index: usize, code: i32) -> f64 {
        (f64::from(code) - f64::from(self.zero_point[index])) * f64::from(self.scale[index])
    }

    /// Whether element `index` is exactly zero, as pruned weights are: it stays so.
    pub(crate) fn is_zero(&self, index: usize) -> bool {
        self.weight[index] == 0.0
    }

    /// Element `index` in steps of its scale, with the zero point added.
    pub(crate) fn position(&self, index: usize) -> f64 {
        f64::from(self.weight[index]) / f64::from(self.scale[index])
            + f64::from(self.zero_point[index])
    }

    /// Smallest and largest code.
    pub(crate) fn range(&self) -> (i32, i32) {
        (self.quant_min, self.quant_max)
    }

    pub(crate) fn weight(&self, index: usize) -> f64 {
        f64::from(self.weight[index])
    }

    pub(crate) fn scale(&self, index: usize) -> f64 {
        f64::from(self.scale[index])
    }

    pub(crate) fn expect_inputs(&self, inputs: &InputStatistics) -> Result<(), QuantError> {
        inputs.require_samples()?;
        let what = "input features of the weight";
        QuantError::expect_len(what, self.inputs, inputs.features())
    }
}
