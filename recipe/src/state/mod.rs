//! What a run keeps on disk: finished stages, and checkpoints of the one in progress.
//!
//! ```text
//! DIR/run.lock              locked by the run that writes here
//! DIR/run.json              the recipe, what the caller identifies the run by, and checksums of the model
//!                           that it began with
//! DIR/0-train/              a finished stage: model.bpk, stage.toml
//! DIR/1-prune-solved/       a finished part of a stage, which nobody reads when the stage is finished
//! DIR/1-prune.checkpoints/  of a training in progress
//! DIR/1-prune.solver/       finished stages of CHITA
//! DIR/partial-…             being written
//! ```
//!
//! A finished stage is written under another name and renamed when it is complete.

pub(crate) mod files;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use burn_lean_amp::Checkpoints;
use burn_lean_prune::Masks;
use burn_lean_reparam::{Lock, settle};
use files::FILES;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Bounds, Recipe, RecipeError, Row};

const RUN: &str = "run.json";
const LOCK: &str = "run.lock";
const MODEL: &str = "model.bpk";
const STAGE: &str = "stage.toml";
const VERSION: u32 = 2;

/// The state folder of a run, or none.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    folder: Option<PathBuf>,
    _lock: Option<Arc<Lock>>,
}

/// What the folder belongs to.
#[derive(Serialize, Deserialize)]
struct Belongs {
    version: u32,
    recipe: Value,
    /// What the caller identifies the run by.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    identity: Value,
    initial: Checksums,
}

/// CRC-32 of an initial model.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Checksums {
    /// Of its tensors.
    pub(crate) weights: u32,
    /// Of what its weights carry: adapters, masks, ranges and scales. Of quantizers also what they are set to, and
    /// their step.
    pub(crate) carried: u32,
}

/// What all versions have in common.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// What a finished stage leaves beside its model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// What was measured; `None` of a part of a stage.
    pub(crate) row: Option<Row>,
    /// Of a pruned model: later stages hold its zeros.
    pub(crate) masks: Option<Masks>,
    /// Wall clock [s].
    pub(crate) seconds: f64,
    /// Where the latency in the row was measured; nowhere of a part of a stage.
    #[serde(default)]
    pub(crate) latency: String,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    kept: Kept,
    /// Of `kept` as it is written.
    kept_crc32: u32,
    model_bytes: usize,
    model_crc32: u32,
}

fn checksum_of(kept: &Kept) -> Result<u32, toml::ser::Error> {
    Ok(crc32fast::hash(toml::to_string(kept)?.as_bytes()))
}

impl State {
    /// Opens a folder for a run with this initial model; refuses one of another recipe, another identity or
    /// another initial model.
    pub(crate) fn open(
        folder: Option<(&Path, Checksums)>,
        recipe: &Recipe,
        identity: &Value,
    ) -> Result<Self, RecipeError> {
        let Some((folder, initial)) = folder else {
            return Ok(Self::default());
        };
        FILES.create_folder(folder)?;
        let lock = lock(folder)?;
        let path = folder.join(RUN);
        // Files at the end and bounds can be chosen anew, and how often a file is written on the way.
        let recipe = Recipe {
            export: Vec::new(),
            bounds: Bounds::default(),
            checkpoint_steps: None,
            ..recipe.clone()
        };
        // As it is read back: a float of many digits may differ in its last bit.
        let read_back = |json: String| -> Value { serde_json::from_str(&json).unwrap_or_default() };
        let here = Belongs {
            version: VERSION,
            recipe: read_back(recipe.to_json()),
            identity: read_back(identity.to_string()),
            initial,
        };
        match path.exists() {
            false => {
                // Nothing would say whose stages these are.
                let entries = std::fs::read_dir(folder)
                    .map_err(|error| RecipeError::io("cannot read", folder, error))?;
                let mut stages = entries.flatten().map(|entry| entry.path());
                let begun = |path: &Path| {
                    let extension = path.extension().unwrap_or_default();
                    path.join(STAGE).is_file()
                        || extension == "checkpoints"
                        || extension == "solver"
                };
                if stages.any(|path| begun(&path)) {
                    let reason = "it is missing, and stages are beside it, finished or begun";
                    return Err(RecipeError::run_file(&path, reason));
                }
                let text = serde_json::to_vec_pretty(&here);
                FILES.write(
                    &path,
                    &text.map_err(|error| RecipeError::run_file(&path, error))?,
                )?;
            }
            true => {
                let text = FILES.read(&path)?;
                let damaged = |error: serde_json::Error| RecipeError::run_file(&path, error);
                let differs = |field: String, kept: String, found: String| {
                    Err(RecipeError::StateOfAnotherRun {
                        folder: folder.display().to_string(),
                        field,
                        kept,
                        found,
                    })
                };
                // Before what only this version has.
                let Versioned { version } = serde_json::from_slice(&text).map_err(damaged)?;
                if version != VERSION {
                    let field = "the version of its files".into();
                    return differs(field, version.to_string(), VERSION.to_string());
                }
                let there: Belongs = serde_json::from_slice(&text).map_err(damaged)?;
                let different = difference("", &there.recipe, &here.recipe)
                    .or_else(|| difference("identity", &there.identity, &here.identity));
                if let Some((field, kept, found)) = different {
                    return differs(field, kept, found);
                }
                let (kept, found) = (there.initial, here.initial);
                let sums = [
                    ("the initial weights", kept.weights, found.weights),
                    (
                        "what the initial weights carry (adapters that begin at random need a seed of the \
                         device; ranges, the same calibration)",
                        kept.carried,
                        found.carried,
                    ),
                ];
                let crc = |sum: u32| format!("{sum:08x}");
                if let Some((of, kept, found)) =
                    sums.into_iter().find(|(_, kept, found)| kept != found)
                {
                    return differs(format!("the checksum of {of}"), crc(kept), crc(found));
                }
            }
        }
        Ok(Self {
            folder: Some(folder.into()),
            _lock: Some(Arc::new(lock)),
        })
    }

    /// What a finished stage left, with its record.
    pub(crate) fn finished(&self, name: &str) -> Result<Option<(ModuleRecord, Kept)>, RecipeError> {
        let Some(folder) = self.folder.as_ref().map(|folder| folder.join(name)) else {
            return Ok(None);
        };
        if !folder.exists() {
            return Ok(None);
        }
        let path = folder.join(STAGE);
        // TOML keeps floats to the last bit, and those that are no numbers.
        let manifest: Manifest = toml::from_slice(&FILES.read(&path)?)
            .map_err(|error| RecipeError::state(&path, error))?;
        if checksum_of(&manifest.kept).ok() != Some(manifest.kept_crc32) {
            return Err(RecipeError::state(&path, "its checksum is wrong"));
        }
        let path = folder.join(MODEL);
        let bytes = FILES.read(&path)?;
        if bytes.len() != manifest.model_bytes || crc32fast::hash(&bytes) != manifest.model_crc32 {
            let reason = "its checksum is not the one in `stage.toml`";
            return Err(RecipeError::state(&path, reason));
        }
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(bytes))
            .map_err(|error| RecipeError::state(&path, error))?;
        Ok(Some((record, manifest.kept)))
    }

    /// Keeps a finished stage; `before` is called when it is written and not yet in its place.
    pub(crate) fn keep<M: Module>(
        &self,
        name: &str,
        model: &M,
        kept: Kept,
        before: impl FnOnce() -> Result<(), RecipeError>,
    ) -> Result<(), RecipeError> {
        let Some(folder) = &self.folder else {
            return before();
        };
        settle(model);
        let partial = folder.join(format!("partial-{name}"));
        FILES.remove_folder(&partial)?;
        FILES.create_folder(&partial)?;
        let path = partial.join(MODEL);
        let bytes = model.clone().into_record().into_bytes();
        let bytes = bytes.map_err(|error| RecipeError::io("cannot write", &path, error))?;
        FILES.write_plain(&path, &bytes)?;
        let path = partial.join(STAGE);
        let text = checksum_of(&kept).and_then(|kept_crc32| {
            toml::to_string(&Manifest {
                kept,
                kept_crc32,
                model_bytes: bytes.len(),
                model_crc32: crc32fast::hash(&bytes),
            })
        });
        let text = text.map_err(|error| RecipeError::io("cannot write", &path, error))?;
        FILES.write_plain(&path, text.as_bytes())?;
        FILES.flush(&partial)?;
        before()?;
        // One that was damaged, or of other settings, does not count as done and is in the way.
        FILES.remove_folder(&folder.join(name))?;
        FILES.rename(&partial, &folder.join(name))
    }

    /// That a finished stage lacks something.
    pub(crate) fn lacks(&self, name: &str, what: &str) -> RecipeError {
        let folder = self.folder.as_deref().unwrap_or(Path::new(""));
        RecipeError::state(&folder.join(name).join(STAGE), format!("it has no {what}"))
    }

    /// Checkpoints of a training in progress.
    pub(crate) fn checkpoints(&self, name: &str) -> Option<Checkpoints> {
        let folder = self.folder.as_ref()?;
        Some(Checkpoints::new(folder.join(format!("{name}.checkpoints"))))
    }

    /// Where a pruner keeps its own stages.
    pub(crate) fn solver(&self, name: &str) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?;
        Some(folder.join(format!("{name}.solver")))
    }

    /// Where a file without a name may lie: here, or where the system has such files.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.folder.clone().unwrap_or_else(std::env::temp_dir)
    }

    /// Removes what a finished stage no longer needs.
    pub(crate) fn tidy(&self, name: &str) -> Result<(), RecipeError> {
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        FILES.remove_folder(&folder.join(format!("{name}.checkpoints")))?;
        FILES.remove_folder(&folder.join(format!("{name}.solver")))
    }
}

fn lock(folder: &Path) -> Result<Lock, RecipeError> {
    FILES.lock(&folder.join(LOCK), || RecipeError::StateInUse {
        folder: folder.display().to_string(),
    })
}

/// The first field that differs, with both values.
fn difference(path: &str, kept: &Value, found: &Value) -> Option<(String, String, String)> {
    let at = |key: &str| match path {
        "" => key.to_string(),
        path => format!("{path}.{key}"),
    };
    match (kept, found) {
        (Value::Object(kept), Value::Object(found)) => {
            let keys: std::collections::BTreeSet<&String> =
                kept.keys().chain(found.keys()).collect();
            keys.into_iter().find_map(|key| {
                let of = |map: &serde_json::Map<String, Value>| {
                    map.get(key).cloned().unwrap_or(Value::Null)
                };
                difference(&at(key), &of(kept), &of(found))
            })
        }
        (Value::Array(kept), Value::Array(found)) if kept.len() == found.len() => {
            let pairs = kept.iter().zip(found).enumerate();
            pairs
                .into_iter()
                .find_map(|(index, (kept, found))| difference(&at(&index.to_string()), kept, found))
        }
        (kept, found) if kept == found => None,
        (kept, found) => Some((format!("`{path}`"), said(kept), said(found))),
    }
}

fn said(value: &Value) -> String {
    match value {
        Value::Null => "not given".into(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_field_that_differs_is_named_with_its_path() {
        let recipe = |text| Recipe::from_toml(text).unwrap().json();
        let one = recipe("[prune]\nsparsity = 0.9\n[[quantize]]\n[[quantize]]\nweights = 'int4'");
        let other = recipe("[prune]\nsparsity = 0.9\n[[quantize]]\n[[quantize]]\nweights = 'int2'");
        assert_eq!(difference("", &one, &one), None);
        let (field, kept, found) = difference("", &one, &other).unwrap();
        assert_eq!(
            (field.as_str(), kept.as_str(), found.as_str()),
            ("`quantize.1.weights`", "\"int4\"", "\"int2\"")
        );
        let dense = recipe("");
        assert_eq!(difference("", &one, &dense).unwrap().2, "not given");
    }
}
