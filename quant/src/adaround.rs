//! Learning for each weight whether to round it up or down.

use burn::config::Config;
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par};

use crate::QuantError;
use crate::input_statistics::InputStatistics;
use crate::weight_grid::WeightGrid;

/// Settings of [`adaround`].
#[derive(Config, Debug, PartialEq)]
pub struct AdaRoundConfig {
    /// Steps of Adam. Default 1000.
    #[config(default = 1000)]
    pub iterations: usize,
    /// Learning rate of Adam, in units of the logits `V`. Default 0.01.
    #[config(default = 0.01)]
    pub learning_rate: f64,
    /// Weight λ of the term that pushes `h(V)` to 0 or 1, where the output error is in units of
    /// that of nearest rounding per element. Default 3.
    #[config(default = 3.0)]
    pub regularization: f64,
    /// First iterations without that term, as a fraction in `0..1`. Default 0.2.
    #[config(default = 0.2)]
    pub warmup: f64,
    /// The term's exponent β, from the end of the warmup to the end, cosine-annealed. Default: from
    /// 20 to 2.
    #[config(default = "[20.0, 2.0]")]
    pub beta: [f64; 2],
}

impl Default for AdaRoundConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// Codes `[outputs, inputs]`, each one of the two next to its weight, chosen to keep the outputs
/// over `inputs` close to the unquantized ones.
///
/// ```text
/// W̃ = s · (clamp(⌊W/s⌋ + h(V)) − z),   h(V) = clamp(1.2 · σ(V) − 0.1, 0, 1)
/// minimize  ‖(W̃ − W) X‖² + λ · Σ (1 − |2h(V) − 1|^β)   over V, by Adam
/// code = ⌊W/s⌋ + (h(V) ≥ 1/2)
/// ```
///
/// The inputs enter through `Σ x xᵀ` only, so that an iteration costs one product
/// `[outputs, d] · [d, d]`. Where the result is no better than nearest rounding on `inputs`,
/// nearest rounding is returned. A weight of exactly zero was pruned, and stays zero.
///
/// [Up or Down? Adaptive Rounding for Post-Training Quantization, Nagel et al.,
/// 2020](https://arxiv.org/abs/2004.10568).
///
/// # Errors
///
/// [`QuantError::NoData`], [`QuantError::LengthMismatch`] for inputs of another layer,
/// [`QuantError::InvalidConfig`] for settings out of range.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{AdaRoundConfig, InputStatistics, WeightGrid, adaround};
///
/// let mut inputs = InputStatistics::new(2);
/// inputs.observe(Tensor::from_data([[1.0, 1.0], [2.0, 2.0]], &Device::flex())).unwrap();
/// let grid =
///     WeightGrid::new([1, 2], vec![0.4, 0.45], vec![1.0; 2], vec![0.0; 2], (-7, 7)).unwrap();
/// assert_eq!(grid.nearest(), [0, 0]);
/// assert_eq!(adaround(&grid, &inputs, &AdaRoundConfig::new()).unwrap(), [0, 1]);
/// ```
pub fn adaround(
    grid: &WeightGrid,
    inputs: &InputStatistics,
    config: &AdaRoundConfig,
) -> Result<Vec<i32>, QuantError> {
    grid.expect_inputs(inputs)?;
    config.validate()?;
    let nearest = grid.nearest();
    let nearest_error = grid.output_error(&nearest, inputs)?;
    if nearest_error == 0.0 {
        return Ok(nearest);
    }
    let mut rounding = Rounding::new(grid);
    // The error of nearest rounding counts as one for each element, so that λ means the same for
    // weights of any size.
    let samples = inputs.samples() as f64;
    let outputs = grid.shape()[0] as f64;
    let weight = rounding.logits.len() as f64 / (nearest_error * samples * outputs);
    for iteration in 0..config.iterations {
        rounding.step(grid, inputs, config, weight, iteration);
    }
    let codes = rounding.codes(grid);
    match grid.output_error(&codes, inputs)? < nearest_error {
        true => Ok(codes),
        false => Ok(nearest),
    }
}

impl AdaRoundConfig {
    fn validate(&self) -> Result<(), QuantError> {
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let checks = [
            (
                "learning_rate",
                self.learning_rate,
                positive(self.learning_rate),
                "positive",
            ),
            (
                "regularization",
                self.regularization,
                self.regularization >= 0.0 && self.regularization.is_finite(),
                "finite and at least 0",
            ),
            (
                "warmup",
                self.warmup,
                (0.0..1.0).contains(&self.warmup),
                "in 0..1",
            ),
            ("beta", self.beta[0], positive(self.beta[0]), "positive"),
            ("beta", self.beta[1], positive(self.beta[1]), "positive"),
        ];
        match checks.into_iter().find(|(_, _, valid, _)| !valid) {
            None => Ok(()),
            Some((field, value, _, expected)) => Err(QuantError::InvalidConfig {
                field,
                value: value.to_string(),
                expected,
            }),
        }
    }

    /// β in `iteration`; `None` in the warmup.
    fn beta_at(&self, iteration: usize) -> Option<f64> {
        let progress = iteration as f64 / self.iterations as f64;
        let annealing = (progress - self.warmup) / (1.0 - self.warmup);
        let [start, end] = self.beta;
        (annealing >= 0.0)
            .then(|| end + (start - end) * 0.5 * (1.0 + (annealing * std::f64::consts::PI).cos()))
    }
}

/// Stretch of the sigmoid, so that it reaches 0 and 1.
const GAMMA: f64 = -0.1;
const ZETA: f64 = 1.1;

/// The logits and the state of Adam, one for each element.
struct Rounding {
    logits: Vec<f64>,
    momentum: Vec<f64>,
    variance: Vec<f64>,
}

impl Rounding {
    /// Starts where `h(V)` is the fraction that rounding cuts off: at no error at all.
    fn new(grid: &WeightGrid) -> Self {
        let [outputs, features] = grid.shape();
        let logit = |index: usize| {
            let position = grid.position(index);
            let sigmoid = (position - position.floor() - GAMMA) / (ZETA - GAMMA);
            (sigmoid / (1.0 - sigmoid)).ln()
        };
        let logits: Vec<f64> = (0..outputs * features).map(logit).collect();
        Self {
            momentum: vec![0.0; logits.len()],
            variance: vec![0.0; logits.len()],
            logits,
        }
    }

    fn step(
        &mut self,
        grid: &WeightGrid,
        inputs: &InputStatistics,
        config: &AdaRoundConfig,
        weight: f64,
        iteration: usize,
    ) {
        let [outputs, features] = grid.shape();
        let soft = |index: usize| match grid.is_zero(index) {
            true => grid.position(index),
            false => {
                let code = grid.position(index).floor() + soft_step(self.logits[index]);
                clamp_soft(grid, code)
            }
        };
        // dL/dW̃ = 2 · weight · (W̃ − W) · Σ x xᵀ
        let error = Mat::from_fn(outputs, features, |row, column| {
            let index = row * features + column;
            (soft(index) - grid.position(index)) * grid.scale(index)
        });
        let mut gradient = Mat::zeros(outputs, features);
        matmul(
            gradient.as_mut(),
            Accum::Replace,
            error.as_ref(),
            inputs.gram(),
            2.0 * weight,
            Par::Seq,
        );
        let beta = config.beta_at(iteration);
        for index in 0..self.logits.len() {
            let h = soft_step(self.logits[index]);
            let unclamped = grid.position(index).floor() + h;
            let inside = clamp_soft(grid, unclamped) == unclamped;
            let of_error = match inside {
                true => gradient[(index / features, index % features)] * grid.scale(index),
                false => 0.0,
            };
            let of_term = beta.map_or(0.0, |beta| {
                let centred = 2.0 * h - 1.0;
                -2.0 * beta * centred.abs().powf(beta - 1.0) * centred.signum()
            });
            let d_h = of_error + config.regularization * of_term;
            let d_logit = d_h * soft_step_slope(self.logits[index]);
            self.adam(index, d_logit, config.learning_rate, iteration);
        }
    }

    fn adam(&mut self, index: usize, gradient: f64, learning_rate: f64, iteration: usize) {
        const BETA_1: f64 = 0.9;
        const BETA_2: f64 = 0.999;
        const EPSILON: f64 = 1e-8;
        let step = iteration as i32 + 1;
        self.momentum[index] = BETA_1 * self.momentum[index] + (1.0 - BETA_1) * gradient;
        self.variance[index] = BETA_2 * self.variance[index] + (1.0 - BETA_2) * gradient * gradient;
        let momentum = self.momentum[index] / (1.0 - BETA_1.powi(step));
        let variance = self.variance[index] / (1.0 - BETA_2.powi(step));
        self.logits[index] -= learning_rate * momentum / (variance.sqrt() + EPSILON);
    }

    fn codes(&self, grid: &WeightGrid) -> Vec<i32> {
        let code = |(index, logit): (usize, &f64)| {
            if grid.is_zero(index) {
                return grid.nearest_code(index, 0.0);
            }
            let up = soft_step(*logit) >= 0.5;
            grid.clamp(grid.position(index).floor() + f64::from(u8::from(up)))
        };
        self.logits.iter().enumerate().map(code).collect()
    }
}

/// `h(V)`.
fn soft_step(logit: f64) -> f64 {
    ((ZETA - GAMMA) * sigmoid(logit) + GAMMA).clamp(0.0, 1.0)
}

/// `dh/dV`; 0 where `h` is clamped.
fn soft_step_slope(logit: f64) -> f64 {
    let stretched = (ZETA - GAMMA) * sigmoid(logit) + GAMMA;
    match (0.0..=1.0).contains(&stretched) {
        true => (ZETA - GAMMA) * sigmoid(logit) * (1.0 - sigmoid(logit)),
        false => 0.0,
    }
}

fn sigmoid(logit: f64) -> f64 {
    1.0 / (1.0 + (-logit).exp())
}

fn clamp_soft(grid: &WeightGrid, code: f64) -> f64 {
    let (quant_min, quant_max) = grid.range();
    code.clamp(f64::from(quant_min), f64::from(quant_max))
}
