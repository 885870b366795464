//! A support that shrinks geometrically, re-solved at each stage, then splicing.
//!
//! ```text
//! S ← the e·k best weights by magnitude
//! repeat for each stage:
//!     w_S ← the exact minimum on S
//!     S   ← the weights whose removal costs most, fewer by a constant factor, at last k
//! splice: many pruned weights in, as many kept ones out, as long as the objective falls
//! w_S ← the exact minimum on S
//! ```
//!
//! After the stages and after the splices, weights enter that the budget still has room for.
//!
//! The search leaves out samples whose gradient is negligible against the ridge; the last minimum
//! and the reported objective are over all of them. Many small gradients can matter together where
//! each of them does not: if the objective over all samples turns out higher than the search saw
//! it, the search is repeated with all of them. What splicing makes of the last stage is never worse
//! than it over all samples either.

use crate::error::PruneError;
use crate::problem::Problem;
use crate::problem::feasible::Feasible;
use crate::problem::solution::Step;
use crate::solver::back_solve::{back_solve, refine};
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;
use crate::solver::filling::filled;
use crate::solver::method::ChitaConfig;
use crate::solver::scores;
use crate::solver::splicing::Rounds;
use crate::solver::whole::Whole;
use crate::solver::working_set::{Shared, WorkingSet};

/// Samples with a squared gradient norm below this fraction of 2λ are left out of the search.
const NEGLIGIBLE: f64 = 0.05;

/// Part of the objective by which that over all samples may exceed that over those of the search.
const UNSEEN: f64 = 5e-3;

/// Weights that a first support may always have.
const CHEAP: f64 = 4096.0;

/// The weights `[p]` and their support.
type Found = (Vec<f32>, Vec<usize>);

/// The search; once more with all samples where those that it left out matter.
pub(crate) fn chita(
    problem: &Problem,
    feasible: &Feasible,
    config: &ChitaConfig,
    dead: &Dead,
    shared: &mut Shared,
    clock: &mut Clock,
) -> Result<Found, PruneError> {
    let (found, unseen) = search(problem, feasible, config, dead, NEGLIGIBLE, shared, clock)?;
    if unseen <= UNSEEN {
        return Ok(found);
    }
    clock.restart();
    let (found, _) = search(problem, feasible, config, dead, 0.0, shared, clock)?;
    Ok(found)
}

/// The search without `negligible` samples; and by which part of it the objective over all samples
/// exceeds that of the search.
fn search(
    problem: &Problem,
    feasible: &Feasible,
    config: &ChitaConfig,
    dead: &Dead,
    negligible: f64,
    shared: &mut Shared,
    clock: &mut Clock,
) -> Result<(Found, f64), PruneError> {
    let all: Vec<usize> = (0..problem.parameters()).collect();
    let magnitude = dead.demote(&all, scores::magnitude(problem));
    let stages = config.stages;
    // Of many weights, no more than a quarter of those that will be pruned: the others would only
    // be pruned again. A few thousand cost nothing.
    let (weights, share) = feasible.contested();
    let k = weights as f64 / share;
    let most = (0.75 + 0.25 * share).max(CHEAP / k);
    let expansion = match stages {
        0 => 1.0,
        _ => config.expansion.min(most).min(feasible.share()).max(1.0),
    };
    let first = feasible.select(&all, &magnitude, expansion)?;
    let mut set = WorkingSet::new(problem, first, negligible, shared)?;
    let mut solved = set.solve()?;
    clock.note(Step::Start, solved.objective, set.support().len());
    for stage in 1..=stages {
        let costs = dead.demote(set.support(), set.removal_costs(&solved)?);
        let left = expansion.powf(1.0 - stage as f64 / stages as f64);
        let kept = feasible.select(set.support(), &costs, left)?;
        set.shrink(kept)?;
        solved = set.solve()?;
        clock.note(Step::Shrink, solved.objective, set.support().len());
    }
    (set, solved) = filled(set, solved, feasible, dead)?;
    let (shrunk, least) = (set.support().to_vec(), solved.objective);
    if config.max_splices > 0 {
        let rounds = Rounds {
            most: config.max_splices,
            zero: problem.completed_square(),
        };
        let whole = Whole::new(problem, feasible, set, solved)?;
        Whole { set, solved, .. } = whole.spliced(feasible, &rounds, dead, clock)?;
        (set, solved) = filled(set, solved, feasible, dead)?;
    }
    let (weights, objective) = refine(problem, &set, &solved)?;
    // The linear term alone can be of any sign; what is left of the sum of squares is not.
    let seen = solved.objective - problem.completed_square();
    let unseen = match set.rows() {
        Some(_) => (objective - solved.objective) / seen.max(f64::MIN_POSITIVE),
        None => 0.0,
    };
    // Samples that are left out add nothing below 0: over all of them the last stage has `least` at
    // least. Where that proves nothing, it is computed.
    let moved = set.rows().is_some() && set.support() != shrunk;
    if moved && objective > least && unseen <= UNSEEN {
        let before = back_solve(problem, &shrunk)?;
        if problem.objective_at(&before)?.total() < objective {
            return Ok(((before, shrunk), unseen));
        }
    }
    Ok(((weights, set.support().to_vec()), unseen))
}
