//! The stage that makes layers smaller.

use burn::module::ParamGroup;
use burn_lean_prune::Shrink;
use serde::{Deserialize, Serialize};

use super::training::TrainStage;
use crate::RecipeError;
use crate::check::{Check, contains, percent};

/// Cutting whole channels and features out of the model ([`Shrink`]), and training what is left.
///
/// ```
/// use burn_lean_recipe::{ShrinkStage, TrainStage};
///
/// let shrink = ShrinkStage::new(0.5).with_tune(TrainStage::new(3, 1e-3));
/// assert_eq!(shrink.share, 0.5);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShrinkStage {
    /// Share of the multiplications that is left at most, above 0 and below 1.
    pub share: f64,
    /// Units of parameters whose path contains one of these stay; each is in a path. `*` stands for any
    /// characters but dots, `**` for any. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Training of the smaller model. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tune: Option<TrainStage>,
}

impl ShrinkStage {
    /// With the defaults.
    pub fn new(share: f64) -> Self {
        Self {
            share,
            exclude: Vec::new(),
            tune: None,
        }
    }

    /// Leaves the units of parameters alone whose path contains this.
    pub fn with_exclude(mut self, text: impl Into<String>) -> Self {
        self.exclude.push(text.into());
        self
    }

    /// With training after it.
    pub fn with_tune(mut self, tune: TrainStage) -> Self {
        self.tune = Some(tune);
        self
    }

    /// As a row is named.
    pub(crate) fn name(&self) -> String {
        format!("shrunk to {} %", percent(self.share))
    }

    /// How a model whose parameters have these paths becomes smaller.
    pub(crate) fn shrink(&self, paths: &[String]) -> Shrink {
        let shrink = Shrink::to(self.share);
        if self.exclude.is_empty() {
            return shrink;
        }
        let excluded = |path: &&String| self.exclude.iter().any(|text| contains(path, text));
        let stay: Vec<String> = paths.iter().filter(excluded).cloned().collect();
        shrink.except(ParamGroup::from_paths(stay))
    }

    pub(crate) fn validate(&self) -> Result<(), RecipeError> {
        let check = Check("shrink");
        let inside = self.share > 0.0 && self.share < 1.0;
        check.accept(inside, "share", self.share, "above 0 and below 1")?;
        check.excluded(&self.exclude)?;
        match &self.tune {
            Some(tune) => tune.validate("shrink.tune", true),
            None => Ok(()),
        }
    }
}
