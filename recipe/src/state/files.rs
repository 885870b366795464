//! Files and folders that are complete or not there.

use burn_lean_reparam::Files;

use crate::RecipeError;

/// Fails with [`RecipeError::Io`].
pub(crate) const FILES: Files<RecipeError> =
    Files(|action, path, error| RecipeError::io(action, path, error));
