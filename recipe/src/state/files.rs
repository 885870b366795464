//! Files and folders that are complete or not there.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::RecipeError;

/// Writes a file so that `path` always holds a complete one, the old or the new.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), RecipeError> {
    replace(path, |partial| write_plain(partial, bytes))
}

/// Has a file written elsewhere, and puts it in its place when it is complete.
pub(crate) fn replace<E: Into<RecipeError>>(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), RecipeError> {
    let mut name = std::ffi::OsString::from(format!("partial-{}-", std::process::id()));
    name.push(path.file_name().unwrap_or_default());
    let partial = path.with_file_name(name);
    let failed = |error| RecipeError::io("cannot write", path, error);
    let written = write(&partial).map_err(Into::into).and_then(|()| {
        let file = File::open(&partial).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        fs::rename(&partial, path).map_err(failed)?;
        flush(path.parent().unwrap_or(Path::new(".")))
    });
    if written.is_err() {
        // What could not be written is of no use; that it cannot be removed either is no news.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Writes a file and flushes it.
pub(crate) fn write_plain(path: &Path, bytes: &[u8]) -> Result<(), RecipeError> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| RecipeError::io("cannot write", path, error))
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, RecipeError> {
    fs::read(path).map_err(|error| RecipeError::io("cannot read", path, error))
}

pub(crate) fn create_folder(path: &Path) -> Result<(), RecipeError> {
    fs::create_dir_all(path).map_err(|error| RecipeError::io("cannot make the folder", path, error))
}

/// Renames a folder, for good.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), RecipeError> {
    fs::rename(from, to).map_err(|error| RecipeError::io("cannot rename", from, error))?;
    flush(to.parent().unwrap_or(Path::new(".")))
}

/// Removes a folder that need not be there.
pub(crate) fn remove_folder(path: &Path) -> Result<(), RecipeError> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(RecipeError::io("cannot remove", path, error)),
    }
}

/// Makes what was renamed in a folder durable, where the system can.
pub(crate) fn flush(folder: &Path) -> Result<(), RecipeError> {
    let folder = match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    };
    // Windows opens no folder as a file, and has its names on disk after a rename.
    if cfg!(unix) {
        let flushed = File::open(folder).and_then(|folder| folder.sync_all());
        flushed.map_err(|error| RecipeError::io("cannot flush", folder, error))?;
    }
    Ok(())
}
