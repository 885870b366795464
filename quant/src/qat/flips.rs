//! Weights that keep flipping between neighbouring codes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{FloatDType, Tensor, Transaction};
use serde::{Deserialize, Serialize};

use crate::QuantError;
use crate::module::listen::listener::lock;
use crate::module::listen::watch::watch_weights;
use crate::table::{percent, table};

/// Counts, from step to step, how often the code of each weight turns around.
///
/// With a straight-through estimator a weight whose best value lies between two codes is pushed
/// across the border between them, back and forth. The loss sees noise, and BatchNorm statistics
/// are those of weights that are gone a step later.
///
/// ```text
/// each step   change = code − previous code
///             flip   = change ≠ 0 and its sign differs from that of the last change
/// frequency   flips / steps
/// ```
///
/// [Overcoming Oscillations in Quantization-Aware Training, Nagel et al.,
/// 2022](https://arxiv.org/abs/2203.11086).
#[derive(Debug, Clone, Default)]
pub struct FlipTracker {
    steps: usize,
    weights: BTreeMap<String, Codes>,
}

/// What is known about the codes of one weight, on the device.
#[derive(Debug, Clone)]
struct Codes {
    codes: Tensor<1>,
    /// Sign of the last change; 0 before the first.
    direction: Tensor<1>,
    flips: Tensor<1>,
}

impl Codes {
    fn step(&mut self, codes: Tensor<1>) {
        let change = (codes.clone() - self.codes.clone()).sign();
        // −1 where the change turns around, 0 where nothing changes.
        let turned = (change.clone() * self.direction.clone()).lower_elem(-0.5);
        self.flips = self.flips.clone() + turned.float().cast(FloatDType::F32);
        let unchanged = change.clone().equal_elem(0.0);
        self.direction = change.mask_where(unchanged, self.direction.clone());
        self.codes = codes;
    }
}

/// What a [`FlipTracker`] found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Flips {
    /// Steps between which codes were compared.
    pub steps: usize,
    /// The weights, by path of their quantizer.
    pub weights: Vec<WeightFlips>,
}

/// How much the codes of one weight flip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WeightFlips {
    /// Path of the quantizer.
    pub path: String,
    /// Mean over the weight's elements of flips per step, 0 to 1.
    pub frequency: f64,
    /// Fraction of the elements that flip in more than 0.5 % of the steps, 0 to 1.
    pub oscillating: f64,
}

impl FlipTracker {
    /// Elements that flip more often than this are called oscillating [flips per step].
    pub const OSCILLATING: f64 = 0.005;

    /// Nothing seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in the codes of `model`, after a training step. Reads nothing from the device.
    pub fn observe<M: Module>(&mut self, model: &M) {
        let codes = Arc::new(Mutex::new(Vec::new()));
        let watched = codes.clone();
        watch_weights(model, move |seen| {
            let codes = (seen.path.to_string(), seen.codes());
            lock(&watched).push(codes);
        });
        let codes = std::mem::take(&mut *lock(&codes));
        if codes.is_empty() {
            return;
        }
        if !self.weights.is_empty() {
            self.steps += 1;
        }
        for (path, codes) in codes {
            match self.weights.get_mut(&path) {
                Some(known) => known.step(codes),
                None => {
                    let zeros = codes.zeros_like();
                    self.weights.insert(
                        path,
                        Codes {
                            codes,
                            direction: zeros.clone(),
                            flips: zeros,
                        },
                    );
                }
            }
        }
    }

    /// What was seen so far; reads from the device.
    ///
    /// # Errors
    ///
    /// [`QuantError::NoData`] before two steps with quantized weights were observed.
    pub fn report(&self) -> Result<Flips, QuantError> {
        if self.steps == 0 {
            return Err(QuantError::NoData {
                what: "the flip tracker, which needs two steps,".into(),
            });
        }
        let mut transaction = Transaction::default();
        let limit = Self::OSCILLATING * self.steps as f64;
        for weight in self.weights.values() {
            let often = weight.flips.clone().greater_elem(limit as f32);
            let often = often.float().cast(FloatDType::F32);
            let means = vec![weight.flips.clone().mean(), often.mean()];
            transaction = transaction.register(Tensor::cat(means, 0));
        }
        let data = transaction
            .try_execute()
            .map_err(|error| QuantError::Device {
                reason: error.to_string(),
            })?;
        let weights = self.weights.keys().zip(data).map(|(path, data)| {
            let means: Vec<f32> = data.iter::<f32>().collect();
            WeightFlips {
                path: path.clone(),
                frequency: f64::from(means[0]) / self.steps as f64,
                oscillating: f64::from(means[1]),
            }
        });
        Ok(Flips {
            steps: self.steps,
            weights: weights.collect(),
        })
    }
}

impl fmt::Display for Flips {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(&["weight", "flips per step [%]", "oscillating [%]"]);
        for weight in &self.weights {
            table.add_row([
                weight.path.clone(),
                percent(weight.frequency),
                percent(weight.oscillating),
            ]);
        }
        write!(f, "{table}\nover {} steps", self.steps)
    }
}
