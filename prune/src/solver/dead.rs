//! What happens to the weights that no gradient depends on.

use crate::problem::Problem;
use crate::solver::DeadColumns;

/// The dead weights of a problem, and whether they go first.
#[derive(Debug)]
pub(crate) struct Dead(Option<Vec<bool>>);

impl Dead {
    pub(crate) fn new(problem: &Problem, policy: DeadColumns) -> Self {
        let first = policy == DeadColumns::PrunedFirst && !problem.dead().is_empty();
        Self(first.then(|| {
            let mut dead = vec![false; problem.parameters()];
            problem.dead().iter().for_each(|index| dead[*index] = true);
            dead
        }))
    }

    /// Whether a weight is to be pruned before all live ones.
    pub(crate) fn contains(&self, index: usize) -> bool {
        self.0.as_ref().is_some_and(|dead| dead[index])
    }

    /// Scores (not negative) in which dead weights come after live ones, in their own order.
    pub(crate) fn demote(&self, indices: &[usize], mut scores: Vec<f64>) -> Vec<f64> {
        for (index, score) in indices.iter().zip(&mut scores) {
            if self.contains(*index) {
                *score = -1.0 / (1.0 + *score);
            }
        }
        scores
    }
}
