//! Splicing: many pruned weights at a time against as many kept ones, by what each is worth.
//!
//! ```text
//! m ← k/8, k without what stays dense
//! repeat while m ≥ 1:
//!     S' ← S and the m pruned weights that gain most
//!     w  ← the exact minimum on S'
//!     S' ← without the weights whose removal costs least, until budget and pattern hold again
//!     w  ← the exact minimum on S'
//!     S  ← S' where that lowers the objective
//!     m ← m/2 where it hardly does
//! ```
//!
//! What enters and leaves are groups where weights are in groups. Where single weights compete over
//! the whole Fisher, [`whole`](super::whole) does the same one weight after the other, without
//! solving in between.
//!
//! Reference: [A polynomial algorithm for best-subset selection problem, Zhu et al.,
//! 2020](https://www.pnas.org/doi/10.1073/pnas.2014241117) (ABESS).

use crate::error::PruneError;
use crate::problem::feasible::Feasible;
use crate::problem::solution::Step;
use crate::solver::clock::Clock;
use crate::solver::dead::Dead;

/// The first m, as a part of the kept weights where some go.
const FIRST: usize = 8;
/// An improvement is one above this fraction of the sum of squares: F32 products tell no more apart.
pub(crate) const TOLERANCE: f64 = 1e-6;
/// A round that gains less than this fraction of it is followed by smaller ones, or by none.
pub(crate) const LITTLE: f64 = 1e-3;

/// A support with its best values, as splicing sees it.
pub(crate) trait Spliceable: Sized {
    /// The kept weights, ascending.
    fn support(&self) -> &[usize];
    /// What they leave of the objective.
    fn objective(&self) -> f64;
    /// What each kept weight costs, and what each of some pruned ones gains.
    fn appraise(&self) -> Result<Appraisal, PruneError>;
    /// With these weights (ascending), too.
    fn widened(&self, entering: &[usize]) -> Result<Self, PruneError>;
    /// What each kept weight costs.
    fn removal_costs(&self) -> Result<Vec<f64>, PruneError>;
    /// With only these of its weights.
    fn narrowed(self, kept: Vec<usize>) -> Result<Self, PruneError>;
}

/// What weights are worth.
pub(crate) struct Appraisal {
    /// Of the support, in its order.
    pub(crate) costs: Vec<f64>,
    /// Some pruned weights, ascending.
    pub(crate) candidates: Vec<usize>,
    /// What they gain.
    pub(crate) gains: Vec<f64>,
}

/// How far to go.
pub(crate) struct Rounds {
    /// Largest number of them.
    pub(crate) most: usize,
    /// What the objective is measured from: the constant that completing the square leaves.
    pub(crate) zero: f64,
}

/// Splices until nothing improves any more or the rounds are used up.
pub(crate) fn splice<S: Spliceable>(
    mut state: S,
    feasible: &Feasible,
    rounds: &Rounds,
    dead: &Dead,
    clock: &mut Clock,
) -> Result<S, PruneError> {
    let contested = state.support().len().saturating_sub(feasible.untouched());
    let mut count = contested.div_ceil(FIRST);
    let mut appraised = None;
    for _ in 0..rounds.most {
        let appraisal = match appraised.take() {
            Some(appraisal) => appraisal,
            None => state.appraise()?.without(dead),
        };
        if count == 0 || appraisal.candidates.is_empty() {
            break;
        }
        let (candidates, gains) = (&appraisal.candidates, &appraisal.gains);
        let costs = &appraisal.costs;
        let entering = feasible.admit(state.support(), costs, candidates, gains, count);
        let wide = state.widened(&entering)?;
        let costs = dead.demote(wide.support(), wide.removal_costs()?);
        let kept = feasible.select(wide.support(), &costs, 1.0)?;
        let next = match kept == state.support() {
            true => None,
            false => Some(wide.narrowed(kept)?),
        };
        let squares = state.objective() - rounds.zero;
        let lower = next.filter(|next| state.objective() - next.objective() > TOLERANCE * squares);
        let Some(next) = lower else {
            // A single group may be more than was asked for.
            count = count.min(entering.len()) / 2;
            appraised = Some(appraisal);
            continue;
        };
        if state.objective() - next.objective() < LITTLE * squares {
            count /= 2;
        }
        state = next;
        clock.note(Step::Splice, state.objective(), state.support().len());
    }
    Ok(state)
}

impl Appraisal {
    /// Dead weights that go first do not come back.
    pub(crate) fn without(mut self, dead: &Dead) -> Self {
        let pairs = self.candidates.iter().zip(&self.gains);
        let live = pairs.filter(|(index, _)| !dead.contains(**index));
        (self.candidates, self.gains) = live.map(|(index, gain)| (*index, *gain)).unzip();
        self
    }
}
