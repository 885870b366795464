//! Which weights of a layer are kept.

use crate::error::{LayerwiseError, same};

/// Which weights of a layer are kept, `[o, d]` row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Support {
    features: usize,
    kept: Vec<bool>,
}

impl Support {
    /// Of so many features; `kept` is `[o, d]` row by row.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::Mismatch`] where this is no whole number of rows.
    pub fn new(features: usize, kept: Vec<bool>) -> Result<Self, LayerwiseError> {
        let rows = kept.len() / features.max(1);
        same("weights in whole rows", rows * features, kept.len())?;
        Ok(Self { features, kept })
    }

    /// [`new`](Self::new) for whole rows.
    pub(crate) fn of(features: usize, kept: Vec<bool>) -> Self {
        Self { features, kept }
    }

    /// All weights.
    pub fn full(outputs: usize, features: usize) -> Self {
        Self {
            features,
            kept: vec![true; outputs * features],
        }
    }

    /// True where a weight is kept, `[o, d]` row by row.
    pub fn kept(&self) -> &[bool] {
        &self.kept
    }

    /// Rows, o.
    pub fn outputs(&self) -> usize {
        self.kept.len() / self.features.max(1)
    }

    /// Weights of a row, d.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Weights that are kept.
    pub fn count(&self) -> usize {
        self.kept.iter().filter(|kept| **kept).count()
    }

    /// The row of that output.
    pub(crate) fn row(&self, output: usize) -> &[bool] {
        &self.kept[output * self.features..(output + 1) * self.features]
    }

    pub(crate) fn row_mut(&mut self, output: usize) -> &mut [bool] {
        &mut self.kept[output * self.features..(output + 1) * self.features]
    }
}

/// The places that are true.
pub(crate) fn places(row: &[bool]) -> Vec<usize> {
    (0..row.len()).filter(|at| row[*at]).collect()
}
