//! The trace of a solver, and the solution at its end.

use std::time::Instant;

use crate::error::PruneError;
use crate::problem::Problem;
use crate::problem::solution::{Solution, Step, TracePoint};

/// Time since the solver began, with what happened.
#[derive(Debug)]
pub(crate) struct Clock {
    start: Instant,
    trace: Vec<TracePoint>,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            start: Instant::now(),
            trace: Vec::new(),
        }
    }

    /// Notes the objective after a step.
    pub(crate) fn note(&mut self, step: Step, objective: f64, k: usize) {
        self.trace.push(TracePoint {
            objective,
            k,
            seconds: self.start.elapsed().as_secs_f64(),
            step,
        });
    }

    /// Forgets what happened: it begins anew. The time goes on.
    pub(crate) fn restart(&mut self) {
        self.trace.clear();
    }

    /// The solution at the end of `step`, with its exact objective.
    pub(crate) fn finish(
        mut self,
        problem: &Problem,
        weights: Vec<f32>,
        support: Vec<usize>,
        step: Step,
    ) -> Result<Solution, PruneError> {
        let count = weights.iter().filter(|weight| !weight.is_finite()).count();
        if count > 0 {
            return Err(PruneError::NonFiniteSolution { count });
        }
        let change = problem.change(&weights);
        let residual = problem.residual_on(&support, &weights)?;
        let terms = problem.objective_from(&change, &residual);
        let objective = terms.total();
        self.note(step, objective, support.len());
        let gradient = problem.gradient_on(&support, &change, &residual)?;
        let square = |gradient: &f32| f64::from(*gradient).powi(2);
        let gap = gradient.iter().map(square).sum::<f64>() / (4.0 * problem.lambda());
        // What the best values leave is not below 0 either.
        let most = objective - problem.completed_square();
        let squares = (terms.fit + terms.ridge).max(f64::MIN_POSITIVE);
        let relative_gap = gap.min(most) / squares;
        if step == Step::BackSolve && gap >= most && most > 0.0 {
            let ridge = problem.ridge();
            tracing::warn!(
                ridge,
                "the ridge is too small for F32: how good the values are is not known"
            );
        }
        Ok(Solution {
            weights: problem.tensor(&weights),
            objective,
            terms,
            relative_gap,
            iterations: self.trace.len(),
            trace: self.trace,
            rounded: None,
            support,
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::{GradientMatrix, LayerKind, Layout};

    #[test]
    fn values_that_are_no_numbers_are_no_solution() {
        let device = Device::flex();
        let gradients = GradientMatrix::from_tensor(Tensor::<2>::ones([1, 3], &device)).unwrap();
        let mut layout = Layout::new();
        layout.push("fc.weight", [3, 1], LayerKind::Linear, 2.0);
        let problem = Problem::new(gradients, Tensor::<1>::ones([3], &device), layout).unwrap();
        let weights = vec![f32::NAN, 0.0, f32::INFINITY];
        let support = vec![0, 2];
        let found = Clock::start().finish(&problem, weights, support, Step::BackSolve);
        let error = found.unwrap_err();
        assert_eq!(error, PruneError::NonFiniteSolution { count: 2 });
    }
}
