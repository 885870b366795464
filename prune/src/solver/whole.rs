//! The whole Fisher, spliced: single weights by a [`Tableau`] of the most promising ones, groups by
//! solving for them.
//!
//! ```text
//! repeat:
//!     T ← the kept weights whose removal costs least      λ w_j² / (1 − q_j)
//!         and the pruned ones that gain most              λ v_j² / (1 + q_j)
//!     while it lowers the objective:
//!         exchange the pair of T that gains most, the others solved for again
//!     w ← the exact minimum on the new support
//! ```
//!
//! v_j = w₀_j + a_jᵀ u is what a weight would like to be, with u, q of the present support
//! ([`working_set`](super::working_set)): the gain of one weight that enters alone, the cost of one that
//! leaves alone, exactly. The pairs are exact, too, after any number of exchanges: a round is as good
//! as that many single exchanges, and is paid for once.

use crate::error::PruneError;
use crate::problem::Problem;
use crate::problem::feasible::Feasible;
use crate::problem::solution::Step;
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;
use crate::solver::splicing::{Appraisal, LITTLE, Rounds, Spliceable, TOLERANCE, splice};
use crate::solver::tableau::Tableau;
use crate::solver::working_set::{Solved, WorkingSet, removal_cost};

/// Kept weights of a tableau, and as many pruned ones.
const PROMISING: usize = 64;
/// Weights whose leverage is looked at, for each of them.
const BOUNDED: usize = 4;
/// Pruned weights beside those whose columns are at hand.
const OUTSIDE: usize = 256;

/// A working set with the minimum on it.
pub(crate) struct Whole<'a> {
    problem: &'a Problem,
    pub(crate) set: WorkingSet<'a>,
    pub(crate) solved: Solved,
    /// Weights that are looked at, ascending.
    pool: Vec<usize>,
}

impl<'a> Whole<'a> {
    /// Looks at the weights whose columns are at hand, and at some of the others that may gain most.
    pub(crate) fn new(
        problem: &'a Problem,
        feasible: &Feasible,
        mut set: WorkingSet<'a>,
        solved: Solved,
    ) -> Result<Self, PruneError> {
        let known = set.resident().unwrap_or(set.support());
        let all = 0..problem.parameters();
        let wanted = match feasible.exchanges_single_weights() {
            true => OUTSIDE,
            // Groups stay whole.
            false => known.len(),
        };
        let pool: Vec<usize> = match wanted >= all.len() - known.len() {
            true => all.collect(),
            false => {
                let is_outside = |index: &usize| known.binary_search(index).is_err();
                let outside: Vec<usize> = all.filter(is_outside).collect();
                let wishes = set.wishes(&outside, &solved)?;
                let gains = wishes.iter().map(|wish| f64::from(*wish).powi(2));
                let gains: Vec<f64> = gains.collect();
                let best = feasible.admit(&[], &[], &outside, &gains, wanted);
                let mut pool: Vec<usize> = known.iter().copied().chain(best).collect();
                pool.sort_unstable();
                pool
            }
        };
        set.keep(&pool)?;
        Ok(Self {
            problem,
            set,
            solved,
            pool,
        })
    }

    /// Splices until nothing improves any more or the rounds are used up.
    pub(crate) fn spliced(
        mut self,
        feasible: &Feasible,
        rounds: &Rounds,
        dead: &Dead,
        clock: &mut Clock,
    ) -> Result<Self, PruneError> {
        if !feasible.exchanges_single_weights() {
            return splice(self, feasible, rounds, dead, clock);
        }
        for _ in 0..rounds.most {
            let squares = self.objective() - rounds.zero;
            let (leaving, entering) = self.swaps(feasible, dead, TOLERANCE * squares)?;
            if entering.is_empty() {
                break;
            }
            let set = self.set.exchanged(&leaving, &entering)?;
            let solved = set.solve()?;
            let gain = self.objective() - solved.objective;
            // The tableau promised more; rounding took it.
            if gain <= TOLERANCE * squares {
                break;
            }
            (self.set, self.solved) = (set, solved);
            clock.note(Step::Splice, self.objective(), self.support().len());
            if gain < LITTLE * squares {
                break;
            }
        }
        Ok(self)
    }

    /// What leaves and what enters, as long as each exchange gains more than `least`.
    fn swaps(
        &self,
        feasible: &Feasible,
        dead: &Dead,
        least: f64,
    ) -> Result<(Vec<usize>, Vec<usize>), PruneError> {
        let weights = self.promising(feasible, dead)?;
        if weights.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let is_kept = |index: &usize| self.support().binary_search(index).is_ok();
        let before: Vec<bool> = weights.iter().map(is_kept).collect();
        let wishes = self.set.wishes(&weights, &self.solved)?;
        let wishes = wishes.into_iter().map(f64::from).collect();
        let lifted = self.solved.factor.half_solve(&self.set.columns(&weights)?);
        let gram = lifted.transpose() * &lifted;
        let mut tableau = Tableau::new(before.clone(), wishes, gram);
        let mut room = feasible.room(self.support());
        for _ in 0..weights.len() {
            let allowed = |leaves: usize, enters: usize| {
                feasible.allows_exchange(weights[leaves], weights[enters], &room)
            };
            let least = least / self.problem.lambda();
            let Some((leaves, enters)) = tableau.best_swap(least, allowed) else {
                break;
            };
            tableau.toggle(leaves);
            tableau.toggle(enters);
            feasible.record_exchange(weights[leaves], weights[enters], &mut room);
        }
        let moved = |was_kept: bool| {
            let flags = before.iter().zip(tableau.kept());
            let moved = flags.map(|(before, after)| *before == was_kept && *after != was_kept);
            let pairs = weights.iter().zip(moved);
            pairs
                .filter(|(_, moved)| *moved)
                .map(|(index, _)| *index)
                .collect()
        };
        Ok((moved(true), moved(false)))
    }

    /// The weights that are worth a closer look, ascending: of each pool its part of them, the
    /// cheapest kept and the best pruned ones; and of an N:M pattern those of the most promising blocks.
    fn promising(&self, feasible: &Feasible, dead: &Dead) -> Result<Vec<usize>, PruneError> {
        let wishes = self.set.wishes(&self.pool, &self.solved)?;
        let mut support = self.support().iter().copied().peekable();
        let (mut kept, mut pruned) = (Vec::new(), Vec::new());
        for (index, wish) in self.pool.iter().zip(wishes) {
            let is_kept = support.next_if_eq(index).is_some();
            // A dead weight is kept only where all live ones are.
            if !dead.contains(*index) {
                let side = if is_kept { &mut kept } else { &mut pruned };
                side.push((*index, f64::from(wish).powi(2)));
            }
        }
        let mut weights = feasible.best_pairs(&kept, &pruned, PROMISING);
        // The wishes bound what the leverages make of them.
        let near = [(kept, -1.0), (pruned, 1.0)].map(|(side, sign)| {
            let scores: Vec<f64> = side.iter().map(|(_, square)| sign * square).collect();
            let indices: Vec<usize> = side.iter().map(|(index, _)| *index).collect();
            let near = feasible.best_of_pools(&indices, &scores, BOUNDED * PROMISING);
            let is_near = |(index, _): &(usize, f64)| near.binary_search(index).is_ok();
            (side.into_iter().filter(is_near).collect::<Vec<_>>(), sign)
        });
        let both = near.iter().flat_map(|(side, _)| side);
        let mut both: Vec<usize> = both.map(|(index, _)| *index).collect();
        both.sort_unstable();
        let leverage = self.set.leverage(&both, &self.solved.factor)?;
        for (side, sign) in near {
            let score = |(index, square): &(usize, f64)| {
                // Every near weight has a leverage; a sketch may exceed the true value, below 1.
                let q = both.binary_search(index).map_or(0.0, |at| leverage[at]);
                sign * square / (1.0 + sign * q.min(0.999999))
            };
            let scores: Vec<f64> = side.iter().map(score).collect();
            let indices: Vec<usize> = side.iter().map(|(index, _)| *index).collect();
            weights.extend(feasible.best_of_pools(&indices, &scores, PROMISING));
        }
        weights.sort_unstable();
        weights.dedup();
        Ok(weights)
    }
}

impl Spliceable for Whole<'_> {
    fn support(&self) -> &[usize] {
        self.set.support()
    }

    fn objective(&self) -> f64 {
        self.solved.objective
    }

    fn appraise(&self) -> Result<Appraisal, PruneError> {
        let lambda = self.problem.lambda();
        let wishes = self.set.wishes(&self.pool, &self.solved)?;
        let leverage = self.set.leverage(&self.pool, &self.solved.factor)?;
        let mut kept = self.support().iter().copied().peekable();
        let mut appraisal = Appraisal {
            costs: Vec::new(),
            candidates: Vec::new(),
            gains: Vec::new(),
        };
        for ((index, wish), q) in self.pool.iter().zip(wishes).zip(leverage) {
            if kept.next_if_eq(index).is_some() {
                appraisal.costs.push(removal_cost(lambda, wish, q));
            } else {
                appraisal.candidates.push(*index);
                appraisal
                    .gains
                    .push(lambda * f64::from(wish).powi(2) / (1.0 + q));
            }
        }
        Ok(appraisal)
    }

    fn widened(&self, entering: &[usize]) -> Result<Self, PruneError> {
        let set = self.set.exchanged(&[], entering)?;
        Ok(Self {
            problem: self.problem,
            solved: set.solve()?,
            set,
            pool: self.pool.clone(),
        })
    }

    fn removal_costs(&self) -> Result<Vec<f64>, PruneError> {
        let lambda = self.problem.lambda();
        let leverage = self.set.leverage(self.set.support(), &self.solved.factor)?;
        let pairs = self.solved.weights.iter().zip(leverage);
        Ok(pairs.map(|(w, q)| removal_cost(lambda, *w, q)).collect())
    }

    fn narrowed(mut self, kept: Vec<usize>) -> Result<Self, PruneError> {
        self.set.shrink(kept)?;
        self.solved = self.set.solve()?;
        Ok(self)
    }
}
