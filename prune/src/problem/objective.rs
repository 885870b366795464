//! The value of a problem.

use serde::{Deserialize, Serialize};

/// The value of a [`Problem`](crate::Problem), term by term.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Objective {
    /// ½‖y − G w‖²
    pub fit: f64,
    /// λ‖w − w₀‖², over all p weights.
    pub ridge: f64,
    /// αᵀw; 0 without the first-order term.
    pub linear: f64,
}

impl Objective {
    /// The sum of the terms.
    pub fn total(&self) -> f64 {
        self.fit + self.ridge + self.linear
    }
}
