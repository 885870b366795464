//! What a block took, kept beside the state of an interrupted run.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What a block took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct BlockRow {
    /// From its making to its file.
    pub(crate) seconds: f64,
    pub(crate) solve_seconds: f64,
    /// Beyond what there was before it; not known of a block that a killed run had finished without
    /// writing this down.
    pub(crate) peak_bytes: Option<u64>,
    /// Of the whole process while it was worked on, beyond the start of the program.
    pub(crate) process_bytes: Option<u64>,
    pub(crate) weights: u64,
    pub(crate) gram_bytes: u64,
    pub(crate) activations: u64,
    pub(crate) file_bytes: u64,
    pub(crate) relative_error: f64,
}

impl BlockRow {
    /// What an earlier run wrote; `None` where it wrote nothing.
    pub(crate) fn load(file: &Path) -> Result<Option<Self>, String> {
        let bytes = match fs::read(file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", file.display())),
        };
        let row = serde_json::from_slice(&bytes);
        row.map(Some)
            .map_err(|error| format!("{}: {error}. Remove it", file.display()))
    }

    /// Writes it beside its place, and moves it there.
    pub(crate) fn save(&self, file: &Path) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(&error))?;
        let beside = file.with_extension("part");
        fs::write(&beside, text).map_err(|error| failed(&error))?;
        fs::rename(&beside, file).map_err(|error| failed(&error))
    }
}
