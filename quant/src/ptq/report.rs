//! What a post-training quantization chose.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::table::{percent, table};
use crate::{ObserverConfig, model::LeftFloat, rounding::RoundingReport};

/// What [`PtqConfig::quantize`](crate::PtqConfig::quantize) did. Prints as tables.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PtqReport {
    /// Batches of calibration data in a pass; 0 if none was needed.
    pub batches: usize,
    /// The ranges of activations, in static mode.
    pub activations: Vec<ActivationRange>,
    /// Activations that have no useful range, and stay float.
    #[serde(default)]
    pub left_float: Vec<LeftFloat>,
    /// The weights that were rounded with calibration data.
    pub rounding: RoundingReport,
}

/// The range that was chosen for an activation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActivationRange {
    /// Path of the quantizer.
    pub path: String,
    /// Its scheme, as it prints.
    pub scheme: String,
    /// What the range is made of.
    pub observer: ObserverConfig,
    /// Signal to quantization noise ratio over the calibration data, in dB.
    #[serde(with = "crate::table::float")]
    pub sqnr: f64,
    /// Fraction of the values that are clipped, and of NaN, 0 to 1.
    pub clipped: f64,
}

impl fmt::Display for PtqReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} batches of calibration data", self.batches)?;
        if !self.activations.is_empty() {
            let header = ["activation", "scheme", "range", "SQNR [dB]", "clipped [%]"];
            let mut table = table(&header);
            for range in &self.activations {
                table.add_row([
                    range.path.clone(),
                    range.scheme.clone(),
                    range.observer.to_string(),
                    format!("{:.1}", range.sqnr),
                    percent(range.clipped),
                ]);
            }
            write!(f, "\n{table}")?;
        }
        for left in &self.left_float {
            write!(f, "\n{left}")?;
        }
        if !(self.rounding.weights.is_empty() && self.rounding.nearest.is_empty()) {
            write!(f, "\n{}", self.rounding)?;
        }
        Ok(())
    }
}
