//! Which weights of a layer stay.

use burn_lean_layerwise::{
    Keep, LayerProblem, LayerSolution, LayerwiseError, Method, masked, solve,
};
use serde::{Deserialize, Serialize};

/// Operations of optimal brain surgeon up to which a layer is searched, as [`Method::BestSubset`] says.
const MOST_OPERATIONS: f64 = 1e11;

/// Whether optimal brain surgeon is affordable for a layer, and so the search that begins with it.
pub(super) fn is_searched(outputs: usize, inputs: usize) -> bool {
    outputs as f64 * (inputs as f64).powi(3) / 3.0 <= MOST_OPERATIONS
}

/// How the weights of a layer that stay are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SupportMethod {
    /// The largest.
    Magnitude,
    /// Magnitude times the deviation of the input, over the whole layer
    /// ([Wanda](https://arxiv.org/abs/2306.11695)).
    Wanda,
    /// One pass over the columns ([SparseGPT](https://arxiv.org/abs/2301.00774)).
    SparseGpt,
    /// Optimal brain surgeon, one weight after the other.
    Obs,
    /// The best of those and of a splitting ([ALPS](https://arxiv.org/abs/2406.07831)) as a start, then
    /// exchanges and splicing; of large layers the splitting alone.
    BestSubset,
}

impl SupportMethod {
    pub(super) fn method(self) -> Method {
        match self {
            Self::Magnitude => Method::Magnitude,
            Self::Wanda => Method::Wanda,
            Self::SparseGpt => Method::SparseGpt { block: 128 },
            Self::Obs => Method::Obs,
            Self::BestSubset => Method::BestSubset,
        }
    }

    /// Whether the values that the method found are those that fit best on its support already: a layer is not
    /// solved twice.
    pub(super) fn fits(
        self,
        problem: &LayerProblem,
        keep: &Keep,
        found: &LayerSolution,
    ) -> Result<bool, LayerwiseError> {
        match self {
            Self::Magnitude | Self::Wanda | Self::SparseGpt => Ok(false),
            Self::Obs => Ok(true),
            Self::BestSubset if is_searched(problem.outputs(), problem.features()) => Ok(true),
            // The splitting fits its values, for all rows at once. What can be better than it, as it is, does
            // not: dense values, and those of SparseGPT.
            Self::BestSubset => {
                if found.weights == masked(problem, &found.support)?.weights {
                    return Ok(false);
                }
                let one_pass = solve(problem, keep, &Self::SparseGpt.method());
                Ok(one_pass.map_or(true, |other| found.weights != other.weights))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_lean_layerwise::{Gram, ProblemConfig, back_solve};

    #[test]
    fn what_a_method_says_is_fitted_is_what_solving_again_gives() {
        let (rows, d, o) = (60, 12, 5);
        let number = |at: usize| ((at * at) as f64 * 0.71).sin() as f32;
        let inputs: Vec<f32> = (0..rows * d).map(number).collect();
        let dense: Vec<f32> = (0..o * d).map(|at| number(at + 7)).collect();
        let mut gram = Gram::new(d);
        gram.add(&inputs).unwrap();
        let problem = LayerProblem::new(&gram, &dense, &ProblemConfig::new()).unwrap();
        for keep in [Keep::Weights(o * d / 2), Keep::NOfM { n: 2, m: 4 }] {
            for (method, is_fitted) in [
                (SupportMethod::Magnitude, false),
                (SupportMethod::Wanda, false),
                (SupportMethod::SparseGpt, false),
                (SupportMethod::Obs, true),
                (SupportMethod::BestSubset, true),
            ] {
                let found = solve(&problem, &keep, &method.method()).unwrap();
                let again = back_solve(&problem, &found.support).unwrap();
                assert_eq!(method.fits(&problem, &keep, &found).unwrap(), is_fitted);
                assert_eq!(found.weights == again.weights, is_fitted, "{method:?}");
            }
        }
    }
}
