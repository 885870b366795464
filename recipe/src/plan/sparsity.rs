//! How many weights become zero, and in which shape.

use std::fmt;

use burn_lean_prune::{Budget, SparsityPattern};
use serde::{Deserialize, Serialize};

use crate::RecipeError;
use crate::check::{Check, percent};

/// What a stage makes zero: a fraction of the weights, or all but `n` of every `m` consecutive ones. A file
/// has the number, or `"2:4"`.
///
/// ```
/// use burn_lean_recipe::{PruneStage, Recipe, Sparsity};
///
/// let recipe = Recipe::from_toml("[prune]\nsparsity = '2:4'")?;
/// let two_of_four = Sparsity::NOfM { n: 2, m: 4 };
/// assert_eq!(recipe.prune, Some(PruneStage::new(two_of_four)));
/// assert_eq!(two_of_four.fraction(), 0.5);
/// # Ok::<(), burn_lean_recipe::RecipeError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Spelled", into = "Spelled")]
#[non_exhaustive]
pub enum Sparsity {
    /// This fraction of the prunable weights, above 0 and below 1.
    Fraction(f64),
    /// All but `n` of every `m` consecutive inputs of an output, as sparse tensor cores want it: 2:4.
    /// Layers that `m` does not divide stay dense.
    NOfM {
        /// Weights that stay, at least 1 and below `m`.
        n: usize,
        /// Consecutive weights.
        m: usize,
    },
}

impl Sparsity {
    /// The fraction of zeros.
    pub fn fraction(&self) -> f64 {
        match *self {
            Self::Fraction(fraction) => fraction,
            Self::NOfM { n, m } => 1.0 - n as f64 / m as f64,
        }
    }

    pub(crate) fn budget(&self) -> Budget {
        match *self {
            Self::Fraction(fraction) => Budget::Sparsity(fraction),
            Self::NOfM { .. } => Budget::Pattern,
        }
    }

    pub(crate) fn pattern(&self) -> SparsityPattern {
        match *self {
            Self::Fraction(_) => SparsityPattern::Unstructured,
            Self::NOfM { n, m } => SparsityPattern::NM { n, m },
        }
    }

    /// As a row is named.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Fraction(fraction) => format!("{} %", percent(*fraction)),
            Self::NOfM { .. } => self.to_string(),
        }
    }

    pub(crate) fn validate(&self, check: &Check) -> Result<(), RecipeError> {
        let (fits, expected) = match *self {
            Self::Fraction(share) => (share > 0.0 && share < 1.0, "above 0 and below 1"),
            Self::NOfM { n, m } => (0 < n && n < m, "n:m with n at least 1 and below m"),
        };
        check.accept(fits, "sparsity", self, expected)
    }
}

impl From<f64> for Sparsity {
    fn from(fraction: f64) -> Self {
        Self::Fraction(fraction)
    }
}

impl fmt::Display for Sparsity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fraction(fraction) => fraction.fmt(f),
            Self::NOfM { .. } => self.pattern().fmt(f),
        }
    }
}

/// As a file spells it.
#[derive(Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a fraction of zeros or a pattern such as `2:4`"
)]
enum Spelled {
    Fraction(f64),
    Pattern(String),
}

impl TryFrom<Spelled> for Sparsity {
    type Error = String;

    fn try_from(spelled: Spelled) -> Result<Self, String> {
        let text = match spelled {
            Spelled::Fraction(fraction) => return Ok(Self::Fraction(fraction)),
            Spelled::Pattern(text) => text,
        };
        match text.parse() {
            Ok(SparsityPattern::NM { n, m }) => Ok(Self::NOfM { n, m }),
            _ => Err(format!(
                "sparsity `{text}` is neither a fraction of zeros nor a pattern such as `2:4`"
            )),
        }
    }
}

impl From<Sparsity> for Spelled {
    fn from(sparsity: Sparsity) -> Self {
        match sparsity {
            Sparsity::Fraction(fraction) => Self::Fraction(fraction),
            pattern => Self::Pattern(pattern.to_string()),
        }
    }
}
