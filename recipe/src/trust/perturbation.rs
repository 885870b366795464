//! Inputs that are a little different from those of the test set.

use std::fmt;

use burn::tensor::{Tensor, TensorData};
use burn_lean_graph::{TensorMapper, Tensors};
use serde::{Deserialize, Serialize};

use crate::run::seed;

/// What is done to the float tensors of an input. Integers and booleans stay.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Perturbation {
    /// Gaussian noise, its deviation in deviations of the batch.
    Noise(f64),
    /// The last axis moved by so many places, its edge repeated; of tensors of rank 3 and more.
    Shift(i64),
    /// Added to everything, in deviations of the batch.
    Offset(f64),
}

impl fmt::Display for Perturbation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noise(strength) => write!(f, "noise {strength} σ"),
            Self::Shift(places) => write!(f, "shift {places:+}"),
            Self::Offset(strength) => write!(f, "offset {strength:+} σ"),
        }
    }
}

impl Perturbation {
    /// Whether inputs of F32 stay numbers under it.
    pub(super) fn is_finite(&self) -> bool {
        match self {
            Self::Noise(strength) | Self::Offset(strength) => (*strength as f32).is_finite(),
            Self::Shift(_) => true,
        }
    }

    /// The inputs of the batch of this number, changed; the same for the same number.
    pub fn apply<I: Tensors>(&self, inputs: &I, number: u64) -> I {
        inputs.map_tensors(&mut Perturb {
            perturbation: *self,
            random: seed(number, "noise", 0, 0),
        })
    }

    /// Whether it changes anything in inputs of this kind: noise does nothing to integers, a shift
    /// nothing to vectors.
    pub fn concerns<I: Tensors>(&self, inputs: &I) -> bool {
        let mut concerned = Concerned {
            least_rank: self.least_rank(),
            found: false,
        };
        inputs.map_tensors(&mut concerned);
        concerned.found
    }

    /// Of which rank and more it changes tensors.
    fn least_rank(&self) -> usize {
        match self {
            Self::Shift(_) => SHIFTED_RANK,
            Self::Noise(_) | Self::Offset(_) => 0,
        }
    }
}

/// Tensors of this rank and more are shifted.
const SHIFTED_RANK: usize = 3;

/// Looks for float tensors.
struct Concerned {
    least_rank: usize,
    found: bool,
}

impl TensorMapper for Concerned {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        self.found |= D >= self.least_rank;
        tensor.clone()
    }
}

struct Perturb {
    perturbation: Perturbation,
    random: u64,
}

impl Perturb {
    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        self.random = seed(self.random, "", 0, 0);
        ((self.random >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller.
    fn normal(&mut self) -> f64 {
        let (u, v) = (self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos()
    }
}

impl TensorMapper for Perturb {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        if D < self.perturbation.least_rank() {
            return tensor.clone();
        }
        let data = tensor.to_data();
        let shape = data.shape().clone();
        // Those of F64 need it.
        let mut values: Vec<f64> = data.iter::<f64>().collect();
        let n = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares = values.iter().map(|value| (value - mean).powi(2));
        let deviation = (squares.sum::<f64>() / n).sqrt();
        match self.perturbation {
            Perturbation::Noise(strength) => {
                for value in &mut values {
                    *value += strength * deviation * self.normal();
                }
            }
            Perturbation::Offset(strength) => {
                for value in &mut values {
                    *value += strength * deviation;
                }
            }
            Perturbation::Shift(places) => {
                let width = shape[D - 1];
                for row in values.chunks_mut(width.max(1)) {
                    let old = row.to_vec();
                    for (at, value) in row.iter_mut().enumerate() {
                        let from = (at as i64)
                            .saturating_sub(places)
                            .clamp(0, width as i64 - 1);
                        *value = old[from as usize];
                    }
                }
            }
        }
        let data = TensorData::new(values, shape).convert_dtype(tensor.dtype());
        Tensor::from_data(data, (&tensor.device(), tensor.dtype()))
    }
}
