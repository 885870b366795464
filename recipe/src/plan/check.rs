//! Refusing a field with the name of its stage.

use std::fmt::Display;

use crate::RecipeError;

/// A share in percent, with at most two decimals: as rows are named.
pub(crate) fn percent(share: f64) -> f64 {
    (share * 10_000.0).round() / 100.0
}

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

    /// Refuses parts of paths without a letter: they would name every parameter.
    pub(crate) fn excluded(&self, texts: &[String]) -> Result<(), RecipeError> {
        match texts.iter().find(|text| text.is_empty()) {
            Some(empty) => self.refuse("exclude", format!("`{empty}`"), "parts of paths"),
            None => Ok(()),
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
