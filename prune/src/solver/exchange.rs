//! Exchanges of one kept weight i against one pruned weight j, with their exact gain.
//!
//! With K, u and q of the present support ([`working_set`](super::working_set)), g the gradient and
//! c = a_iᵀ K⁻¹ a_j:
//!
//! ```text
//! removing i costs                       Δ_i = λ w_i² / (1 − q_i)
//! it moves the gradient at j to          g_j − 2λ c w_i / (1 − q_i)
//! and the curvature at j to              2λ (1 + q_j + c² / (1 − q_i))
//! so the exchange lowers the objective by
//!     (g_j − 2λ c w_i / (1 − q_i))² / (4λ (1 + q_j + c² / (1 − q_i))) − Δ_i
//! ```
//!
//! Many disjoint exchanges are tried together, fewer where their sum does not lower the objective;
//! one alone does what the formula says. Where the most promising weights hold no improvement, all
//! pairs are looked at: |c| ≤ √(q_i q_j) rules most of them out.

use faer::Mat;

use crate::error::PruneError;
use crate::host::read;
use crate::problem::Problem;
use crate::problem::feasible::Feasible;
use crate::problem::solution::{Step, Termination};
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;
use crate::solver::filling::filled;
use crate::solver::working_set::{Solved, WorkingSet};

/// Kept weights that are looked at together.
const LEAVING: usize = 256;
/// Pruned weights that are looked at together.
const ENTERING: usize = 512;
/// An improvement is one above this fraction of the sum of squares: F32 products tell no more apart.
const TOLERANCE: f64 = 1e-6;

/// Leverages are below 1; rounding may lift them above.
const MOST: f64 = 1.0 - 1e-9;

/// The state of the search: everything the formulas above need.
struct Candidates {
    /// q of all weights.
    leverage: Vec<f64>,
    /// Gradient of all weights.
    gradient: Vec<f64>,
    /// Kept weights that may leave, the cheapest to remove first, with what they cost.
    kept: Vec<Kept>,
    /// Pruned weights that may enter, the best first.
    pruned: Vec<usize>,
}

/// A kept weight.
#[derive(Debug, Clone, Copy)]
struct Kept {
    index: usize,
    weight: f64,
    cost: f64,
}

/// An exchange that lowers the objective.
#[derive(Debug, Clone, Copy)]
struct Exchange {
    leaves: usize,
    enters: usize,
    gain: f64,
}

/// Exchanges weights until none improves or `limit` is reached; what the budget has room for enters.
pub(crate) fn exchange<'a>(
    problem: &'a Problem,
    feasible: &Feasible,
    mut set: WorkingSet<'a>,
    mut solved: Solved,
    limit: Option<usize>,
    dead: &Dead,
    clock: &mut Clock,
) -> Result<(WorkingSet<'a>, Solved, Termination), PruneError> {
    let mut left = limit.unwrap_or(usize::MAX);
    let mut together = usize::MAX;
    // Sketched leverages first; exact ones for the proof that no exchange is left.
    let mut exact = false;
    while left > 0 {
        let search = Search {
            problem,
            feasible,
            set: &set,
            solved: &solved,
            tolerance: TOLERANCE * (solved.objective - problem.completed_square()),
        };
        let candidates = search.candidates(dead, exact)?;
        let mut found = match exact {
            false => search.promising(&candidates)?,
            true => search.any(&candidates)?,
        };
        if found.is_empty() {
            if exact {
                return Ok((set, solved, Termination::ExchangeOptimal));
            }
            exact = limit.is_none();
            if exact {
                continue;
            }
            return Ok((set, solved, Termination::Completed));
        }
        found.truncate(left.min(together));
        loop {
            let leaving: Vec<usize> = found.iter().map(|exchange| exchange.leaves).collect();
            let entering: Vec<usize> = found.iter().map(|exchange| exchange.enters).collect();
            let next = set.exchanged(&leaving, &entering)?;
            let next_solved = next.solve()?;
            if next_solved.objective < solved.objective {
                left -= found.len();
                // Grow again after a success, so that one bad batch does not slow the rest down.
                together = found.len().saturating_mul(2);
                (set, solved) = (next, next_solved);
                clock.note(Step::Exchange, solved.objective, set.support().len());
                // A cheap weight for a dear one leaves operations.
                (set, solved) = filled(set, solved, feasible, dead)?;
                break;
            }
            if found.len() == 1 {
                // The formula promised less than rounding took. That says nothing about other
                // exchanges: where there is no limit, all of them are looked at once.
                if exact || limit.is_some() {
                    return Ok((set, solved, Termination::Completed));
                }
                exact = true;
                break;
            }
            found.truncate(found.len().div_ceil(4));
        }
    }
    Ok((set, solved, Termination::MaxIterations))
}

struct Search<'a> {
    problem: &'a Problem,
    feasible: &'a Feasible,
    set: &'a WorkingSet<'a>,
    solved: &'a Solved,
    tolerance: f64,
}

impl Search<'_> {
    fn candidates(&self, dead: &Dead, exact: bool) -> Result<Candidates, PruneError> {
        let lambda = self.problem.lambda();
        let support = self.set.support();
        let leverage = self.set.leverage_of_all(&self.solved.factor, exact)?;
        // r − a·1 = 2λu on the support's minimum.
        let residual: Vec<f64> = self.solved.dual.iter().map(|u| 2.0 * lambda * u).collect();
        let residual = self.set.scatter_rows(&residual);
        let product = self.problem.gradients().transpose_multiply(&residual)?;
        let dense = self.problem.dense().iter();
        let gradient: Vec<f64> = product
            .iter()
            .zip(dense)
            .map(|(product, dense)| -f64::from(*product) - 2.0 * lambda * f64::from(*dense))
            .collect();
        let mut kept: Vec<Kept> = support
            .iter()
            .zip(&self.solved.weights)
            .filter(|(index, _)| self.feasible.may_leave(**index))
            .map(|(index, weight)| {
                let weight = f64::from(*weight);
                let cost = match dead.contains(*index) {
                    true => 0.0,
                    false => lambda * weight * weight / (1.0 - leverage[*index].min(MOST)),
                };
                Kept {
                    index: *index,
                    weight,
                    cost,
                }
            })
            .collect();
        kept.sort_by(|a, b| a.cost.total_cmp(&b.cost));
        let mut is_kept = vec![false; self.problem.parameters()];
        support.iter().for_each(|index| is_kept[*index] = true);
        let mut pruned: Vec<usize> = (0..self.problem.parameters())
            .filter(|index| !is_kept[*index] && !dead.contains(*index))
            .collect();
        let gain = |index: usize| gradient[index].powi(2) / (1.0 + leverage[index]);
        pruned.sort_by(|a, b| gain(*b).total_cmp(&gain(*a)));
        Ok(Candidates {
            leverage,
            gradient,
            kept,
            pruned,
        })
    }

    /// Improving exchanges among the most promising weights, disjoint, the best first.
    fn promising(&self, candidates: &Candidates) -> Result<Vec<Exchange>, PruneError> {
        let kept = &candidates.kept[..candidates.kept.len().min(LEAVING)];
        let pruned = &candidates.pruned[..candidates.pruned.len().min(ENTERING)];
        let mut found = self.improving(kept, pruned)?;
        self.disjoint(&mut found);
        Ok(found)
    }

    /// The first improving exchanges among all pairs; none only where there is none.
    fn any(&self, candidates: &Candidates) -> Result<Vec<Exchange>, PruneError> {
        for kept in candidates.kept.chunks(LEAVING) {
            let possible = |enters: &usize| {
                kept.iter()
                    .any(|kept| self.bound(candidates, kept, *enters) > kept.cost + self.tolerance)
            };
            let pruned = candidates.pruned.iter().copied();
            let pruned: Vec<usize> = pruned.filter(possible).collect();
            let mut found = Vec::new();
            for pruned in pruned.chunks(4 * ENTERING) {
                found.extend(self.improving(kept, pruned)?);
            }
            self.disjoint(&mut found);
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// An upper bound of the gain at j once i is gone, over all c the two leverages allow.
    fn bound(&self, candidates: &Candidates, kept: &Kept, enters: usize) -> f64 {
        let lambda = self.problem.lambda();
        let (g, q) = (
            candidates.gradient[enters].abs(),
            candidates.leverage[enters],
        );
        let left = 1.0 - candidates.leverage[kept.index].min(MOST);
        let slope = 2.0 * lambda * kept.weight.abs() / left;
        let most = (candidates.leverage[kept.index] * q).sqrt();
        // Without a bound on c the largest gain is at c = slope·left·(1 + q)/g.
        if slope * left * (1.0 + q) <= most * g {
            return g * g / (4.0 * lambda * (1.0 + q)) + kept.cost;
        }
        (g + slope * most).powi(2) / (4.0 * lambda * (1.0 + q + most * most / left))
    }

    /// All improving exchanges between `kept` and `pruned` that are allowed, from exact q and c.
    fn improving(&self, kept: &[Kept], pruned: &[usize]) -> Result<Vec<Exchange>, PruneError> {
        if kept.is_empty() || pruned.is_empty() {
            return Ok(Vec::new());
        }
        let lambda = self.problem.lambda();
        let leaving = self.columns(kept.iter().map(|kept| kept.index))?;
        let entering = self.columns(pruned.iter().copied())?;
        let solved = self.solved.factor.solve_many(&leaving);
        let cross = entering.transpose() * &solved;
        let lifted = self.solved.factor.half_solve(&entering);
        let entry = |(row, enters): (usize, &usize)| {
            let a = entering.col_as_slice(row).iter();
            let product: f64 = a.zip(&self.solved.dual).map(|(a, u)| a * u).sum();
            let dense = f64::from(self.problem.dense()[*enters]);
            let lifted = lifted.col_as_slice(row).iter();
            let q: f64 = lifted.map(|value| value * value).sum();
            (-2.0 * lambda * (product + dense), q)
        };
        let entries: Vec<(f64, f64)> = pruned.iter().enumerate().map(entry).collect();
        let room = self.feasible.room(self.set.support());
        let allowed = |leaves, enters| self.feasible.allows_exchange(leaves, enters, &room);
        let mut found = Vec::new();
        for (column, kept) in kept.iter().enumerate() {
            let pairs = leaving
                .col_as_slice(column)
                .iter()
                .zip(solved.col_as_slice(column));
            let own: f64 = pairs.map(|(a, b)| a * b).sum();
            let left = (1.0 - own).max(1.0 - MOST);
            let cost = match kept.cost {
                0.0 => 0.0,
                _ => lambda * kept.weight * kept.weight / left,
            };
            let slope = 2.0 * lambda * kept.weight / left;
            for (row, enters) in pruned.iter().enumerate() {
                let (gradient, q) = entries[row];
                let c = cross[(row, column)];
                let gain = (gradient - slope * c).powi(2)
                    / (4.0 * lambda * (1.0 + q + c * c / left))
                    - cost;
                if gain > self.tolerance && allowed(kept.index, *enters) {
                    found.push(Exchange {
                        leaves: kept.index,
                        enters: *enters,
                        gain,
                    });
                }
            }
        }
        Ok(found)
    }

    /// Keeps the best exchanges of which no two share a weight, as far as pattern and budget allow one
    /// after the other.
    fn disjoint(&self, found: &mut Vec<Exchange>) {
        found.sort_by(|a, b| {
            b.gain
                .total_cmp(&a.gain)
                .then(a.leaves.cmp(&b.leaves))
                .then(a.enters.cmp(&b.enters))
        });
        let mut taken = std::collections::HashSet::new();
        let mut room = self.feasible.room(self.set.support());
        found.retain(|exchange| {
            let free = !taken.contains(&exchange.leaves) && !taken.contains(&exchange.enters);
            let allowed = free
                && self
                    .feasible
                    .allows_exchange(exchange.leaves, exchange.enters, &room);
            if allowed {
                taken.extend([exchange.leaves, exchange.enters]);
                let (leaves, enters) = (exchange.leaves, exchange.enters);
                self.feasible.record_exchange(leaves, enters, &mut room);
            }
            allowed
        });
    }

    /// Columns of G over the rows of the working set, in the given order.
    fn columns(&self, indices: impl Iterator<Item = usize>) -> Result<Mat<f64>, PruneError> {
        let indices: Vec<usize> = indices.collect();
        let mut sorted = indices.clone();
        sorted.sort_unstable();
        let columns = self
            .set
            .restrict(self.problem.gradients().columns(&sorted)?);
        let rows = columns.dims()[0];
        let values = read(columns.transpose())?;
        let place = |index: &usize| sorted.partition_point(|other| other < index);
        let places: Vec<usize> = indices.iter().map(place).collect();
        Ok(Mat::from_fn(rows, indices.len(), |row, column| {
            f64::from(values[places[column] * rows + row])
        }))
    }
}
