//! Refusing a field with the name of its stage.

use std::fmt::Display;

use crate::RecipeError;

/// The stage whose fields are checked.
pub(crate) struct Check<'a>(pub(crate) &'a str);

impl Check<'_> {
    /// Refuses a field unless it fits.
    pub(crate) fn accept(
        &self,
        fits: bool,
        field: &'static str,
        value: impl Display,
        expected: impl Display,
    ) -> Result<(), RecipeError> {
        match fits {
            true => Ok(()),
            false => self.refuse(field, value, expected),
        }
    }

    /// Refuses a field.
    pub(crate) fn refuse(
        &self,
        field: &'static str,
        value: impl Display,
        expected: impl Display,
    ) -> Result<(), RecipeError> {
        Err(RecipeError::Invalid {
            stage: self.0.into(),
            field,
            value: value.to_string(),
            expected: expected.to_string(),
        })
    }
}
