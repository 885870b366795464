//! What is wrong with a layer's data, and what to do.

/// Why a layer cannot be solved. It knows no path: who calls adds the parameter's.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerwiseError {
    /// Two sizes that should agree do not.
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch {
        /// What was counted.
        what: &'static str,
        /// What it should be.
        expected: usize,
        /// What it is.
        found: usize,
    },
    /// No row was added to a Gram matrix.
    #[error("the Gram matrix has no rows: add calibration inputs before solving")]
    NoRows,
    /// Every input is the same in all rows, and a bias takes all of it over.
    #[error(
        "its inputs are the same in every row (of {rows}), so that any weights would do: calibrate with more \
         examples, that differ"
    )]
    NothingVaries {
        /// Rows there are.
        rows: usize,
    },
    /// A NaN or an infinity.
    #[error("not a finite number in {what}, at index {index}")]
    NotFinite {
        /// Where.
        what: &'static str,
        /// Its index there.
        index: usize,
    },
    /// The system of a row has no Cholesky factor.
    #[error(
        "the Gram matrix is not positive definite at feature {feature} with ridge {ridge:e}: \
         raise the ridge, or calibrate with more rows"
    )]
    NotPositiveDefinite {
        /// The feature at which factoring stopped.
        feature: usize,
        /// What was added to the diagonal.
        ridge: f64,
    },
    /// A value of a config is out of range.
    #[error("{field} is {value}, but must be {expected}")]
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// More weights are to be kept than there are.
    #[error("{keep} weights are to be kept, but there are only {weights}")]
    KeepsTooMany {
        /// To be kept.
        keep: usize,
        /// There are.
        weights: usize,
    },
    /// A pattern does not divide the features.
    #[error(
        "groups of {group} weights do not divide the {features} features of a row: choose a size that \
         does, or leave the layer dense"
    )]
    DoesNotDivide {
        /// Size of a group.
        group: usize,
        /// Weights of a row.
        features: usize,
    },
}

impl LayerwiseError {
    /// The same, of features that are at these places of the whole layer.
    pub(crate) fn at_places(self, places: &[usize]) -> Self {
        match self {
            Self::NotPositiveDefinite { feature, ridge } => Self::NotPositiveDefinite {
                feature: places.get(feature).copied().unwrap_or(feature),
                ridge,
            },
            other => other,
        }
    }
}

/// Refuses what is not finite.
pub(crate) fn finite(what: &'static str, values: &[f32]) -> Result<(), LayerwiseError> {
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(LayerwiseError::NotFinite { what, index }),
        None => Ok(()),
    }
}

/// Refuses a size that is not the expected one.
pub(crate) fn same(
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), LayerwiseError> {
    match expected == found {
        true => Ok(()),
        false => Err(LayerwiseError::Mismatch {
            what,
            expected,
            found,
        }),
    }
}
