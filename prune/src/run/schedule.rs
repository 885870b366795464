//! Targets of a multi-stage run: the sparsity that each stage prunes to.

use burn::config::Config;

use crate::PruneError;
use crate::model::checks::accept;

/// How the sparsity rises from `base` to the target s over f stages.
///
/// With t = 0..f-1, b = `base`, as the published implementation of CHITA++ has it
/// ([Fast as CHITA, Benbaki et al., 2023](https://arxiv.org/abs/2302.14623)):
///
/// ```text
/// exponential   b + (s - b) · 2^(f-1) / (2^(f-1) - 1) · (2^t - 1) / 2^t
/// polynomial    s + (b - s) · (1 - t / (f-1))³
/// linear        b + t · (s - b) / (f-1)
/// constant      s
/// ```
///
/// The first three prune to exactly b in the first stage, and all reach s in the last; one stage
/// is `[s]`. A first stage that prunes nothing is refused by [`PrunerConfig`](crate::PrunerConfig): b > 0.
///
/// ```
/// use burn_lean_prune::SparsitySchedule;
///
/// let targets = SparsitySchedule::Exponential { base: 0.0 }.targets(0.75, 3)?;
/// assert_eq!(targets, [0.0, 0.5, 0.75]);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Config, Debug, Copy, PartialEq)]
#[non_exhaustive]
pub enum SparsitySchedule {
    /// Steps that halve: fast first, slow at the end.
    Exponential {
        /// Sparsity of the first stage, 0 ≤ base ≤ target.
        base: f64,
    },
    /// A cubic approach: fast first, very slow at the end.
    Polynomial {
        /// Sparsity of the first stage, 0 ≤ base ≤ target.
        base: f64,
    },
    /// Equal steps.
    Linear {
        /// Sparsity of the first stage, 0 ≤ base ≤ target.
        base: f64,
    },
    /// The target in every stage.
    Constant,
}

impl SparsitySchedule {
    /// The sparsity of each of `stages` stages; the last is `sparsity`.
    ///
    /// # Errors
    ///
    /// [`PruneError::Sparsity`] unless `sparsity` is in [0, 1), [`PruneError::InvalidConfig`] for 0
    /// stages or a base outside [0, sparsity].
    pub fn targets(&self, sparsity: f64, stages: usize) -> Result<Vec<f64>, PruneError> {
        if !(0.0..1.0).contains(&sparsity) {
            return Err(PruneError::Sparsity { sparsity });
        }
        accept(stages > 0, "stages", 0, "at least 1")?;
        let base = self.base().unwrap_or(sparsity);
        let fits = (0.0..=sparsity).contains(&base) || stages == 1;
        accept(fits, "base", base, "a sparsity between 0 and the target")?;
        if stages == 1 {
            return Ok(vec![sparsity]);
        }
        let mut targets: Vec<f64> = (0..stages)
            .map(|stage| self.target(sparsity, base, stages as f64, stage as f64))
            .collect();
        // The formulas begin at b and end at s up to rounding; k must not depend on that.
        targets[0] = base;
        targets[stages - 1] = sparsity;
        Ok(targets)
    }

    fn base(&self) -> Option<f64> {
        match self {
            Self::Exponential { base } | Self::Polynomial { base } | Self::Linear { base } => {
                Some(*base)
            }
            Self::Constant => None,
        }
    }

    /// Stage t = 0..f-1 of f > 1.
    fn target(&self, s: f64, b: f64, f: f64, t: f64) -> f64 {
        match self {
            Self::Exponential { .. } => {
                // The same with negative exponents, which do not overflow.
                b + (s - b) * (1.0 - (-t).exp2()) / (1.0 - (1.0 - f).exp2())
            }
            Self::Polynomial { .. } => s + (b - s) * (1.0 - t / (f - 1.0)).powi(3),
            Self::Linear { .. } => b + t * (s - b) / (f - 1.0),
            Self::Constant => s,
        }
    }
}
