//! Sparsity patterns: what shape the zeros must have.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::PruneError;
use crate::model::checks::accept;
use crate::model::layout::{Layer, Layout};

/// The shape that zeros must have.
///
/// | pattern | a `[4, 2]` linear weight keeps |
/// |---|---|
/// | `Unstructured` | any of its 8 weights |
/// | `NM { n: 2, m: 4 }` | 2 of the 4 inputs of each output, not the same for both outputs |
/// | `Groups(Groups::Inputs)` | whole rows: the weights of one input |
/// | `Groups(Groups::Outputs)` | whole columns: the weights of one output |
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SparsityPattern {
    /// Single weights, anywhere.
    Unstructured,
    /// At most `n` nonzeros in every `m` consecutive weights along the axis that the layer sums over, as
    /// sparse tensor cores want it: input features or channels; the last axis of an embedding and of what
    /// is unknown.
    NM {
        /// Weights kept in a block, below `m`.
        n: usize,
        /// Weights in a block.
        m: usize,
    },
    /// Groups of weights, kept or pruned together.
    Groups(Groups),
}

/// Which weights are kept or pruned together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Groups {
    /// One output feature, one output channel, one column of an embedding.
    Outputs,
    /// One input feature, one input channel, one row of an embedding.
    Inputs,
    /// Attention heads: the output features of a projection in this many equal slices.
    Heads(usize),
}

impl SparsityPattern {
    /// The blocks of an N:M pattern: sets of m indices, ascending. Empty for other patterns.
    ///
    /// # Errors
    ///
    /// [`PruneError::PatternDoesNotDivide`], and [`PruneError::InvalidConfig`] unless 0 < n < m.
    pub fn blocks(&self, layout: &Layout) -> Result<Vec<Vec<usize>>, PruneError> {
        let Self::NM { n, m } = *self else {
            return Ok(Vec::new());
        };
        accept(n > 0 && n < m, "pattern", self, "N:M with 0 < N < M")?;
        let mut blocks = Vec::with_capacity(layout.len() / m);
        for layer in layout.layers() {
            let Some(axis) = layer.reduction_axis() else {
                return Err(self.does_not_divide(layer, 0, m));
            };
            if layer.shape[axis] % m != 0 {
                return Err(self.does_not_divide(layer, axis, m));
            }
            let stride = layer.stride(axis);
            let length = layer.shape[axis] * stride;
            for outer in layer.range().step_by(length.max(1)) {
                for inner in 0..stride {
                    for first in (0..layer.shape[axis]).step_by(m) {
                        let at = |position: usize| outer + inner + (first + position) * stride;
                        blocks.push((0..m).map(at).collect());
                    }
                }
            }
        }
        Ok(blocks)
    }

    /// The groups of a structured pattern, ascending indices each. Empty for other patterns.
    ///
    /// # Errors
    ///
    /// [`PruneError::PatternDoesNotDivide`] where heads do not divide the output features.
    pub fn groups(&self, layout: &Layout) -> Result<Vec<Vec<usize>>, PruneError> {
        let Self::Groups(groups) = self else {
            return Ok(Vec::new());
        };
        let mut all = Vec::new();
        for layer in layout.layers() {
            let (axis, width) = match groups {
                Groups::Inputs => (layer.input_axis(), 1),
                Groups::Heads(heads) => {
                    let axis = layer.output_axis().unwrap_or(0);
                    let size = layer.shape.get(axis).copied().unwrap_or(1);
                    if *heads == 0 || !size.is_multiple_of(*heads) {
                        return Err(self.does_not_divide(layer, axis, *heads));
                    }
                    (layer.output_axis(), size / heads)
                }
                Groups::Outputs => (layer.output_axis(), 1),
            };
            match axis {
                Some(axis) => all.extend(
                    (0..layer.shape[axis])
                        .step_by(width.max(1))
                        .map(|first| layer.slice(axis, first..first + width)),
                ),
                None => all.extend(layer.range().map(|index| vec![index])),
            }
        }
        Ok(all)
    }

    fn does_not_divide(&self, layer: &Layer, axis: usize, multiple: usize) -> PruneError {
        PruneError::PatternDoesNotDivide {
            pattern: self.to_string(),
            path: layer.path.clone(),
            shape: layer.shape.clone(),
            axis,
            multiple,
        }
    }
}

impl fmt::Display for SparsityPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unstructured => f.write_str("unstructured"),
            Self::NM { n, m } => write!(f, "{n}:{m}"),
            Self::Groups(Groups::Outputs) => f.write_str("outputs"),
            Self::Groups(Groups::Inputs) => f.write_str("inputs"),
            Self::Groups(Groups::Heads(heads)) => write!(f, "{heads} heads"),
        }
    }
}

/// Reads `N:M`.
impl FromStr for SparsityPattern {
    type Err = PruneError;

    fn from_str(text: &str) -> Result<Self, PruneError> {
        let numbers = text.split_once(':');
        let numbers = numbers.and_then(|(n, m)| n.parse().ok().zip(m.parse().ok()));
        let (n, m) = numbers.ok_or_else(|| PruneError::InvalidConfig {
            field: "pattern",
            value: format!("`{text}`"),
            expected: "two numbers, for example 2:4",
        })?;
        Ok(Self::NM { n, m })
    }
}
