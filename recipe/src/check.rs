//! Refusing a field with the name of its stage.

use std::fmt::Display;

use burn_lean_quant::Override;

use crate::RecipeError;

/// A share in percent, rounded to two decimals: as rows are named.
pub(crate) fn percent(share: f64) -> f64 {
    rounded(share, 2).0
}

/// A share in percent with so many decimals, or more where it takes them.
pub(crate) fn percent_text(share: f64, decimals: usize) -> String {
    let (percent, decimals) = rounded(share, decimals);
    format!("{percent:.decimals$}")
}

/// In percent, with its decimals: at least so many, and more where a part would be nothing or all.
fn rounded(share: f64, least: usize) -> (f64, usize) {
    let is_part = share > 0.0 && share < 1.0;
    let mut candidates = (least..=15).map(|decimals| {
        let scale = 10f64.powi(decimals as i32);
        ((share * (100.0 * scale)).round() / scale, decimals)
    });
    let found = candidates.find(|(percent, _)| !is_part || *percent > 0.0 && *percent < 100.0);
    found.unwrap_or((100.0 * share, least))
}

/// Whether `exclude` with this text is about this path: the path contains it; `*` stands for any
/// characters but dots, `**` for any.
pub(crate) fn contains(path: &str, text: &str) -> bool {
    Override::new(anywhere(text)).matches(path)
}

/// The pattern of an [`Override`] for the paths that contain a text.
pub(crate) fn anywhere(text: &str) -> String {
    format!("**{text}**")
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
        let is_empty = |text: &&String| text.trim_matches('*').is_empty();
        match texts.iter().find(is_empty) {
            Some(empty) => self.refuse("exclude", format!("`{empty}`"), "parts of paths"),
            None => Ok(()),
        }
    }

    /// Refuses parts of paths that are in none of these.
    pub(crate) fn found(&self, excluded: &[String], paths: &[String]) -> Result<(), RecipeError> {
        let is_found = |text: &String| paths.iter().any(|path| contains(path, text));
        match excluded.iter().find(|text| !is_found(text)) {
            Some(text) => {
                let example = paths.first().map_or("", String::as_str);
                let expected = format!("part of the path of a parameter, such as `{example}`");
                self.refuse("exclude", format!("`{text}`"), expected)
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_neither_nothing_nor_all() {
        let parts = [0.9, 0.12346, 0.99996, 0.999_999_7, 0.00004, 0.0, 1.0];
        let percents = [90.0, 12.35, 99.996, 99.99997, 0.004, 0.0, 100.0];
        assert_eq!(parts.map(percent), percents);
        assert_eq!(percent_text(0.9996, 1), "99.96");
        assert_eq!(percent_text(0.5, 2), "50.00");
        assert_eq!(percent_text(1.0, 1), "100.0");
        assert_eq!(percent_text(f64::NAN, 2), "NaN");
        // The largest number below 1.
        assert!(percent(1.0 - f64::EPSILON / 2.0) < 100.0);
    }
}
