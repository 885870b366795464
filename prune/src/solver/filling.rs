//! The rest of a budget: what fits beside the kept weights enters.
//!
//! Stages and splices look at some weights at a time, and may leave operations that another weight could
//! use. One more never raises the objective.

use crate::error::PruneError;
use crate::problem::feasible::Feasible;
use crate::solver::dead::Dead;
use crate::solver::working_set::{Solved, WorkingSet};

/// The working set with the pruned weights that there is room for, those first that gain most per
/// operation, and the minimum on it. Dead weights that went first do not come back.
pub(crate) fn filled<'a>(
    mut set: WorkingSet<'a>,
    solved: Solved,
    feasible: &Feasible,
    dead: &Dead,
) -> Result<(WorkingSet<'a>, Solved), PruneError> {
    let mut candidates = feasible.fitting(set.support());
    candidates.retain(|index| !dead.contains(*index));
    if candidates.is_empty() {
        return Ok((set, solved));
    }
    // λ v² bounds what a weight gains, λ v² / (1 + q).
    let wishes = set.wishes(&candidates, &solved)?.into_iter();
    let gains: Vec<f64> = wishes.map(|wish| f64::from(wish).powi(2)).collect();
    let entering = feasible.fill(set.support(), &candidates, &gains);
    if entering.is_empty() {
        return Ok((set, solved));
    }
    set.widen(&entering)?;
    let solved = set.solve()?;
    Ok((set, solved))
}
