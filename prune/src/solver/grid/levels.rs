//! The grid of each weight: its scale and its codes.

use crate::error::PruneError;
use crate::model::checks::accept;
use crate::model::layout::{Layer, Layout};
use crate::solver::grid::config::{GridConfig, LayerGrid};

/// A weight without a grid.
const NONE: u32 = u32::MAX;
/// Shares of the largest weight that a scale may reach to: at 2 bits the best for a bell curve is near
/// 0.4 of it.
const SHARES: usize = 41;
const LEAST_SHARE: f64 = 0.2;
/// The scale of weights that are all zero.
const OF_ZEROS: f32 = f32::EPSILON;

/// The grids of all weights.
#[derive(Debug, Clone)]
pub(crate) struct Levels {
    /// Group of each weight, `[p]`.
    group: Vec<u32>,
    /// Smallest and largest code of each group.
    bounds: Vec<(i32, i32)>,
    /// Scale of each group; 0 before it is chosen.
    pub(crate) scales: Vec<f32>,
}

impl Levels {
    /// Refuses a config that does not fit the layout.
    pub(crate) fn new(config: &GridConfig, layout: &Layout) -> Result<Self, PruneError> {
        let tolerance = config.tolerance;
        accept(
            tolerance >= 0.0,
            "grid.tolerance",
            tolerance,
            "not negative",
        )?;
        let mut levels = Self {
            group: vec![NONE; layout.len()],
            bounds: Vec::new(),
            scales: Vec::new(),
        };
        accept(
            !config.layers.is_empty(),
            "grid.layers",
            "none",
            "at least one",
        )?;
        for grid in &config.layers {
            let Some(layer) = layout.layer(&grid.path) else {
                let known: Vec<_> = layout.layers().iter().map(|l| l.path.as_str()).collect();
                return Err(PruneError::UnknownLayer {
                    path: grid.path.clone(),
                    known: known.join(", "),
                });
            };
            levels.add(grid, layer)?;
        }
        Ok(levels)
    }

    fn add(&mut self, grid: &LayerGrid, layer: &Layer) -> Result<(), PruneError> {
        let refuse = |reason: String| {
            Err(PruneError::LayerGrid {
                path: grid.path.clone(),
                reason,
            })
        };
        let mut lengths = layer.shape.iter().zip(&grid.groups);
        let divides = lengths.all(|(length, groups)| *groups > 0 && length.is_multiple_of(*groups));
        if layer.shape.len() != grid.groups.len() || !divides {
            return refuse(format!(
                "groups {:?} do not divide the shape {:?}",
                grid.groups, layer.shape
            ));
        }
        let (min, max) = grid.levels;
        if min > 0 || max < 0 || min == max || i64::from(max) - i64::from(min) > 1 << 16 {
            return refuse(format!(
                "codes from {min} to {max}; they hold 0 and are at most 65,537"
            ));
        }
        if self.group[layer.range()].iter().any(|group| *group != NONE) {
            return refuse("it has two grids".into());
        }
        let count: usize = grid.groups.iter().product();
        match &grid.scales {
            None => self.scales.resize(self.scales.len() + count, 0.0),
            Some(scales) if scales.len() != count => {
                return refuse(format!("{} scales for {count} groups", scales.len()));
            }
            Some(scales) => {
                let is_positive = |scale: &&f32| !(**scale > 0.0 && scale.is_finite());
                if let Some(bad) = scales.iter().find(is_positive) {
                    return refuse(format!("the scale {bad}; scales are finite and above 0"));
                }
                self.scales.extend(scales);
            }
        }
        let first = self.bounds.len();
        self.bounds.resize(first + count, grid.levels);
        for (local, group) in self.group[layer.range()].iter_mut().enumerate() {
            *group = (first + group_of(local, &layer.shape, &grid.groups)) as u32;
        }
        Ok(())
    }

    /// The group of a weight; `None` for a real number.
    pub(crate) fn group(&self, index: usize) -> Option<usize> {
        let group = self.group[index];
        (group != NONE).then_some(group as usize)
    }

    /// Number of groups.
    pub(crate) fn groups(&self) -> usize {
        self.scales.len()
    }

    /// The nearest code to a value in this group.
    pub(crate) fn nearest(&self, group: usize, value: f64) -> i32 {
        self.code(group, value / f64::from(self.scales[group]))
    }

    /// The nearest code to a number of steps.
    fn code(&self, group: usize, steps: f64) -> i32 {
        let (min, max) = self.bounds[group];
        let code = steps.round_ties_even();
        code.clamp(f64::from(min), f64::from(max)) as i32
    }

    /// What a code stands for.
    pub(crate) fn value(&self, group: usize, code: i32) -> f32 {
        code as f32 * self.scales[group]
    }

    /// Chooses the scales that are not given: of shares of the largest value the one with the least
    /// squared error. `fallback` stands in for a group of zeros.
    pub(crate) fn choose_scales(&mut self, weights: &[f32], fallback: &[f32]) {
        let mut members = vec![Vec::new(); self.groups()];
        for (index, group) in self.group.iter().enumerate() {
            if *group != NONE && self.scales[*group as usize] == 0.0 {
                members[*group as usize].push(index);
            }
        }
        let members = members.iter().enumerate();
        for (group, members) in members.filter(|(_, members)| !members.is_empty()) {
            let of = |all: &[f32]| -> Vec<f64> {
                let values = members.iter().map(|index| f64::from(all[*index]));
                values.filter(|value| *value != 0.0).collect()
            };
            let mut values = of(weights);
            if values.is_empty() {
                values = of(fallback);
            }
            self.scales[group] = self.least_squares(group, &values);
        }
    }

    fn least_squares(&self, group: usize, values: &[f64]) -> f32 {
        let (min, max) = self.bounds[group];
        let half = f64::from(max - min) / 2.0;
        let largest = values
            .iter()
            .fold(0.0, |most: f64, value| most.max(value.abs()));
        if largest == 0.0 {
            return OF_ZEROS;
        }
        let mut best = (f64::INFINITY, OF_ZEROS);
        for step in 0..SHARES {
            let share = 1.0 - (1.0 - LEAST_SHARE) * step as f64 / (SHARES - 1) as f64;
            let scale = ((share * largest / half) as f32).max(f32::MIN_POSITIVE);
            let wide = f64::from(scale);
            let error =
                |value: &f64| (value - f64::from(self.code(group, value / wide)) * wide).powi(2);
            let error: f64 = values.iter().map(error).sum();
            if error < best.0 {
                best = (error, scale);
            }
        }
        best.1
    }
}

/// The group of an element of a tensor that is cut into equal blocks.
fn group_of(mut element: usize, shape: &[usize], groups: &[usize]) -> usize {
    let (mut group, mut stride) = (0, 1);
    for (length, count) in shape.iter().zip(groups).rev() {
        group += element % length / (length / count) * stride;
        element /= length;
        stride *= count;
    }
    group
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_a_block_share_a_group() {
        let groups = |shape: &[usize], groups: &[usize]| -> Vec<usize> {
            let elements = 0..shape.iter().product();
            elements
                .map(|element| group_of(element, shape, groups))
                .collect()
        };
        assert_eq!(groups(&[4, 2], &[1, 2]), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(groups(&[4, 2], &[2, 2]), [0, 1, 0, 1, 2, 3, 2, 3]);
        assert_eq!(groups(&[2, 3], &[2, 1]), [0, 0, 0, 1, 1, 1]);
        assert_eq!(groups(&[2, 2], &[1, 1]), [0; 4]);
    }
}
