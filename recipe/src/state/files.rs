//! Files and folders that are complete or not there.

use std::fs;
use std::path::Path;

use burn_lean_reparam::Files;

use crate::RecipeError;

/// Fails with [`RecipeError::Io`].
pub(crate) const FILES: Files<RecipeError> =
    Files(|action, path, error| RecipeError::io(action, path, error));

/// Makes the folder, and writes a file there, so that one that takes none is not found out at the end.
pub(crate) fn create_folder(path: &Path) -> Result<(), RecipeError> {
    fs::create_dir_all(path)
        .map_err(|error| RecipeError::io("cannot make the folder", path, error))?;
    let probe = path.join(".written");
    fs::write(&probe, [])
        .and_then(|()| fs::remove_file(&probe))
        .map_err(|error| RecipeError::io("cannot write into the folder", path, error))
}
