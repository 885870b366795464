//! What was cut out of a model.

use std::fmt;

use burn_lean_graph::{UnitGroup, UnitRole};
use serde::{Deserialize, Serialize};

/// What [`Shrink`](crate::Shrink) did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShrinkReport {
    /// The groups of units, in the order of the parameters.
    pub groups: Vec<ShrunkGroup>,
    /// Multiplications of a forward pass over the batch before, in layers whose weights have units.
    pub multiplications_before: f64,
    /// The same afterwards.
    pub multiplications_after: f64,
}

/// What became of one group of units.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShrunkGroup {
    /// Paths of the parameters that make its units, or read them where none does.
    pub paths: Vec<String>,
    /// How many units there were.
    pub units: usize,
    /// How many went.
    pub removed: usize,
    /// Why none could go; `None` where some could.
    pub fixed: Option<String>,
}

impl ShrunkGroup {
    pub(super) fn new(group: &UnitGroup, removed: usize) -> Self {
        let of = |does: fn(UnitRole) -> bool| {
            let axes = group.axes.iter().filter(|axis| does(axis.role));
            axes.map(|axis| axis.path.clone()).collect::<Vec<_>>()
        };
        let makers = of(UnitRole::makes);
        Self {
            paths: match makers.is_empty() {
                true => of(UnitRole::reads),
                false => makers,
            },
            units: group.units,
            removed,
            fixed: group.fixed.as_ref().map(ToString::to_string),
        }
    }
}

impl ShrinkReport {
    /// How many units went.
    pub fn removed(&self) -> usize {
        self.groups.iter().map(|group| group.removed).sum()
    }
}

impl fmt::Display for ShrinkReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for group in &self.groups {
            write!(f, "{}: ", group.paths.join(", "))?;
            match &group.fixed {
                Some(why) if group.units == 1 => writeln!(f, "1 unit stays: {why}")?,
                Some(why) => writeln!(f, "{} units stay: {why}", group.units)?,
                None => writeln!(f, "{} of {} units removed", group.removed, group.units)?,
            }
        }
        let left = self.multiplications_after / self.multiplications_before.max(1.0);
        write!(f, "{:.1} % of the multiplications are left", 100.0 * left)
    }
}
