//! Files that are complete or not there.

use std::io;
use std::path::Path;

use burn_lean_reparam::Files;

use crate::PruneError;

/// Fails with [`PruneError::Io`].
pub(crate) const FILES: Files<PruneError> = Files(io_error);

/// [`PruneError::Io`].
pub(crate) fn io_error(action: &'static str, path: &Path, error: &io::Error) -> PruneError {
    PruneError::Io {
        action,
        path: path.display().to_string(),
        reason: error.to_string(),
    }
}
