//! Which units go.

use std::collections::{HashMap, HashSet};

use burn::module::ParamId;
use burn_lean_graph::{FixedBy, UnitGroup, UnitRole};

use super::cut::Weights;
use super::readers::Readers;
use crate::PruneError;

/// The units of a model, what they cost, and which are removed so far.
pub(super) struct Scored<'a> {
    groups: &'a [UnitGroup],
    weights: &'a Weights,
    /// Multiplications of one weight, by parameter.
    uses: HashMap<ParamId, f64>,
    /// Places left on each axis, by parameter.
    left: HashMap<ParamId, Vec<usize>>,
    removed: Vec<HashSet<usize>>,
    /// What biases get for constants that go.
    moved: HashMap<ParamId, Vec<f32>>,
    before: f64,
    /// Whether the caller resizes what is written into the model.
    resizes: bool,
}

impl<'a> Scored<'a> {
    /// `flops` has the operations of one weight by path; `resizes` says whether the caller resizes what is
    /// written into the model.
    pub(super) fn new(
        groups: &'a [UnitGroup],
        weights: &'a Weights,
        flops: &HashMap<String, f64>,
        resizes: bool,
    ) -> Self {
        let mut uses = HashMap::new();
        let mut left = HashMap::new();
        let mut counted = HashSet::new();
        for axis in groups.iter().flat_map(|group| &group.axes) {
            let Some(weight) = weights.get(&axis.id) else {
                continue;
            };
            // Those of a tied parameter under all of its paths.
            if counted.insert(&axis.path) {
                let flops = flops.get(&axis.path).copied().unwrap_or(0.0);
                *uses.entry(axis.id).or_insert(0.0) += flops / 2.0;
            }
            left.insert(axis.id, weight.shape.clone());
        }
        let mut scored = Self {
            groups,
            weights,
            uses,
            left,
            removed: vec![HashSet::new(); groups.len()],
            moved: HashMap::new(),
            before: 0.0,
            resizes,
        };
        scored.before = scored.multiplications();
        scored
    }

    pub(super) fn multiplications_before(&self) -> f64 {
        self.before
    }

    /// Those that are left.
    pub(super) fn multiplications(&self) -> f64 {
        let of = |(id, uses): (&ParamId, &f64)| -> f64 {
            uses * self.left[id].iter().map(|n| *n as f64).product::<f64>()
        };
        self.uses.iter().map(of).sum()
    }

    pub(super) fn removed(&self) -> &[HashSet<usize>] {
        &self.removed
    }

    fn remove(&mut self, group: usize, unit: usize) {
        if self.removed[group].insert(unit) {
            // Once, of a parameter that is there under several paths.
            let mut met = HashSet::new();
            for axis in &self.groups[group].axes {
                if met.insert((axis.id, axis.axis))
                    && let Some(left) = self.left.get_mut(&axis.id)
                {
                    left[axis.axis] -= axis.places[unit].len();
                }
            }
        }
    }

    /// Whether a group has units to lose: one stays.
    fn can_go(&self, group: usize) -> bool {
        let one = &self.groups[group];
        one.fixed.is_none() && one.units - self.removed[group].len() > 1
    }

    /// The squares of the weights that make a unit, or that read it.
    fn squares(&self, group: usize, unit: usize, does: fn(UnitRole) -> bool) -> f64 {
        let axes = self.groups[group]
            .axes
            .iter()
            .filter(|axis| does(axis.role));
        axes.filter_map(|axis| {
            let weight = self.weights.get(&axis.id)?;
            Some(weight.squares(axis.axis, &axis.places[unit]))
        })
        .sum()
    }

    /// Removes what nothing reads, and what is made of nothing where its readers can do without.
    pub(super) fn remove_dead(&mut self, readers: &Readers) {
        let groups = self.groups;
        for (index, group) in groups.iter().enumerate() {
            if !group.axes.iter().any(|axis| axis.role.reads()) {
                // What becomes of its units is not known.
                continue;
            }
            for unit in 0..group.units {
                if !self.can_go(index) {
                    break;
                }
                if self.squares(index, unit, UnitRole::reads) == 0.0 {
                    self.remove(index, unit);
                    continue;
                }
                // What was one number for this batch is another one for the next.
                if group.varies || self.squares(index, unit, UnitRole::makes) != 0.0 {
                    continue;
                }
                let reading = group.axes.iter().filter(|axis| axis.role.reads());
                let constants = reading.map(|axis| Some((axis, readers.constants(axis, unit)?)));
                let Some(constants) = constants.collect::<Option<Vec<_>>>() else {
                    continue;
                };
                self.remove(index, unit);
                for (axis, (constants, bias)) in constants {
                    let (Some(bias), Some(weight)) = (bias, self.weights.get(&axis.id)) else {
                        continue;
                    };
                    let made = weight.applied(axis.axis, &axis.places[unit], &constants);
                    let moved = self
                        .moved
                        .entry(bias)
                        .or_insert_with(|| vec![0.0; made.len()]);
                    moved
                        .iter_mut()
                        .zip(made)
                        .for_each(|(sum, made)| *sum += made);
                }
            }
        }
    }

    /// What biases get for constants that go.
    pub(super) fn moved(&self) -> &HashMap<ParamId, Vec<f32>> {
        &self.moved
    }

    /// Removes the least important units until at most `share` of the multiplications is left.
    pub(super) fn remove_until(&mut self, share: f64) -> Result<(), PruneError> {
        let mut order: Vec<(f64, usize, usize)> = Vec::new();
        for (index, group) in self.groups.iter().enumerate() {
            if group.fixed.is_some() {
                continue;
            }
            let of = |unit| {
                self.squares(index, unit, UnitRole::makes)
                    + self.squares(index, unit, UnitRole::reads)
            };
            let squares: Vec<f64> = (0..group.units).map(of).collect();
            let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
            let units = squares.iter().enumerate();
            order.extend(units.map(|(unit, one)| (one / f64::max(mean, 1e-30), index, unit)));
        }
        order.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        for (_, group, unit) in order {
            if self.multiplications() <= share * self.before {
                return Ok(());
            }
            if self.can_go(group) {
                self.remove(group, unit);
            }
        }
        match self.multiplications() <= share * self.before {
            true => Ok(()),
            false => Err(PruneError::CannotShrink {
                reason: format!(
                    "with all units gone that can go, {:.3} of the multiplications are left, not {share}{}",
                    self.multiplications() / f64::max(self.before, 1.0),
                    self.kept_by_the_model()
                ),
            }),
        }
    }

    /// Of what the model's author decides: where units stay, and why.
    fn kept_by_the_model(&self) -> String {
        let mut text = String::new();
        let mut is_written = false;
        for group in self.groups {
            let Some(why) = &group.fixed else { continue };
            if matches!(why, FixedBy::Input | FixedBy::Output) {
                continue;
            }
            let may_follow = [FixedBy::Groups, FixedBy::Reshape, FixedBy::Written];
            is_written |= may_follow.contains(why);
            if let Some(maker) = group.axes.iter().find(|axis| axis.role.makes()) {
                text += &format!("; those that `{}` makes stay: {why}", maker.path);
            }
        }
        if is_written {
            text += match self.resizes {
                true => {
                    ". `resize` does not reach the numbers that are written into the model there"
                }
                false => {
                    ". With `Shrink::shrink_resizing` numbers that are written into the model can follow"
                }
            };
        }
        text
    }
}
