//! Files and folders that are complete or not there.

use std::fs;
use std::path::Path;

use burn_lean_reparam::Files;

use crate::RecipeError;

/// Fails with [`RecipeError::Io`].
pub(crate) const FILES: Files<RecipeError> =
    Files(|action, path, error| RecipeError::io(action, path, error));

pub(crate) fn create_folder(path: &Path) -> Result<(), RecipeError> {
    fs::create_dir_all(path).map_err(|error| RecipeError::io("cannot make the folder", path, error))
}
