//! Scores of single weights.

use crate::LayerProblem;

/// |w₀|, `[o, d]`; 0 for dead features.
pub(crate) fn magnitude(problem: &LayerProblem) -> Vec<f64> {
    scores(problem, |w, _| w)
}

/// |w₀| ‖x‖, `[o, d]`
/// ([Wanda, Sun et al., 2023](https://arxiv.org/abs/2306.11695)).
pub(crate) fn wanda(problem: &LayerProblem) -> Vec<f64> {
    scores(problem, |w, square| w * square.sqrt())
}

fn scores(problem: &LayerProblem, score: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    let d = problem.features();
    let squares: Vec<f64> = (0..d).map(|j| problem.hessian_row(j)[j]).collect();
    let weights = problem.dense().iter().enumerate();
    let values = weights.map(
        |(at, w)| match problem.dead_features().binary_search(&(at % d)) {
            Ok(_) => 0.0,
            Err(_) => score(
                f64::from(w.abs()),
                (squares[at % d] - problem.ridge()).max(0.0),
            ),
        },
    );
    values.collect()
}
