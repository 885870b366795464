//! Scores of the methods that look at each weight by itself.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::PruneError;
use crate::problem::Problem;

/// |w₀|
pub(crate) fn magnitude(problem: &Problem) -> Vec<f64> {
    let magnitude = |weight: &f32| f64::from(weight.abs());
    problem.dense().iter().map(magnitude).collect()
}

/// Uniform random numbers.
pub(crate) fn random(problem: &Problem, seed: u64) -> Vec<f64> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..problem.parameters()).map(|_| random.random()).collect()
}

/// w₀²·(Σᵢ gᵢⱼ²/n + ridge): what removing a weight costs where the Fisher is diagonal.
pub(crate) fn diagonal_fisher(problem: &Problem) -> Result<Vec<f64>, PruneError> {
    let samples = problem.counted() as f64;
    let norms = problem.gradients().square_norms()?;
    let score = |(weight, norm): (&f32, f64)| {
        f64::from(*weight).powi(2) * (norm / samples + problem.ridge())
    };
    Ok(problem.dense().iter().zip(norms).map(score).collect())
}
