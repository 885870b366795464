//! Scores of the methods that look at each weight by itself.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::PruneError;
use crate::host::mismatch;
use crate::model::checks::accept;
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

/// w₀²·(Σᵢ gᵢⱼ²/n + l2): what removing a weight costs where the Fisher is diagonal.
pub(crate) fn diagonal_fisher(problem: &Problem) -> Result<Vec<f64>, PruneError> {
    let samples = problem.counted() as f64;
    let norms = problem.gradients().square_norms()?;
    let score =
        |(weight, norm): (&f32, f64)| f64::from(*weight).powi(2) * (norm / samples + problem.l2());
    Ok(problem.dense().iter().zip(norms).map(score).collect())
}

/// |w₀|·‖activation‖
pub(crate) fn wanda(problem: &Problem, activation_norms: &[f32]) -> Vec<f64> {
    let pairs = magnitude(problem).into_iter().zip(activation_norms);
    pairs
        .map(|(weight, norm)| weight * f64::from(*norm))
        .collect()
}

/// Refuses activation norms that are not one for each weight, finite and not negative.
pub(crate) fn check_norms(norms: &[f32], parameters: usize) -> Result<(), PruneError> {
    mismatch("activation norms", parameters, norms.len())?;
    let expected = "finite and not negative";
    norms.iter().try_for_each(|norm| {
        let fits = norm.is_finite() && *norm >= 0.0;
        accept(fits, "activation_norms", norm, expected)
    })
}
