//! Numbers of configs that are out of their range.

use burn::tensor::Tensor;

use crate::PruneError;

/// A ridge on the normalised Fisher.
pub(crate) fn ridge(ridge: f64) -> Result<(), PruneError> {
    let expected = "finite and above 0: the ridge holds what no gradient determines";
    accept(ridge.is_finite() && ridge > 0.0, "ridge", ridge, expected)
}

/// The factor of a first-order term.
pub(crate) fn first_order(a: f64) -> Result<(), PruneError> {
    let expected = "finite and not negative: 1/m for Fisher batches of m examples, or 0";
    accept(a.is_finite() && a >= 0.0, "first_order", a, expected)
}

/// The exponent that evens out lengths.
pub(crate) fn tempering(exponent: f64) -> Result<(), PruneError> {
    let fits = (0.0..=1.0).contains(&exponent);
    accept(fits, "tempering", exponent, "an exponent in [0, 1]")
}

/// [`PruneError::InvalidConfig`] unless `fits`.
pub(crate) fn accept(
    fits: bool,
    field: &'static str,
    value: impl ToString,
    expected: &'static str,
) -> Result<(), PruneError> {
    match fits {
        true => Ok(()),
        false => Err(PruneError::InvalidConfig {
            field,
            value: value.to_string(),
            expected,
        }),
    }
}

/// Fails unless the loss is one number.
pub(crate) fn check_number(loss: &Tensor<1>) -> Result<(), PruneError> {
    let elements = loss.shape().num_elements();
    match elements {
        1 => Ok(()),
        _ => Err(PruneError::Loss {
            reason: format!("it has {elements} elements, not one"),
        }),
    }
}
