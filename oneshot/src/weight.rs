//! A compressed weight.

use serde::{Deserialize, Serialize};

/// A weight after compression, `[outputs, inputs]` whatever the layout of its parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompressedWeight {
    /// Path of the parameter.
    pub path: String,
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
    /// Whether the parameter is `[inputs, outputs]`.
    pub transposed: bool,
    /// The values, row by row.
    pub values: Vec<f32>,
    /// Their grid, where they are on one.
    pub grid: Option<Grid>,
}

/// Codes and their meaning: `value = (code − zero point) · scale`, computed in F32.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Bits of a code.
    pub bits: u8,
    /// Inputs that share a scale, at least 1 (0 counts as 1); the last group of an output may be smaller.
    pub group: usize,
    /// Whether all zero points are the middle code.
    pub symmetric: bool,
    /// One for each weight, row by row.
    pub codes: Vec<u8>,
    /// One for each group of each output.
    pub scales: Vec<f32>,
    /// As many.
    pub zero_points: Vec<u8>,
}

impl CompressedWeight {
    /// The values in the layout of the parameter.
    pub(crate) fn stored(&self) -> Vec<f32> {
        let (rows, columns) = (self.outputs.max(1), self.inputs);
        match self.transposed {
            true => (0..self.values.len())
                .map(|at| self.values[at % rows * columns + at / rows])
                .collect(),
            false => self.values.clone(),
        }
    }
}

impl Grid {
    /// Whether it is one of a weight of that size.
    pub(crate) fn fits(&self, outputs: usize, inputs: usize) -> bool {
        let groups = (self.group > 0).then(|| inputs.div_ceil(self.group));
        let groups = groups.and_then(|groups| groups.checked_mul(outputs));
        (1..=8).contains(&self.bits)
            && outputs.checked_mul(inputs) == Some(self.codes.len())
            && groups == Some(self.scales.len())
            && groups == Some(self.zero_points.len())
    }

    /// The group of a place, for outputs of so many inputs.
    pub(crate) fn group_at(group: usize, inputs: usize, at: usize) -> usize {
        let group = group.max(1);
        at / inputs * inputs.div_ceil(group) + at % inputs / group
    }

    /// The values of the codes, for outputs of so many inputs.
    pub fn values(&self, inputs: usize) -> Vec<f32> {
        let value = |(at, code): (usize, &u8)| {
            let of = Self::group_at(self.group, inputs, at);
            (f32::from(*code) - f32::from(self.zero_points[of])) * self.scales[of]
        };
        self.codes.iter().enumerate().map(value).collect()
    }
}

impl CompressedWeight {
    /// Weights that are zero.
    pub fn zeros(&self) -> usize {
        self.values.iter().filter(|value| **value == 0.0).count()
    }

    /// Bytes of what has to be stored: codes packed into bits, scales in F32, zero points packed
    /// like codes where the grid is not symmetric; without a grid F32 values. Where a bit for each
    /// weight that says whether it is zero pays, those, and the others' values or codes.
    pub fn stored_bytes(&self) -> usize {
        let rest = match &self.grid {
            None => 0,
            Some(grid) => {
                let zero_points = match grid.symmetric {
                    true => 0,
                    false => (grid.zero_points.len() * usize::from(grid.bits)).div_ceil(8),
                };
                4 * grid.scales.len() + zero_points
            }
        };
        let (dense, sparse) = self.dense_and_sparse();
        dense.min(sparse) + rest
    }

    /// Whether zeros are left out of a file.
    pub(crate) fn stores_sparsely(&self) -> bool {
        let (dense, sparse) = self.dense_and_sparse();
        sparse < dense
    }

    /// Bytes of values or codes with zeros and without.
    fn dense_and_sparse(&self) -> (usize, usize) {
        let bits = self.grid.as_ref().map_or(32, |grid| usize::from(grid.bits));
        let count = self.values.len();
        let dense = (count * bits).div_ceil(8);
        let sparse = count.div_ceil(8) + ((count - self.zeros()) * bits).div_ceil(8);
        (dense, sparse)
    }
}
