//! Learning for each weight whether to round it up or down.

use std::ops::Range;

use burn::config::Config;
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatRef, Par};
use rayon::prelude::*;

use crate::QuantError;
use crate::module::listen::input_statistics::InputStatistics;
use crate::rounding::weight_grid::WeightGrid;

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
/// `[outputs, d] · [d, d]`, in F32, some outputs on each thread of rayon's pool. Where the result is no better than nearest rounding on `inputs`,
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
/// use burn_lean_quant::{
///     rounding::{AdaRoundConfig, WeightGrid, adaround}, module::InputStatistics,
/// };
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
    // The error of nearest rounding counts as one for each element, so that λ means the same for
    // weights of any size.
    let [outputs, features] = grid.shape();
    let weight = features as f64 / (nearest_error * inputs.samples() as f64);
    let second_moments = Mat::from_fn(features, features, |row, column| {
        (2.0 * weight * inputs.gram(row, column)) as f32
    });
    // The outputs have nothing to do with each other.
    let codes: Vec<Vec<i32>> = (0..outputs.div_ceil(ROWS))
        .into_par_iter()
        .map(|chunk| {
            let rows = chunk * ROWS..outputs.min((chunk + 1) * ROWS);
            let mut rounding = Rounding::new(grid, rows);
            for iteration in 0..config.iterations {
                rounding.step(second_moments.as_ref(), config, iteration);
            }
            rounding.codes(grid)
        })
        .collect();
    let codes = codes.concat();
    match grid.output_error(&codes, inputs)? < nearest_error {
        true => Ok(codes),
        false => Ok(nearest),
    }
}

impl AdaRoundConfig {
    pub(super) fn validate(&self) -> Result<(), QuantError> {
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
const GAMMA: f32 = -0.1;
const ZETA: f32 = 1.1;

/// Outputs that are learned together: enough for a matrix product, and few enough for many threads.
const ROWS: usize = 32;

/// What is fixed of an element: `h` is in steps above the code below its weight.
#[derive(Debug, Clone, Copy)]
struct Element {
    /// The `h` of the weight itself.
    fraction: f32,
    scale: f32,
    /// The `h` of the lowest and of the highest code.
    bounds: (f32, f32),
    is_zero: bool,
}

/// Some rows of a weight: their logits and the state of Adam, one for each element.
struct Rounding {
    /// Row-major index of the first element in the weight.
    start: usize,
    features: usize,
    elements: Vec<Element>,
    logits: Vec<f32>,
    momentum: Vec<f32>,
    variance: Vec<f32>,
    /// `h(V)` and its slope.
    steps: Vec<(f32, f32)>,
    /// `W̃ − W`.
    error: Mat<f32>,
    gradient: Mat<f32>,
}

impl Rounding {
    /// Starts where `h(V)` is the fraction that rounding cuts off: at no error at all.
    fn new(grid: &WeightGrid, rows: Range<usize>) -> Self {
        let [_, features] = grid.shape();
        let (quant_min, quant_max) = grid.range();
        let element = |index: usize| {
            let position = grid.position(index);
            let below = position.floor();
            Element {
                fraction: (position - below) as f32,
                scale: grid.scale(index) as f32,
                bounds: (
                    (f64::from(quant_min) - below) as f32,
                    (f64::from(quant_max) - below) as f32,
                ),
                is_zero: grid.is_zero(index),
            }
        };
        let elements: Vec<Element> = (rows.start * features..rows.end * features)
            .map(element)
            .collect();
        let logit = |element: &Element| {
            let sigmoid = (element.fraction - GAMMA) / (ZETA - GAMMA);
            (sigmoid / (1.0 - sigmoid)).ln()
        };
        Self {
            start: rows.start * features,
            features,
            logits: elements.iter().map(logit).collect(),
            momentum: vec![0.0; elements.len()],
            variance: vec![0.0; elements.len()],
            steps: vec![(0.0, 0.0); elements.len()],
            error: Mat::zeros(rows.len(), features),
            gradient: Mat::zeros(rows.len(), features),
            elements,
        }
    }

    /// One step of Adam; `second_moments` is `2 · weight · Σ x xᵀ`.
    fn step(&mut self, second_moments: MatRef<'_, f32>, config: &AdaRoundConfig, iteration: usize) {
        for (index, element) in self.elements.iter().enumerate() {
            let (h, slope) = soft_step(self.logits[index]);
            self.steps[index] = (h, slope);
            let inside = h.clamp(element.bounds.0, element.bounds.1);
            self.error[(index / self.features, index % self.features)] = match element.is_zero {
                true => 0.0,
                false => (inside - element.fraction) * element.scale,
            };
        }
        // dL/dW̃ = 2 · weight · (W̃ − W) · Σ x xᵀ
        matmul(
            self.gradient.as_mut(),
            Accum::Replace,
            self.error.as_ref(),
            second_moments,
            1.0,
            Par::Seq,
        );
        let beta = config.beta_at(iteration).map(|beta| beta as f32);
        let regularization = config.regularization as f32;
        let adam = Adam::new(config.learning_rate, iteration);
        for (index, element) in self.elements.iter().enumerate() {
            let (h, slope) = self.steps[index];
            let mut d_logit = 0.0;
            if slope != 0.0 {
                let (lowest, highest) = element.bounds;
                if (lowest..=highest).contains(&h) {
                    let place = (index / self.features, index % self.features);
                    d_logit += self.gradient[place] * element.scale;
                }
                if let Some(beta) = beta {
                    let centred = 2.0 * h - 1.0;
                    let of_term = -2.0 * beta * centred.abs().powf(beta - 1.0) * centred.signum();
                    d_logit += regularization * of_term;
                }
                d_logit *= slope;
            }
            let state = (&mut self.momentum[index], &mut self.variance[index]);
            self.logits[index] -= adam.update(state, d_logit);
        }
    }

    fn codes(&self, grid: &WeightGrid) -> Vec<i32> {
        let code = |(offset, logit): (usize, &f32)| {
            let index = self.start + offset;
            if grid.is_zero(index) {
                return grid.nearest_code(index, 0.0);
            }
            let up = soft_step(*logit).0 >= 0.5;
            grid.clamp(grid.position(index).floor() + f64::from(u8::from(up)))
        };
        self.logits.iter().enumerate().map(code).collect()
    }
}

/// One step of Adam.
struct Adam {
    learning_rate: f32,
    /// 1 / (1 − βᵗ)
    unbias: (f32, f32),
}

impl Adam {
    const BETA_1: f32 = 0.9;
    const BETA_2: f32 = 0.999;
    const EPSILON: f32 = 1e-8;

    fn new(learning_rate: f64, iteration: usize) -> Self {
        let step = i32::try_from(iteration + 1).unwrap_or(i32::MAX);
        let unbias = |beta: f32| (1.0 / (1.0 - f64::from(beta).powi(step))) as f32;
        Self {
            learning_rate: learning_rate as f32,
            unbias: (unbias(Self::BETA_1), unbias(Self::BETA_2)),
        }
    }

    /// How far to go down.
    fn update(&self, (momentum, variance): (&mut f32, &mut f32), gradient: f32) -> f32 {
        *momentum = Self::BETA_1 * *momentum + (1.0 - Self::BETA_1) * gradient;
        *variance = Self::BETA_2 * *variance + (1.0 - Self::BETA_2) * gradient * gradient;
        let root = (*variance * self.unbias.1).sqrt();
        self.learning_rate * *momentum * self.unbias.0 / (root + Self::EPSILON)
    }
}

/// `h(V)` and `dh/dV`, which is 0 where `h` is clamped.
fn soft_step(logit: f32) -> (f32, f32) {
    let sigmoid = 1.0 / (1.0 + (-logit).exp());
    let stretched = (ZETA - GAMMA) * sigmoid + GAMMA;
    let slope = match (0.0..=1.0).contains(&stretched) {
        true => (ZETA - GAMMA) * sigmoid * (1.0 - sigmoid),
        false => 0.0,
    };
    (stretched.clamp(0.0, 1.0), slope)
}
