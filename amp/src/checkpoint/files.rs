//! Files that are on the disk when they are written, and errors that name them.

use std::io;
use std::path::Path;

use burn_lean_reparam::Files;

use crate::AmpError;

/// Fails with [`AmpError::Io`].
pub(super) const FILES: Files<AmpError> = Files(io_error);

pub(super) fn not_written(path: &Path, error: &dyn std::fmt::Display) -> AmpError {
    AmpError::Io {
        action: "cannot write",
        path: path.display().to_string(),
        reason: error.to_string(),
    }
}

pub(super) fn io_error(action: &'static str, path: &Path, error: &io::Error) -> AmpError {
    AmpError::Io {
        action,
        path: path.display().to_string(),
        reason: error.to_string(),
    }
}

pub(super) fn damaged(path: &Path, error: &dyn std::fmt::Display) -> AmpError {
    AmpError::Record {
        what: path.display().to_string(),
        reason: error.to_string(),
    }
}
