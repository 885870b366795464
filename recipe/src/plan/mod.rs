//! What is to be done: the recipe, as a file and as a builder.

mod bounds;
mod numbers;
mod pruning;
mod quantization;
mod shrinking;
mod sparsity;
mod training;

use std::fs;
use std::path::Path;

use burn_lean_amp::Fallback;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::RecipeError;
use crate::check::Check;
pub use bounds::Bounds;
use numbers::FallbackName;
pub use numbers::{ComputeDtype, Numbers};
pub use pruning::{PruneMethod, PruneStage};
pub use quantization::{QuantizeStage, RoundingMethod};
pub use shrinking::ShrinkStage;
pub use sparsity::Sparsity;
pub use training::{RateSchedule, TrainStage};

/// A file that is written for the models at the end of a recipe, beside their records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Format {
    /// Burn's own record.
    Record,
    /// Packed codes and scales, floats as they are.
    Safetensors,
    /// ONNX, quantized layers as codes. What ONNX cannot say, numbers that are no integers, stays a float there:
    /// the file is another model than its row then, and a warning names what it is.
    Onnx,
}

/// From a model to a small one: train, shrink, prune, quantize, export; any of them may be left out.
///
/// ```text
/// train      from the start or on from a checkpoint, in mixed precision
/// shrink     fewer channels and features: a smaller model, faster everywhere; then fine-tuned
/// prune      layer by layer, CHITA, or gradually; then fine-tuned with the zeros held
/// quantize   one or several ways, each from what pruning left: fake quantization trained in mixed
///            precision with the zeros held (QAT), or calibration (PTQ); converted
/// export     files of the last models
/// bounds     what a report on the last model holds it against
/// ```
///
/// After every stage the model is evaluated and its record written. As TOML:
///
/// ```
/// use burn_lean_recipe::Recipe;
///
/// let recipe = Recipe::from_toml(
///     r#"
///     seed = 42
///     dtype = "bf16"
///     export = ["onnx"]
///
///     [train]
///     epochs = 15
///     learning_rate = 3e-3
///
///     [prune]
///     sparsity = 0.9
///     tune = { epochs = 10, learning_rate = 1e-3 }
///
///     [[quantize]]
///     weights = "int4"
///     train = { epochs = 10, learning_rate = 1e-3, schedule = "cosine" }
///     "#,
/// )?;
/// assert_eq!(recipe.quantize[0].name(), "W4A8");
/// let same = Recipe::from_json(&recipe.to_json())?;
/// assert_eq!(same, recipe);
/// let error = Recipe::from_toml("[prune]\nsparcity = 0.9").unwrap_err();
/// assert!(error.to_string().contains("sparcity"));
/// # Ok::<(), burn_lean_recipe::RecipeError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// Seed of the order of the data and of what is random on the device. Default: 0.
    pub seed: u64,
    /// In what products are computed while training. Default: what suits the device.
    pub dtype: ComputeDtype,
    /// What to do where the device cannot compute in it. Default: refuse.
    #[serde(with = "FallbackName")]
    pub fallback: Fallback,
    /// Steps between checkpoints of a training, at least 1, beside the one at the end of each epoch; none is
    /// written before a step of the epoch has been taken. Default: none beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_steps: Option<usize>,
    /// Training. Default: the model is trained already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainStage>,
    /// Cutting out channels and features. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shrink: Option<ShrinkStage>,
    /// Pruning. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prune: Option<PruneStage>,
    /// Ways to quantize what pruning left; a file may have one as `[quantize]`. Default: none.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "quantization::one_or_several"
    )]
    pub quantize: Vec<QuantizeStage>,
    /// Files of the last models: of all ways to quantize, or of the last stage before. Default: none
    /// beside the records.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub export: Vec<Format>,
    /// What the last model must keep beside the dense one, for
    /// [`TrustConfig::with_bounds`](crate::TrustConfig::with_bounds); a run does not look at it. Default: nothing.
    #[serde(skip_serializing_if = "Bounds::is_none")]
    pub bounds: Bounds,
}

impl Recipe {
    /// Without a stage.
    pub fn new() -> Self {
        Self::default()
    }

    /// With another seed.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// In another dtype.
    pub fn with_dtype(mut self, dtype: ComputeDtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// With something else to do where the device cannot compute in the dtype.
    pub fn with_fallback(mut self, fallback: Fallback) -> Self {
        self.fallback = fallback;
        self
    }

    /// With a checkpoint every so many steps.
    pub fn with_checkpoint_steps(mut self, steps: usize) -> Self {
        self.checkpoint_steps = Some(steps);
        self
    }

    /// With training.
    pub fn with_train(mut self, train: TrainStage) -> Self {
        self.train = Some(train);
        self
    }

    /// With smaller layers.
    pub fn with_shrink(mut self, shrink: ShrinkStage) -> Self {
        self.shrink = Some(shrink);
        self
    }

    /// With pruning.
    pub fn with_prune(mut self, prune: PruneStage) -> Self {
        self.prune = Some(prune);
        self
    }

    /// With one more way to quantize.
    pub fn with_quantize(mut self, quantize: QuantizeStage) -> Self {
        self.quantize.push(quantize);
        self
    }

    /// With one more file of the last models.
    pub fn with_export(mut self, format: Format) -> Self {
        self.export.push(format);
        self
    }

    /// With bounds for the report.
    pub fn with_bounds(mut self, bounds: Bounds) -> Self {
        self.bounds = bounds;
        self
    }

    /// Reads a recipe from a file that ends in `.toml` or `.json`.
    ///
    /// # Errors
    ///
    /// [`RecipeError::Io`]; [`RecipeError::File`] for what is no recipe, unknown fields among it;
    /// and as [`validate`](Self::validate).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RecipeError> {
        read(path.as_ref(), Self::from_toml, Self::from_json)
    }

    /// As [`open`](Self::open), of a file that also holds a table for the program itself: its data,
    /// its network. Where the table is missing, its default is returned.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_with<T: DeserializeOwned + Default>(
        path: impl AsRef<Path>,
        table: &str,
    ) -> Result<(Self, T), RecipeError> {
        let from_toml = |text: &str| Self::from_toml_with(text, table);
        let from_json = |text: &str| Self::from_json_with(text, table);
        read(path.as_ref(), from_toml, from_json)
    }

    /// As [`from_toml`](Self::from_toml), with a table for the program itself.
    ///
    /// ```
    /// use burn_lean_recipe::Recipe;
    /// use std::collections::HashMap;
    ///
    /// let text = "seed = 3\n[task]\nbatch_size = 32";
    /// let (recipe, task) = Recipe::from_toml_with::<HashMap<String, usize>>(text, "task")?;
    /// assert_eq!((recipe.seed, task["batch_size"]), (3, 32));
    /// # Ok::<(), burn_lean_recipe::RecipeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn from_toml_with<T: DeserializeOwned + Default>(
        text: &str,
        table: &str,
    ) -> Result<(Self, T), RecipeError> {
        // Not by way of JSON, which has no NaN to refuse.
        let mut all: toml::Table = toml::from_str(text).map_err(file_error)?;
        let own = match all.remove(table) {
            None => T::default(),
            Some(own) => own
                .try_into()
                .map_err(|error| file_error(format!("table `{table}`: {error}")))?,
        };
        let recipe: Self = all.try_into().map_err(file_error)?;
        recipe.validate()?;
        Ok((recipe, own))
    }

    fn from_json_with<T: DeserializeOwned + Default>(
        text: &str,
        table: &str,
    ) -> Result<(Self, T), RecipeError> {
        let mut value: serde_json::Value = serde_json::from_str(text).map_err(file_error)?;
        let own = value.as_object_mut().and_then(|map| map.remove(table));
        let own = match own {
            None => T::default(),
            Some(own) => serde_json::from_value(own)
                .map_err(|error| file_error(format!("table `{table}`: {error}")))?,
        };
        let recipe: Self = serde_json::from_value(value).map_err(file_error)?;
        recipe.validate()?;
        Ok((recipe, own))
    }

    /// Reads a recipe from TOML.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn from_toml(text: &str) -> Result<Self, RecipeError> {
        let recipe: Self = toml::from_str(text).map_err(file_error)?;
        recipe.validate()?;
        Ok(recipe)
    }

    /// Reads a recipe from JSON.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn from_json(text: &str) -> Result<Self, RecipeError> {
        let recipe: Self = serde_json::from_str(text).map_err(file_error)?;
        recipe.validate()?;
        Ok(recipe)
    }

    /// As JSON; a number that is not finite is `null`, which does not read back.
    pub fn to_json(&self) -> String {
        self.json().to_string()
    }

    /// As TOML.
    ///
    /// # Errors
    ///
    /// [`RecipeError::File`] for a seed beyond what TOML has, 2⁶³ − 1.
    pub fn to_toml(&self) -> Result<String, RecipeError> {
        toml::to_string(self).map_err(file_error)
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Refuses what cannot work, before anything is computed.
    ///
    /// # Errors
    ///
    /// [`RecipeError::Invalid`] with stage and field.
    pub fn validate(&self) -> Result<(), RecipeError> {
        let check = Check("recipe");
        if let Some(steps) = self.checkpoint_steps {
            check.accept(steps >= 1, "checkpoint_steps", steps, "at least 1")?;
        }
        if let Some(train) = &self.train {
            train.validate("train", false)?;
        }
        if let Some(shrink) = &self.shrink {
            shrink.validate()?;
        }
        if let Some(prune) = &self.prune {
            prune.validate()?;
        }
        for (index, quantize) in self.quantize.iter().enumerate() {
            quantize.validate(&format!("quantize[{index}]"))?;
            let twice = self.quantize[..index]
                .iter()
                .any(|other| other.name() == quantize.name());
            check.accept(
                !twice,
                "quantize",
                format!("twice {}", quantize.name()),
                "of different weights or activations: a stage is named by them, in its row and its files",
            )?;
        }
        self.bounds.validate("bounds")
    }
}

/// Reads a file by its extension.
fn read<R>(
    path: &Path,
    from_toml: impl FnOnce(&str) -> Result<R, RecipeError>,
    from_json: impl FnOnce(&str) -> Result<R, RecipeError>,
) -> Result<R, RecipeError> {
    let text =
        fs::read_to_string(path).map_err(|error| RecipeError::io("cannot read", path, error))?;
    let parsed = match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => from_toml(&text),
        Some("json") => from_json(&text),
        _ => Err(file_error("its name must end in `.toml` or `.json`")),
    };
    parsed.map_err(|error| error.in_file(path))
}

fn file_error(reason: impl std::fmt::Display) -> RecipeError {
    RecipeError::File {
        path: "text".into(),
        reason: reason.to_string(),
    }
}
