//! A bound that a compressed model has not kept.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A bound that is broken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BrokenBound {
    /// Its field in [`Bounds`](crate::Bounds).
    pub bound: String,
    /// What it says.
    pub limit: f64,
    /// What was found; `None` where it is not known, which breaks every bound.
    pub found: Option<f64>,
}

impl fmt::Display for BrokenBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, but ", self.bound, self.limit)?;
        match self.found {
            // As many digits as a bound has.
            Some(found) => write!(f, "{} was found", (found * 1e4).round() / 1e4),
            None => write!(f, "what it bounds was not measured"),
        }
    }
}
