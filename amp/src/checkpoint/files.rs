//! Files that are on the disk when they are written, and errors that name them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::AmpError;

pub(super) fn not_written(path: &Path, error: &dyn std::fmt::Display) -> AmpError {
    AmpError::Io {
        action: "cannot write",
        path: path.display().to_string(),
        reason: error.to_string(),
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, AmpError> {
    fs::read(path).map_err(|error| io_error("cannot read", path, &error))
}

pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), AmpError> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| io_error("cannot write", path, &error))
}

pub(super) fn remove(folder: &Path) -> Result<(), AmpError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(io_error("cannot remove", folder, &error))
        }
        _ => Ok(()),
    }
}

/// Makes a rename or a new file durable; Windows has no such thing for folders.
pub(super) fn sync_folder(folder: &Path) -> Result<(), AmpError> {
    if cfg!(windows) {
        return Ok(());
    }
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|error| io_error("cannot flush", folder, &error))
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
