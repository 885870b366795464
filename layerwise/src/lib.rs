//! Which weights of one layer to keep, and at which values.
//!
//! A layer computes Y = X Wᵀ from inputs X `[n, d]` and weights W `[o, d]` (a convolution does over
//! unfolded patches). Removing weights changes Y least, in the mean square over calibration inputs,
//! where
//!
//! ```text
//! f(W) = Σᵣ ωᵣ · ½ (wᵣ − w₀ᵣ)ᵀ H (wᵣ − w₀ᵣ),   H = XᵀX/n + λI
//! ```
//!
//! is least. H is shared by all rows, so that layers of any number of inputs take d² numbers:
//! [`Gram`] sums them up, [`LayerProblem`] is f, [`solve()`] chooses a support under [`Keep`] and
//! finds the values on it.
//!
//! ```
//! use burn_lean_layerwise::{Gram, Keep, LayerProblem, Method, ProblemConfig, solve};
//!
//! // Two features that are nearly the same, and one of its own.
//! let inputs = [1.0, 1.1, 0.0, -1.0, -0.9, 0.5, 0.5, 0.4, -1.0];
//! let mut gram = Gram::new(3);
//! gram.add(&inputs)?;
//! let dense = [0.5, 0.6, 0.3];
//! let problem = LayerProblem::new(&gram, &dense, &ProblemConfig::new())?;
//! // Magnitude keeps both halves of the same thing …
//! let magnitude = solve(&problem, &Keep::Weights(2), &Method::Magnitude)?;
//! assert_eq!(magnitude.support.kept(), [true, true, false]);
//! // … best-subset search one of them, which takes over the weight of the other.
//! let best = solve(&problem, &Keep::Weights(2), &Method::BestSubset)?;
//! assert_eq!(best.support.kept().iter().filter(|kept| **kept).count(), 2);
//! assert!(best.support.kept()[2] && best.objective < 0.1 * magnitude.objective);
//! # Ok::<(), burn_lean_layerwise::LayerwiseError>(())
//! ```
//!
//! # Targets of their own
//!
//! Where the inputs are those of a network that is pruned already, and the outputs to reach those of
//! the dense one, [`Gram::with_targets`] also sums XᵀY, and f is ½ E‖Y − X Wᵀ‖² plus the ridge.
//!
//! # Arithmetic
//!
//! Products of up to 1,024 rows are summed in F32, everything else in F64. Rows are solved in parallel
//! on rayon's pool; the result does not depend on the number of threads.

mod compensation;
mod conjugate;
mod dense;
mod elimination;
mod error;
mod gram;
mod keep;
mod problem;
mod scores;
mod search;
mod solve;
mod sparse_gpt;
mod splitting;
mod support;
mod tableau;

pub use compensation::Compensation;
pub use error::LayerwiseError;
pub use gram::Gram;
pub use keep::Keep;
pub use problem::{LayerProblem, ProblemConfig, Pull};
pub use solve::{LayerSolution, Method, back_solve, masked, solve};
pub use support::Support;
